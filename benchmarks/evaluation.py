"""Evaluation on the 10,000 test images of CIFAR-10, against the bare forward pass of its network.

Ours is `evaluate.evaluate` for one weights file, from the folder of the data to evaluation.json:
checking hashes, reading weights, computing metrics. The bare pass has network and images in memory,
and keeps the logits; batch size and threads are equal. Both run in this process, without the start
of Python and the import of torch, and take turns; a ratio is the median of the rounds' ratios.
"""

import contextlib
import io
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measured import Measured

import evaluate
from classifier.models import weights
from classifier.models.classifier import Classifier, build, images_sums, moments
from manynodes.data.folder import DataFolder
from manynodes.ranks.process_group import Process, process_group

BATCH_SIZE = 500  # the default of evaluate.py
TIMES = 9


def measure(data: Path, work: Path) -> Iterator[Measured]:
    torch.manual_seed(0)
    classifier = build("airbench", (32, 64, 64), 10)
    first = torch.tensor(DataFolder.read(data).split("train")[0][:2000])
    classifier.fit(*moments(images_sums(first), first), first)
    weights.write(classifier.state_dict(), classifier.description, work / "model.safetensors")
    images = torch.tensor(DataFolder.read(data).split("test")[0])
    with process_group("cpu") as process:
        rounds = [(whole(data, work, process), bare(classifier, images)) for _ in range(TIMES)]
    ours, forward = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    ratio = statistics.median(whole / bare for whole, bare in rounds)
    details = {
        "seconds": ours,
        "forward_seconds": forward,
        "threads": torch.get_num_threads(),
        "batch_size": BATCH_SIZE,
        "times": TIMES,
    }
    yield Measured(
        "evaluating 10,000 images, airbench",
        "the bare forward pass",
        ratio,
        most=1.15,
        details=details,
    )


def whole(data: Path, work: Path, process: Process) -> float:
    """Seconds of an evaluation."""
    files = ["--data", data, "--model", work / "model.safetensors"]
    files += ["--output", work / "evaluation.json", "--batch-size", BATCH_SIZE]
    args = evaluate.options().parse_args([*map(str, files)])
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        evaluate.evaluate(args, process)
    return time.perf_counter() - start


@torch.no_grad()
def bare(classifier: Classifier, images: torch.Tensor) -> float:
    """Seconds of the forward pass."""
    classifier.eval()
    start = time.perf_counter()
    torch.cat([classifier(batch) for batch in torch.split(images, BATCH_SIZE)])
    return time.perf_counter() - start
