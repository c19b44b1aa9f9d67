"""What is computed in a step and at the end of an epoch, and by which schedule."""

import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from ddp.config import Run
from ddp.models import Classifier
from ddp.process_group import Process, all_reduce

VALIDATION_BATCH = 500


def make_optimizer(run: Run, classifier: Classifier) -> torch.optim.Optimizer:
    groups = classifier.parameter_groups(run.weight_decay)
    if run.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=run.learning_rate)
    return torch.optim.SGD(groups, lr=run.learning_rate, momentum=run.momentum, nesterov=run.momentum > 0)


def learning_rate(run: Run, steps_per_epoch: int, done: int) -> float:
    """The learning rate of the step after `done` steps: up to the peak over the warm-up's share of all steps, then down towards 0."""
    steps = run.epochs * steps_per_epoch
    peak = run.warmup * steps
    # In the middle of its step, so that neither the first nor the last step is taken with a rate of 0.
    now = done + 0.5
    return run.learning_rate * (now / peak if now < peak else (steps - now) / (steps - peak))


class LargestGradient:
    """The largest absolute value in this rank's own gradient of a step. Infinities and nan show in it, and on which rank they arose.

    Once the gradients are averaged over the ranks they are bad on all of them; so it looks at each bucket of DDP's just before.
    """

    def __init__(self, classifier: nn.Module, world_size: int) -> None:
        self.parameters = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
        self.world_size = world_size
        self.seen: list[Tensor] = []

    def average(self, _state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """DDP's communication hook: what DDP does without one, bit for bit, after a look at the bucket."""
        gradient = bucket.buffer()
        self.seen.append(torch.linalg.vector_norm(gradient, ord=math.inf))
        gradient.mul_(1 / self.world_size)
        return dist.all_reduce(gradient, async_op=True).get_future().then(lambda future: future.value()[0])

    def take(self) -> Tensor:
        """Of the step just done; scalar, on the device."""
        if self.world_size == 1:
            return get_total_norm([p.grad for p in self.parameters if p.grad is not None], math.inf)
        seen, self.seen = self.seen, []
        return torch.stack(seen).amax()


def distributed(classifier: Classifier, world_size: int, sample: tuple[Tensor, Tensor]) -> tuple[nn.Module, LargestGradient]:
    """The network to be trained, and what watches its gradients.

    Args:
        sample: a few images and labels, in the form that the network is trained on.
    """
    largest = LargestGradient(classifier, world_size)
    if world_size == 1:
        return classifier, largest
    # The name that torch 2.11 knows as well.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
    # Statistics of BatchNorm are averaged once an epoch, below, instead of being broadcast in every step.
    network = DistributedDataParallel(classifier, broadcast_buffers=False)
    network.register_comm_hook(None, largest.average)
    # After the first backward pass of a process DDP puts the gradients into other buckets, and with them changes the order in which
    # those of three or more ranks are added. A resumed training would differ in its first step: so that step comes before all, here.
    before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    with torch.random.fork_rng(devices=[sample[0].device] if sample[0].is_cuda else []):
        F.cross_entropy(network(sample[0]), sample[1]).backward()
    classifier.zero_grad()
    classifier.load_state_dict(before)
    largest.seen.clear()
    return network, largest


def step(network: nn.Module, optimizer: torch.optim.Optimizer, lr: float, images: Tensor, labels: Tensor, run: Run, batch: int,
         largest: LargestGradient) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One optimizer step.

    Args:
        images, labels: this rank's share of a global batch of size `batch`.

    Returns:
        This rank's sums of loss and of correct predictions, float64 (2,), and the largest value in its own gradient, scalar; both still on
        the device.
    """
    logits = network(images)
    loss = F.cross_entropy(logits, labels, label_smoothing=run.label_smoothing, reduction="sum")
    # DDP averages gradients over ranks; this makes the average that of the global batch even if the shares differ in size.
    (loss * (run.world_size / batch)).backward()
    gradient = largest.take()
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return torch.stack((loss.double(), (logits.argmax(1) == labels).sum().double())), gradient


@torch.no_grad()
def average_batchnorm(classifier: nn.Module, world_size: int) -> None:
    """Give all ranks the mean of their running statistics, so that what is saved has seen all the images."""
    statistics = [buffer for name, buffer in classifier.named_buffers() if name.endswith(("running_mean", "running_var"))]
    if world_size > 1 and statistics:
        flat = all_reduce(torch.cat(statistics)) / world_size
        for buffer, mean in zip(statistics, flat.split([len(s) for s in statistics]), strict=True):
            buffer.copy_(mean)


@torch.no_grad()
def validate(classifier: nn.Module, images: Tensor, labels: Tensor, process: Process) -> tuple[float | None, float | None]:
    """Loss and accuracy over all held-out images: sums over ranks, divided once. None, None where none are held out."""
    if not len(labels):
        return None, None
    classifier.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=process.device)
    for chunk in torch.arange(len(labels), device=process.device).split(VALIDATION_BATCH)[process.rank :: process.world_size]:
        logits = classifier(images[chunk])
        loss = F.cross_entropy(logits, labels[chunk], reduction="none").double().sum()
        totals += torch.stack((loss, (logits.argmax(1) == labels[chunk]).sum().double()))
    loss_sum, correct = all_reduce(totals).tolist()
    return loss_sum / len(labels), correct / len(labels)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of this process's random generators, by device type; networks with dropout draw from them."""
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
