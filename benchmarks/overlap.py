"""Overlap of the gradients' all-reduce with the backward pass: a profile of two gloo processes.

`loss.backward()` returns when all gradients are summed, so its time span contains every all-reduce.
Computing is the span from its start to the end of the last gradient that autograd computes; the
part of the all-reduces after that is waiting time.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from classifier.models.classifier import Classifier, build
from classifier.training.gradients import Gradients, distributed
from manynodes.experiment.config import Run, read_run
from manynodes.ranks.memory import keep_freed_memory

PROCESSES = 2
STEPS = 5
BATCH = 32  # of each process
ONE_BUCKET_MB = 1000.0
# Ours; the same buckets without our hook; and all gradients in one bucket, without any overlap.
WAYS = ("ours", "without our hook", "one bucket")


def profiled(work: Path) -> dict[str, dict[str, Any]]:
    """The profile of each way to add gradients, see `share_hidden`."""
    spawn(process, (str(work),), PROCESSES)
    return json.loads((work / "overlap.json").read_text())


def process(rank: int, work: str) -> None:
    """One of the processes; the first writes overlap.json into the folder, and a trace of each way,
    for ui.perfetto.dev.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Named for those who started it: a store that was used before would answer with the processes
    # of that time.
    store = FileStore(f"{work}/overlap-{os.getppid()}.store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    given = {"model": "resnet18_imagenet", "nproc_per_node": PROCESSES, "device": "cpu"}
    run = read_run(json.dumps(given | {"precision": "fp32"}))
    torch.manual_seed(rank)
    images, labels = (
        torch.randint(256, (BATCH, 32, 32, 3), dtype=torch.uint8),
        torch.randint(10, (BATCH,)),
    )
    found = {}
    for way in WAYS:
        classifier = build(run.model, run.widths, 10)
        network, bucket_mb = networks(way, run, classifier, images, labels)
        for _ in range(2):
            step(network, images, labels)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            seconds = [step(network, images, labels) for _ in range(STEPS)]
        profiler.export_chrome_trace(f"{work}/{way.replace(' ', '-')}-{rank}.json")
        found[way] = {
            "bucket_mb": bucket_mb,
            "step_ms": round(1e3 * median(seconds), 1),
        } | share_hidden(profiler.events() or [])
    if rank == 0:
        Path(work, "overlap.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def networks(
    way: str, run: Run, classifier: Classifier, images: torch.Tensor, labels: torch.Tensor
) -> tuple[nn.Module, float]:
    """The classifier as trained in each way, and the size of its buckets in MB."""
    if way == "ours":
        return distributed(run, classifier, [(images, labels)])[0], Gradients(
            run, classifier
        ).bucket_mb
    gradients = Gradients(run, classifier)
    bucket_mb = gradients.bucket_mb if way == "without our hook" else ONE_BUCKET_MB
    network = DistributedDataParallel(classifier, broadcast_buffers=False, bucket_cap_mb=bucket_mb)
    if way == "one bucket":
        network.register_comm_hook(None, gradients.add)
    return network, bucket_mb


def step(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Seconds of one forward and backward pass. Both processes start together."""
    dist.barrier()
    start = time.perf_counter()
    loss = F.cross_entropy(network(images), labels)
    with record_function("backward"):
        loss.backward()
    network.zero_grad()
    return time.perf_counter() - start


def share_hidden(events: Sequence[Any]) -> dict[str, float]:
    """Medians over the steps of a profile: the overlapped share of the all-reduces, and
    milliseconds.

    An all-reduce lasts from its request to its end; time with several all-reduces counts once.
    """
    steps = []
    for backward in (event for event in events if event.name == "backward"):
        begin, end = backward.time_range.start, backward.time_range.end
        inside = [event for event in events if begin <= event.time_range.start <= end]
        computed = max(
            e.time_range.end
            for e in inside
            if "evaluate_function" in e.name and "AccumulateGrad" not in e.name
        )
        reduces = [
            (e.time_range.start, e.time_range.end) for e in inside if e.name == "gloo:all_reduce"
        ]
        whole = covered(reduces)
        hidden = covered([(a, min(b, computed)) for a, b in reduces if a < computed])
        steps.append(
            (
                hidden / whole,
                len(reduces),
                (computed - begin) / 1e3,
                whole / 1e3,
                (end - computed) / 1e3,
            )
        )
    keys = ("hidden", "all_reduces", "computing_ms", "reducing_ms", "waiting_ms")
    return {
        key: round(median(values), 3)
        for key, values in zip(keys, zip(*steps, strict=True), strict=True)
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of the spans."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length
