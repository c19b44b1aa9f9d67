"""From the ranks' gradients to their sum: DDP's buckets, compression, and finite checks."""

import os
import re
import socket
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from classifier.training.losses import LOSSES, UNWEIGHTED
from manynodes.base.caches import is_noexec
from manynodes.base.errors import Refusal, one_line
from manynodes.experiment.config import Run

# DDP sends a full bucket of gradients during the backward pass. Several buckets overlap with it,
# but small ones only add latency; in MB of 2**20 bytes. The 25 MB of DDP's default hold most
# networks here completely.
BUCKETS = 4
BUCKET_MB = (1.0, 25.0)
# Of autocast, by precision.
TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# In what a compiler says.
FATAL = re.compile(r"\b(fatal|error)\b *:")
NO_MEMORY = re.compile("Cannot allocate memory|out of memory|Killed signal")
# Triton builds a C module for Python; what its compiler says then is in the log of the rank alone.
NEEDED = {
    "python3-dev (Python's headers)": re.compile(r"Python\.h"),
    "g++ and python3-dev (Python's headers)": re.compile(
        r"No working C\+\+ compiler|find C compiler|Compiler: \S+ is not found"
        r"|/(gcc|g\+\+|cc|c\+\+|clang|clang\+\+)'.*non-zero exit status"
    ),
}


