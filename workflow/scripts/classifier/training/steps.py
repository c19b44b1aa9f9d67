"""The computation of a step and of the end of an epoch."""

import random
from contextlib import nullcontext
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from classifier.models.classifier import Classifier
from classifier.pixels.batches import Examples, images_per_pass
from classifier.training.gradients import Gradients, autocast, is_expanded
from classifier.training.losses import UNWEIGHTED, Weights, mixed_loss
from classifier.training.timing import Clock
from manynodes.experiment.config import Run
from manynodes.ranks.device import numbers
from manynodes.ranks.process_group import Process, all_reduce


class Stepper:
    """Takes a run's optimizer steps on this rank.

    Attributes:
        clock: the seconds of this rank's own work.
        scaler: prevents fp16's gradients from vanishing; without effect in other precisions.
    """

    def __init__(
        self,
        run: Run,
        network: nn.Module,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self.run, self.network, self.gradients, self.optimizer = run, network, gradients, optimizer
        self.clock = Clock(device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=run.precision == "fp16")

    def step(
        self,
        lr: float,
        images: Tensor,
        labels: Tensor,
        batch: int,
        weights: Weights = UNWEIGHTED,
        kept: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step, without any wait of the CPU for a GPU.

        Args:
            images, labels: this rank's share of a global batch of size `batch`.
            weights: of the share, see `batch_weights`.
            kept: of mixed images, see `mixed_loss`.

        Returns:
            This rank's sums of loss and of correct predictions, float64 (2,), and the total of its
            own gradient, see `Gradients.take_total`; both still on the device.
        """
        run = self.run
        many = run.micro_batches
        parts = zip(
            *(each.tensor_split(many) for each in (images, labels)), weights.split(many),
            strict=True,
        )  # fmt: skip
        sums = [
            self.add_gradient(pixels, named, batch, of_part, kept, last=number == many)
            for number, (pixels, named, of_part) in enumerate(parts, 1)
        ]
        total = self.gradients.take_total()
        if self.scaler.is_enabled():
            # It searches for the largest scale without infinities, and skips steps that have some.
            total = torch.zeros_like(total)
        if run.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.gradients.parameters, run.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["rate"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return reduce(torch.add, sums), total

    def add_gradient(
        self,
        images: Tensor,
        labels: Tensor,
        batch: int,
        weights: Weights,
        kept: float,
        last: bool,
    ) -> Tensor:
        """Add the gradient of a part of this rank's share to that of the parts before.

        Args:
            last: of the share; then the gradients of the ranks are summed too.

        Returns:
            The part's sums, see `step`.
        """
        run = self.run
        waits = run.world_size > 1 and not last
        with cast(DistributedDataParallel, self.network).no_sync() if waits else nullcontext():
            with self.clock.forward_pass(), autocast(run, images):
                logits = self.network(images).float()
                loss = mixed_loss(run.loss, logits, labels, run.label_smoothing, weights, kept)
            # The sum of the ranks' gradients is that of the global batch's mean loss, even if
            # shares differ in size.
            self.scaler.scale(loss / batch).backward()
        with torch.no_grad():
            own = labels if labels.ndim == 1 else labels[:, 0]
            return torch.stack((loss.double(), (logits.argmax(1) == own).sum().double()))


def is_statistic(name: str) -> bool:
    """Whether a buffer is one of BatchNorm's running statistics."""
    return name.endswith(("running_mean", "running_var"))


@torch.no_grad()
def average_batchnorm(classifier: nn.Module, world_size: int) -> None:
    """Average the running statistics of all ranks, so that the saved ones cover all images."""
    statistics = [
        buffer
        for module in classifier.modules()
        for name, buffer in module.named_buffers(recurse=False)
        # Those of frozen layers are equal already, and the mean of three would round them.
        if module.training and is_statistic(name)
    ]
    if world_size > 1 and statistics:
        # A user's own layer may keep them in another shape.
        flat = all_reduce(torch.cat([s.flatten() for s in statistics])) / world_size
        means = flat.split([s.numel() for s in statistics])
        for buffer, mean in zip(statistics, means, strict=True):
            buffer.copy_(mean.view_as(buffer))


@torch.no_grad()
def share_buffers(classifier: Classifier, process: Process) -> None:
    """Give all ranks the other buffers of rank 0, which the weights file has: a layer of the user's
    may change them in each step, and each rank validates a part of the images.
    """
    buffers = [
        buffer
        for name, buffer in classifier.network.named_buffers()
        # Those of BatchNorm are equal already.
        if not is_statistic(name)
        and not name.endswith("num_batches_tracked")
        and buffer.numel()
        and not is_expanded(buffer)
    ]
    if process.world_size > 1 and buffers:
        flat = torch.cat([buffer.flatten().contiguous().view(torch.uint8) for buffer in buffers])
        # A sum with zeros, of bytes, because not every type can be sent.
        mine = all_reduce(flat if process.first else flat.zero_())
        parts = mine.split([buffer.numel() * buffer.element_size() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            # A part may begin where no number of this type can.
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


@torch.no_grad()
def validate(
    classifier: nn.Module, held_out: Examples, size: tuple[int, int], process: Process
) -> tuple[float | None, float | None]:
    """Loss and accuracy over the held-out set: sums over ranks, divided once. None, None if it is
    empty.

    Args:
        size: height and width of the middle of an image that the network sees.
    """
    labels = held_out.labels
    if not len(labels):
        return None, None
    classifier.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=process.device)
    count = images_per_pass(held_out.images, process.device.type)
    for chunk, pixels in held_out.passes(count, size, process.rank, process.world_size):
        logits = classifier(pixels)
        loss = F.cross_entropy(logits, labels[chunk], reduction="none").double().sum()
        totals += torch.stack((loss, (logits.argmax(1) == labels[chunk]).sum().double()))
    loss_sum, correct = numbers(all_reduce(totals))
    return loss_sum / len(labels), correct / len(labels)


def seed_generators(seed: int) -> None:
    """Seed the generators of `random_state`; a user's network may draw its weights from them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of this process's random generators: torch's by device type, which dropout uses,
    Python's and numpy's, which a user's network may use.
    """
    version, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state()
    kind, keys, *rest = of_numpy
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, torch.tensor(keys.tolist()), *rest],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators as `random_state` found them."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.tolist(), *rest))
