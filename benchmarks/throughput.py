"""Training throughput against the bare network on one batch.

Ours is `Training.train_epoch`, alone in this process, with all CPUs as threads, in images per
second as in metrics.csv: with its plan of the epoch, crops, normalisation, sums and votes. The bare
loop has only the network's forward and backward pass and the optimizer's step, on normalised float
images. A short epoch of ours and as many bare steps take turns; a ratio is the median of the
rounds' ratios.
"""

import copy
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measured import Measured
from torch.nn import functional as F
from tqdm import tqdm

from classifier.states.saver import Saver
from classifier.training.loop import Training
from classifier.training.optimizers import make_optimizer
from manynodes.data.folder import DataFolder
from manynodes.data.staging import stage
from manynodes.experiment.config import Run, read_run
from manynodes.ranks.process_group import Process, process_group
from manynodes.ranks.stopping import Stopping

CPUS = len(os.sched_getaffinity(0))
SECONDS = 10  # for the rounds of one model
FEWEST_ROUNDS = 3
IMAGES = 50_000
# For timing only: low enough that no network diverges on the few images that it sees repeatedly.
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """A network, and its work in a round: `steps` of `batch` images."""

    name: str
    batch: int
    steps: int
    keys: dict[str, Any] = field(default_factory=dict)

    def run(self, **keys: Any) -> Run:
        """A run whose epoch has so many steps: all other images are held out."""
        given = {
            "dataset": "cifar10",
            "epochs": 100_000,
            "global_batch_size": self.batch,
            "learning_rate": LEARNING_RATE,
            "validation_fraction": 1 - self.batch * self.steps / IMAGES,
            "device": "cpu",
            "precision": "fp32",
        }
        return read_run(json.dumps(given | self.keys | keys))


# A round of a network takes one or two seconds on two cores.
CASES = (
    Case("airbench", 250, 20, {"model": "airbench", "widths": [32, 64, 64]}),
    Case("airbench94", 250, 4, {"model": "airbench", "widths": [64, 256, 256]}),
    Case("airbench96", 64, 2, {"model": "airbench96", "widths": [128, 512, 512]}),
    Case("resnet9", 128, 2, {"model": "resnet9"}),
    Case("resnet18", 32, 2, {"model": "resnet18"}),
    Case("resnet18_imagenet", 128, 5, {"model": "resnet18_imagenet"}),
)


def measure(data: Path, work: Path) -> Iterator[Measured]:
    with process_group("cpu") as process:
        torch.set_num_threads(CPUS)
        for case in CASES:
            yield against_bare(case, Ours(case, process, data, work))


class Ours:
    """Our training, one epoch at a time."""

    def __init__(self, case: Case, process: Process, data: Path, work: Path) -> None:
        folder = DataFolder.read(data)
        self.training = Training(case.run(), process, folder, stage(folder, []), "")
        self.stop, self.show = Stopping(None), tqdm(disable=True)
        self.saver = Saver(process, work, None, 300)
        self.images_per_second()  # the first steps of a network are slower

    def images_per_second(self) -> float:
        """Of one more epoch, as in `Training.end_epoch`, but without validation."""
        training = self.training
        training.step, training.seconds = 0, 0.0
        training.train_epoch(self.stop, self.saver, self.show)
        training.epoch += 1
        return len(training.labels) / training.seconds


class Bare:
    """The network of a training and its optimizer, on its first batch in memory."""

    def __init__(self, case: Case, training: Training) -> None:
        self.run, self.steps = training.run, case.steps
        classifier = copy.deepcopy(training.classifier)
        self.network, self.optimizer = classifier.network, make_optimizer(training.run, classifier)
        pixels = training.shares.take(torch.arange(case.batch))
        # Made contiguous as NHWC, hence in channels_last order, as our own batches are.
        self.images = (
            ((pixels.to(torch.float32) - classifier.mean) / classifier.std)
            .contiguous()
            .permute(0, 3, 1, 2)
        )
        self.labels = training.labels[: case.batch]
        self.images_per_second()

    def images_per_second(self) -> float:
        # Determinism is ours to pay for: it has torch fill all new memory, for one.
        torch.use_deterministic_algorithms(False)
        self.network.train()
        start = time.perf_counter()
        for _ in range(self.steps):
            loss = F.cross_entropy(
                self.network(self.images), self.labels, label_smoothing=self.run.label_smoothing
            )
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        seconds = time.perf_counter() - start
        torch.use_deterministic_algorithms(True, warn_only=True)
        return self.steps * len(self.labels) / seconds


def against_bare(case: Case, ours: Ours) -> Measured:
    bare = Bare(case, ours.training)
    rates: list[tuple[float, float]] = []
    end = time.perf_counter() + SECONDS
    while len(rates) < FEWEST_ROUNDS or time.perf_counter() < end:
        # The first one may find the other's data in the caches.
        if len(rates) % 2:
            rates.append((ours.images_per_second(), bare.images_per_second()))
        else:
            rates.append((bare.images_per_second(), ours.images_per_second())[::-1])
    measured, bares = zip(*rates, strict=True)
    details = {
        "images_per_second": round(median(measured), 1),
        "bare_images_per_second": round(median(bares), 1),
        "rounds": len(rates),
        "batch": case.batch,
        "steps_in_a_round": case.steps,
        "threads": CPUS,
    }
    ratio = median(mine / bare for mine, bare in rates)
    return Measured(
        f"training throughput, {case.name}",
        "forward, backward and optimizer step on one batch in memory",
        ratio,
        0.95,
        None,
        details,
    )