class Gradients:
    """This rank's gradients before they are summed, and their total.

    Infinities and NaN appear in the total of the rank where they arose. After the sum they are on
    all ranks; therefore each bucket is checked just before it.
    """

    def __init__(self, run: Run, classifier: nn.Module) -> None:
        self.parameters = [
            parameter for parameter in classifier.parameters() if parameter.requires_grad
        ]
        self.world_size = run.world_size
        self.sent_as = torch.bfloat16 if run.gradient_compression == "bf16" else torch.float32
        self.totals: list[Tensor] = []

    @property
    def bucket_mb(self) -> float:
        """Size of a bucket: an equal part of the network, at least the minimum, below which
        DDP cannot be compiled.
        """
        least, most = BUCKET_MB
        size = sum(p.numel() * p.element_size() for p in self.parameters) / 2**20
        parts = max(1, min(BUCKETS, int(size / least)))
        return min(max(size / parts, least), most)

    def add(self, _state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """DDP's communication hook: the sum over the ranks instead of DDP's mean."""
        gradient = bucket.buffer()
        self.totals.append(gradient.sum())
        sent = gradient.to(self.sent_as)
        return (
            dist.all_reduce(sent, async_op=True)
            .get_future()
            .then(lambda future: gradient.copy_(future.value()[0]))
        )

    def take_total(self) -> Tensor:
        """A number that is finite only if every gradient of the last step is: scalar, on the
        device.
        """
        if self.world_size == 1:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            if gradients[0].is_cuda:
                # In one or two kernels: on a GPU their number costs time.
                return get_total_norm(gradients, 1.0)
            # For the 11 million gradients of a ResNet-18 this took 1 of the 125 ms of a step on a
            # CPU; minimum and maximum took 6, the norm 15.
            self.totals = [gradient.sum() for gradient in gradients]
        totals, self.totals = self.totals, []
        if not totals:
            raise Refusal(
                "model: this pass did not use every parameter, which several processes cannot "
                "train; use all of them in every pass, those that are skipped times 0"
            )
        return torch.stack(totals).sum()


def is_expanded(buffer: Tensor) -> bool:
    """Whether some of its numbers are one in memory: it is of constants, and cannot be written."""
    sides = zip(buffer.stride(), buffer.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in sides)


def put_back(buffer: Tensor, before: Tensor) -> None:
    """Copy an earlier value into a buffer. If it is expanded, nothing can have changed it."""
    if not is_expanded(buffer):
        buffer.copy_(before)


def distributed(
    run: Run, classifier: nn.Module, first: Sequence[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, Gradients]:
    """The network to train, with its gradients.

    Args:
        first: images and labels for the passes before the first step, in the form used in training;
            if the network is compiled, of every batch size that occurs.

    Raises:
        Refusal: it cannot be compiled here.
    """
    gradients = Gradients(run, classifier)
    network: nn.Module = classifier
    if run.world_size > 1:
        # torch 2.11 knows this name too.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
        # Of 1 x 1 filters in a GPU's memory format: a small copy in each step.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        # BatchNorm statistics are averaged once per epoch instead of broadcast in every step.
        network = DistributedDataParallel(
            classifier, broadcast_buffers=False, bucket_cap_mb=gradients.bucket_mb
        )
        network.register_comm_hook(None, gradients.add)
    if run.compile != "none":
        # A resumed training must compile the same code: none for dynamic sizes, which would appear
        # with the second size, and none selected by timing.
        options: dict[str, Any] = {
            "deterministic": True,
            "triton.cudagraphs": run.compile == "cuda_graphs",
        }
        network = cast(nn.Module, torch.compile(network, dynamic=False, options=options))
        # A graph is recorded when its code runs for the second time.
        first = [*first, *first]
    # After the first backward pass, DDP rebuilds its buckets, which changes the order of sums over
    # three or more ranks. A resumed training would differ in its first step; therefore one pass
    # comes before all steps. Compilation happens here too, before the clock of the first epoch.
    if network is not classifier:
        with unchanged(classifier), refused_if_not_compiled(run):
            for images, labels in first:
                with (
                    torch.random.fork_rng(devices=[images.device] if images.is_cuda else []),
                    autocast(run, images),
                ):
                    LOSSES[run.loss](network(images).float(), labels, 0.0, UNWEIGHTED).backward()
                unused = [
                    name
                    for name, parameter in classifier.named_parameters()
                    if parameter.requires_grad and parameter.grad is None
                ]
                if unused:
                    raise Refusal(
                        f"model: {run.model} does not use {unused[0]} in every pass, which several "
                        "processes cannot train; set its requires_grad to False, or use it times 0"
                    )
                classifier.zero_grad()
        gradients.totals.clear()
    return network, gradients


@contextmanager
def unchanged(classifier: nn.Module) -> Iterator[None]:
    """Undo what passes through a network do to it, to buffers that are in no state_dict too; but
    those that they make, or give another size.
    """
    state = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    buffers = {
        name: buffer.clone() for name, buffer in classifier.named_buffers() if name not in state
    }
    yield
    classifier.load_state_dict(state)
    for name, buffer in classifier.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            put_back(buffer, buffers[name])


@contextmanager
def refused_if_not_compiled(run: Run) -> Iterator[None]:
    """Say in one line why a network cannot be compiled.

    Raises:
        torch.OutOfMemoryError: a GPU's memory is full, which is no matter of the compiler.
    """
    try:
        yield
    except Exception as error:
        # Imported by then, because it takes a second and a half. A kernel may be built when it is
        # first called.
        of_compiler = type(error).__module__.startswith(("torch._inductor.", "triton."))
        if run.compile == "none" or not (
            of_compiler or isinstance(error, torch._dynamo.exc.BackendCompilerFailed)
        ):
            raise
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, torch.OutOfMemoryError):
            raise inner from None
        raise Refusal(f"compile: {run.compile} {why_not_compiled(inner)}") from None


def why_not_compiled(error: Exception) -> str:
    """What a compiler lacks on this host, and what helps."""
    here, text = socket.gethostname(), str(error)
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    with suppress(OSError):
        if is_noexec(Path(cache)):
            return (
                f"loads what it compiles from {cache}, which is mounted noexec on {here}; set "
                "TORCHINDUCTOR_CACHE_DIR to a folder of yours on another disk, or use compile: none"
            )
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    first = lines[-1] if lines[0].endswith(":") else lines[0]
    said = one_line(next(filter(FATAL.search, lines), first), 60)
    if isinstance(error, MemoryError) or NO_MEMORY.search(text):
        whose, remedy = "", "ask for more"
        if re.search(r"CUDA\W[^\n]*out of memory", text):
            whose, remedy = "a GPU of ", "use a smaller global_batch_size"
        return f"fills the memory of {whose}{here}: {said}; {remedy}, or use compile: none"
    for needs, pattern in NEEDED.items():
        if pattern.search(text):
            return (
                f"needs {needs} on every node; {here} says {said}; load a module, or use compile: "
                "none"
            )
    return f"failed on {here}: {said}; use compile: none"


@contextmanager
def autocast(run: Run, images: Tensor) -> Iterator[None]:
    """The context for the run's precision, which is not `auto` any more, on the device of the
    images.

    Raises:
        Refusal: an operation of the network takes no numbers of this type.
    """
    kind = TYPES[run.precision]
    try:
        with torch.autocast(images.device.type, kind, enabled=kind is not None):
            yield
    except RuntimeError as error:
        if kind is None or not re.search("BFloat16|Half", str(error)):
            raise
        raise Refusal(
            f"model: {run.model} does not compute in {run.precision}: "
            f"{one_line(str(error), 90)}; use precision: fp32"
        ) from None
