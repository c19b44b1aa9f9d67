"""How the ranks' gradients become one: DDP's buckets, what they are sent as, and what is noticed of them on the way."""

import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from ddp.config import Run
from ddp.errors import Refusal

# DDP sends a bucket of gradients when it is full, while the backward pass goes on: so there are to be some, but none so small, in MB of
# 2**20 bytes, that what is waited for is the network's latency. DDP's own 25 MB hold the whole of most networks here.
BUCKETS = 4
BUCKET_MB = (1.0, 25.0)


class Gradients:
    """This rank's gradients on their way to the others, and their total.

    Infinities and nan show in the total, and on which rank they arose. Once the ranks' gradients are added they are bad on all of them;
    so each bucket of DDP's is added up just before.
    """

    def __init__(self, run: Run, classifier: nn.Module) -> None:
        self.parameters = [parameter for parameter in classifier.parameters() if parameter.requires_grad]
        self.world_size = run.world_size
        self.sent_as = torch.bfloat16 if run.gradient_compression == "bf16" else torch.float32
        self.totals: list[Tensor] = []

    @property
    def bucket_mb(self) -> float:
        """Size of a bucket: the network's in so many equal parts as are not too small. For less than the least DDP cannot be compiled."""
        least, most = BUCKET_MB
        size = sum(p.numel() * p.element_size() for p in self.parameters) / 2**20
        parts = max(1, min(BUCKETS, int(size / least)))
        return min(max(size / parts, least), most)

    def add(self, _state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """DDP's communication hook: the sum over the ranks, where DDP by itself takes the mean."""
        gradient = bucket.buffer()
        self.totals.append(gradient.sum())
        sent = gradient.to(self.sent_as)
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda future: gradient.copy_(future.value()[0]))

    def take_total(self) -> Tensor:
        """Of the step just done, a number that is finite only if every gradient is: scalar, on the device."""
        if self.world_size == 1:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            if gradients[0].is_cuda:
                # All of them in a kernel or two: on a GPU it is their number that costs.
                return get_total_norm(gradients, 1.0)
            # For the 11 million of a ResNet-18, this took 1 ms of a step of 125 ms on a CPU, their least and greatest 6, and their norm 15.
            self.totals = [gradient.sum() for gradient in gradients]
        totals, self.totals = self.totals, []
        return torch.stack(totals).sum()


def distributed(run: Run, classifier: nn.Module, first: Sequence[tuple[Tensor, Tensor]]) -> tuple[nn.Module, Gradients]:
    """The network to be trained, and what becomes of its gradients.

    Args:
        first: images and labels for the passes before all, in the form that it is trained on; where it is compiled, of every size that a
            step has.

    Raises:
        Refusal: it cannot be compiled here.
    """
    gradients = Gradients(run, classifier)
    network: nn.Module = classifier
    if run.world_size > 1:
        # The name that torch 2.11 knows as well.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        # Statistics of BatchNorm are averaged once an epoch instead of being broadcast in every step.
        network = DistributedDataParallel(classifier, broadcast_buffers=False, bucket_cap_mb=gradients.bucket_mb)
        network.register_comm_hook(None, gradients.add)
    if run.compile != "none":
        # A resumed training has to come to the same code: none for any size, which would be made when a second one is met, and none
        # chosen by how long it took.
        options: dict[str, Any] = {"deterministic": True, "triton.cudagraphs": run.compile == "cuda_graphs"}
        network = cast(nn.Module, torch.compile(network, dynamic=False, options=options))
        # A graph is recorded when its code runs for the second time.
        first = [*first, *first]
    # After the first backward pass of a process DDP puts the gradients into other buckets, and with them changes the order in which
    # those of three or more ranks are added. A resumed training would differ in its first step: so that step comes before all, here.
    # What is compiled is compiled here too, before the clock of the first epoch runs.
    if network is not classifier:
        before = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
        with refused_if_not_compiled(run):
            for images, labels in first:
                with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []), autocast(run, images):
                    F.cross_entropy(network(images), labels).backward()
                classifier.zero_grad()
        classifier.load_state_dict(before)
        gradients.totals.clear()
    return network, gradients


@contextmanager
def refused_if_not_compiled(run: Run) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Named only here: its import takes a second and a half.
        if run.compile == "none" or not isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
            raise
        raise Refusal(
            f"compile: {run.compile} needs a C++ compiler such as g++ on every node; {socket.gethostname()} says "
            f"{str(error).splitlines()[0]}; load a module that has one, or use compile: none"
        ) from None


def autocast(run: Run, images: Tensor) -> torch.autocast:
    """The context in which the run's network computes: on the images' device, in the run's precision."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.precision)
    return torch.autocast(images.device.type, kind, enabled=kind is not None)
