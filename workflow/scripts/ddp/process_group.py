"""One process among many: who it is, and what all of them do together."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.errors import ERRORS_VARIABLE, Refusal
from ddp.lifetime import end_with_parent

# Long enough for the slowest rank to import torch from a cold network file system, and for a first step on a busy GPU.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Process:
    """This process's place: rank 0 .. world_size - 1, local_rank on its node, and the device it computes on."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextmanager
def process_group(device: str) -> Iterator[Process]:
    """Join the processes that torchrun (or any launcher that sets RANK, LOCAL_RANK and WORLD_SIZE) started; alone without them.

    Args:
        device: `cpu`, `cuda`, or `auto`: CUDA where this node has a GPU for each of its processes.

    Raises:
        Refusal: CUDA is asked for and there are too few GPUs.
    """
    rank, local_rank, world_size = (int(os.environ.get(name, default)) for name, default in
                                    (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # fmt: skip
    if ERRORS_VARIABLE in os.environ:
        # Started by `launch`: torchrun gives ranks a session of their own, in which they would outlive it.
        end_with_parent(signal.SIGTERM)
    process = Process(rank, local_rank, world_size, choose_device(device, local_rank))
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
    # The same bits again: on the CPU all operations we use can do it; a GPU lacks it for a few of torchvision's, and says so.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world_size > 1:
        dist.init_process_group("nccl" if process.device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield process
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_device(device: str, local_rank: int) -> torch.device:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < here:
        raise Refusal(f"device: cuda needs a GPU for each of the {here} processes on {socket.gethostname()}; torch sees {gpus}")
    return torch.device("cuda", local_rank) if device != "cpu" and gpus >= here else torch.device("cpu")


def all_reduce(tensor: Tensor) -> Tensor:
    """The sum of the tensor over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather(value: Any, process: Process) -> list[Any]:
    """Every process's value, by rank, on rank 0; an empty list elsewhere."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * process.world_size
    dist.gather_object(value, values if process.first else None)
    return values if process.first else []
