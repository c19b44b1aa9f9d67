"""How many kernels a GPU is given in a step, estimated on a CPU from what torch does.

Each operation that computes counts as one kernel; views and new memory are none. What `compile`
compiles counts differently: its convolutions, matrix products and poolings one each, and all that
lies between two of them, which it fuses, one. A network of many small kernels is bound by the CPU
that starts them, 5 to 10 us each.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measured import Measured
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode
from training import ROOT, read_experiment

from classifier.models.classifier import build, images_sums, moments
from classifier.pixels import batches
from classifier.pixels.shares import Shares
from classifier.training import optimizers
from classifier.training.data import how
from classifier.training.gradients import Gradients
from classifier.training.optimizers import make_optimizer
from classifier.training.steps import Stepper
from manynodes.data.folder import DataFolder
from manynodes.experiment.config import Run
from manynodes.ranks.process_group import Process
from manynodes.ranks.vote import Vote

# The number does not depend on it.
IMAGES = 64
NOT_FUSED = ("convolution", "mm", "pool", "sort", "_foreach")
NO_KERNEL = ("empty", "detach", "_local_scalar_dense", "lift_fresh", "_record_function")
COMPILED = "compiled network"


class Operations(TorchDispatchMode):
    """Notes the operations in it, each with the part of the step that it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.part = "rest"
        self.done: list[tuple[str, str]] = []

    def __torch_dispatch__(
        self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        is_view = any(
            each.alias_info and not each.alias_info.is_write for each in operation._schema.returns
        )
        if not (is_view or name.startswith(NO_KERNEL)):
            # With a factor for each tensor, torch starts a kernel for each.
            single = name == "_foreach_mul_" and operation._overloadname == "List"
            self.done += [(self.part, name)] * (len(args[0]) if single else 1)
        return operation(*args, **(kwargs or {}))

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def of(self, part: str, function: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            with self.within(part):
                return function(*args, **options)

        return noted

    def launches(self) -> Counter[str]:
        """The estimated kernels by part of the step."""
        found: Counter[str] = Counter()
        for part, _ in self.done:
            found[part] += part != COMPILED
        names = [name for part, name in self.done if part == COMPILED]
        for alone, run in groupby(names, lambda name: any(each in name for each in NOT_FUSED)):
            found[COMPILED] += len(list(run)) if alone else 1
        return found


def measure(data: Path, _work: Path) -> Iterator[Measured]:
    (run,) = read_experiment(ROOT / "config" / "airbench94.yaml").runs.values()
    parts = step(run.with_values(precision="bf16", compile="none"), DataFolder.read(data))
    yield Measured(
        "kernels of a step of airbench94.yaml",
        "estimated on a CPU",
        sum(parts.values()),
        most=120,
        details=dict(parts),
    )


def step(run: Run, data: DataFolder) -> Counter[str]:
    """The estimated kernels of one step on a GPU."""
    images, of_images = (array[:IMAGES] for array in data.split("train"))
    labels = torch.from_numpy(of_images.astype("int64"))
    cpu = torch.device("cpu")
    shares = Shares(images, torch.arange(IMAGES).numpy(), how(run, data), cpu, resident=True)
    classifier = build(run.model, run.widths, data.classes)
    first = torch.tensor(images)
    classifier.fit(*moments(images_sums(first), first), first)
    gradients = Gradients(run, classifier)
    optimizer = make_optimizer(run, classifier)
    if isinstance(optimizer, optimizers.Muon):
        optimizer.at_once = True  # as on a GPU
    counted = Operations()
    stepper = Stepper(run, counted.of(COMPILED, classifier), gradients, optimizer, cpu)
    plan = batches.epoch_plan(IMAGES, run.seed, 1, shares.how)

    def total() -> Tensor:  # as on a GPU
        return get_total_norm([e.grad for e in gradients.parameters if e.grad is not None], 1.0)

    def once() -> None:
        ((mine, pixels),) = counted.of("images", list)(
            shares.of_epoch(plan, [torch.arange(IMAGES)])
        )
        sums, gradient = stepper.step(0.1, pixels, labels[mine], IMAGES)
        with counted.within("vote"):
            Vote(Process(0, 0, 1, cpu), None, False, sums[0], gradient)

    with (
        patch.object(Tensor, "backward", counted.of(COMPILED, Tensor.backward)),
        patch.object(optimizer, "step", counted.of("optimizer", optimizer.step)),
        patch.object(gradients, "take_total", counted.of("total of the gradient", total)),
    ):
        once()  # makes the momenta
        with counted:
            once()
    return counted.launches()
