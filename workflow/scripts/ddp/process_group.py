"""One process among many: who it is, and what all of them do together."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ddp.errors import Refusal
from ddp.memory import keep_freed_memory
from ddp.network import let_gloo_be_reached, own_address
from ddp.preflight import ANSWER, COME, RankReport, check_sum, join, warnings
from ddp.processor import processor

# Long enough for the first step on a busy GPU; by then the preflight has seen that all are there.
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
    """Join the processes that a launcher started with RANK, LOCAL_RANK and WORLD_SIZE; alone without them.

    Args:
        device: `cpu`, `cuda`, or `auto`: CUDA where this node has a GPU for each of its processes.

    Raises:
        Refusal: CUDA is asked for and there are too few GPUs, or the preflight found something wrong.
    """
    rank, local_rank, world_size = (int(os.environ.get(name, default)) for name, default in
                                    (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))  # fmt: skip
    process = Process(rank, local_rank, world_size, choose_device(device, local_rank))
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
    # The same bits again: on the CPU all operations we use can do it; a GPU lacks it for a few of torchvision's, and says so.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # For finding reads of memory that nobody wrote; it took 3 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # fp32 means fp32: by default a GPU rounds what it convolves to TF32's 10 bits of mantissa.
    torch.backends.cudnn.allow_tf32 = False
    keep_freed_memory()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world_size > 1:
        join_others(process)
    else:
        for line in warnings([report(process)]):
            print(line, flush=True)
    try:
        yield process
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_others(process: Process) -> None:
    """Join twice: for the preflight with a time-out that is short, and then for good with one that is long.

    Raises:
        Refusal: the preflight found something wrong.
    """
    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    here = report(process)
    try:
        store, _, _ = next(rendezvous("env://", timeout=COME))
    except dist.DistError as error:
        raise Refusal(f"preflight: rank 0 cannot be reached at {master} from {here.host}: {error}") from None
    let_gloo_be_reached(os.environ["MASTER_ADDR"], join(store, here, process.world_size))

    def connect(name: str, timeout: timedelta) -> None:
        backend = "nccl" if process.device.type == "cuda" else "gloo"
        own = PrefixStore(name, store)
        # Without the device, NCCL's barrier guesses it from the rank.
        device = process.device if process.device.type == "cuda" else None
        dist.init_process_group(backend, store=own, rank=process.rank, world_size=process.world_size, timeout=timeout, device_id=device)

    try:
        connect("preflight", ANSWER)
        check_sum(process.rank + 1, here, process.world_size)
    except RuntimeError as error:
        raise Refusal(
            f"preflight: the ranks cannot add up over the network, as seen from {here.host} ({here.address}); if nothing else failed, "
            f"name the network to use in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME: {error}"
        ) from None
    dist.destroy_process_group()
    connect("run", TIMEOUT)


def report(process: Process) -> RankReport:
    """This rank, its node and its device."""
    properties = torch.cuda.get_device_properties(process.device) if process.device.type == "cuda" else None
    return RankReport(
        rank=process.rank,
        local_rank=process.local_rank,
        host=socket.gethostname(),
        address=own_address(os.environ.get("MASTER_ADDR", "127.0.0.1")),
        device=str(process.device),
        device_name=properties.name if properties else "",
        device_id=str(properties.uuid) if properties else "",
        threads=torch.get_num_threads(),
        cpus=len(os.sched_getaffinity(0)),
        **processor(),
    )


def choose_device(device: str, local_rank: int) -> torch.device:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < here:
        raise Refusal(f"device: cuda needs a GPU for each of the {here} processes on {socket.gethostname()}; torch sees {gpus}")
    return torch.device("cuda", local_rank) if device != "cpu" and gpus >= here else torch.device("cpu")


def everyone_is_here() -> None:
    """Return once every process has called this."""
    if dist.is_initialized():
        dist.barrier()


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


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every process."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]
