"""One process among many: its place, and collective operations."""

import itertools
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn import functional

from manynodes.base.cpus import usable_cpus
from manynodes.base.environment import Environment, add_to_report
from manynodes.base.errors import Refusal, one_line
from manynodes.base.signing import SIZE, key, signed, verified
from manynodes.base.temporary import exit_at_once
from manynodes.base.timeouts import TIMEOUT
from manynodes.base.tree import Tree, decode, encode
from manynodes.ranks.device import (
    choose_device,
    compute_exactly,
    named,
    numbers,
    on_cpu,
    stay_near,
)
from manynodes.ranks.memory import keep_freed_memory
from manynodes.ranks.network import interface_of, let_gloo_be_reached, local_address
from manynodes.ranks.preflight import ANSWER, COME, RankReport, check_sum, join, warnings
from manynodes.ranks.processor import processor

# Bytes that are broadcast at once: each piece is in memory several times.
PIECE = 64 << 20
# Seconds that the preflight takes at most when all ranks are there. NCCL's bootstrap has no limit,
# and a time-out of its all-reduce ends the process from another thread, without a word of ours.
CONNECT = 120
# All ranks count their exchanges. The number is signed with the value, so an earlier value cannot
# be replayed.
EXCHANGES = itertools.count()


@dataclass(frozen=True)
class Process:
    """The place of this process: rank 0 .. world_size - 1, rank on its node, device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextmanager
def process_group(device: str, patience: float = TIMEOUT) -> Iterator[Process]:
    """Join the processes that a launcher started with RANK, LOCAL_RANK and WORLD_SIZE; alone
    without them.

    Args:
        device: `cpu`, `cuda`, or `auto`: CUDA if this node has a GPU for each of its processes.
        patience: seconds that a rank waits for the others.

    Raises:
        Refusal: there are too few GPUs, or the preflight found a problem.
    """
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    process = Process(rank, local_rank, world_size, choose_device(device, local_rank))
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
        # If it breaks, `launch` names it.
        stay_near(process.device)
        add_to_report(gpu=named(torch.cuda.get_device_properties(process.device)))
    compute_exactly()
    if process.device.type == "cpu":  # on a GPU, activations are in its own memory
        keep_freed_memory()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world_size > 1:
        join_others(process, timedelta(seconds=patience))
    else:
        for line in warnings([describe(process)]):
            print(line, flush=True)
    yield process
    # Not after a failure, see `failing_at_once`.
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def failing_at_once() -> Iterator[None]:
    """Around all of a program: if it fails as one of several ranks, end it when it has said why.

    To destroy NCCL's group, which Python does at its end too, waits for the others; and they wait
    for this rank.
    """
    try:
        yield
    except BaseException as error:
        if not dist.is_initialized():
            raise
        status = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        elif isinstance(status, str):
            print(status, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        exit_at_once(status if isinstance(status, int) else 1)


@contextmanager
def refused_after(seconds: float, problem: str) -> Iterator[None]:
    """End this process with a refusal if what is inside has not ended by then. It may be in code
    that does not return to Python.
    """

    def refuse() -> None:
        try:
            add_to_report(refused=True)
            print(f"{Path(sys.argv[0]).stem}: {Refusal(problem)}", file=sys.stderr, flush=True)
        finally:
            exit_at_once(1)

    timer = threading.Timer(seconds, refuse)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def join_others(process: Process, patience: timedelta) -> None:
    """Join twice: for the preflight with a short time-out, then for the training with a long one.

    Raises:
        Refusal: the preflight found a problem.
    """
    key()
    here = describe(process)
    store = meeting_place(process, here)
    let_gloo_be_reached(os.environ["MASTER_ADDR"], join(store, here, process.world_size))

    def connect(name: str, timeout: timedelta) -> None:
        backend = "nccl" if process.device.type == "cuda" else "gloo"
        own = PrefixStore(name, store)
        # Without the device, NCCL's barrier guesses it from the rank.
        device = process.device if process.device.type == "cuda" else None
        dist.init_process_group(
            backend,
            store=own,
            rank=process.rank,
            world_size=process.world_size,
            timeout=timeout,
            device_id=device,
        )

    where = f"preflight: {here.host} ({here.address})"
    if process.device.type == "cuda":
        # Without the second `=`, it would be a prefix of names.
        network = interface_of(here.address) or "INTERFACE"
        remedy = f"set NCCL_SOCKET_IFNAME=={network}, or another network's"
        # Its own time-out must not come first.
        patient = timedelta(seconds=2 * CONNECT)
    else:
        remedy, patient = "set GLOO_SOCKET_IFNAME to the network to use", ANSWER
    failed = f"the test all-reduce failed; {remedy}"
    try:
        with refused_after(CONNECT, f"{where}: no answer within {CONNECT} s; {failed}"):
            connect("preflight", patient)
            check_sum(process.rank + 1, here, process.world_size)
    except RuntimeError as error:
        raise Refusal(f"{where}: {one_line(str(error), 60)}; {failed}") from None
    again = f"{where}: the second connection was not there within {CONNECT} s; {remedy}"
    with refused_after(CONNECT, again):
        dist.destroy_process_group()
        connect("run", patience)


def meeting_place(process: Process, here: RankReport) -> Store:
    """The store in which the ranks find each other: a private file on one machine, otherwise rank
    0's port.

    Raises:
        Refusal: rank 0 cannot be reached.
    """
    if path := Environment.read().store:
        store = dist.FileStore(path, process.world_size)  # type: ignore[attr-defined]
        store.set_timeout(COME)
        return store
    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        return next(rendezvous("env://", timeout=COME))[0]
    except dist.DistError as error:
        raise Refusal(
            f"preflight: rank 0 cannot be reached at {master} from {here.host}: {error}"
        ) from None


def describe(process: Process) -> RankReport:
    """This rank, its node and its device."""
    properties = (
        torch.cuda.get_device_properties(process.device) if process.device.type == "cuda" else None
    )
    return RankReport(
        rank=process.rank,
        local_rank=process.local_rank,
        host=socket.gethostname(),
        address=local_address(os.environ.get("MASTER_ADDR", "127.0.0.1")),
        device=str(process.device),
        device_name=properties.name if properties else "",
        device_id=str(properties.uuid) if properties else "",
        threads=torch.get_num_threads(),
        cpus=usable_cpus(),
        cpu_ids=ranges(os.sched_getaffinity(0)),
        **processor(),
    )


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as Linux lists CPUs: `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def everyone_is_here() -> None:
    """Return when every process has called this."""
    if dist.is_initialized():
        dist.barrier()


def all_reduce(tensor: Tensor) -> Tensor:
    """The sum of the tensor over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather(value: Tree, process: Process) -> list[Any]:
    """Every process's value, by rank, on rank 0; an empty list elsewhere. Tensors come to the CPU.

    Raises:
        Refusal: on rank 0, if a value was not sent by a rank of this job.
    """
    if not dist.is_initialized():
        return [value]
    number = next(EXCHANGES)
    mine = as_tensor(
        signed(f"exchange {number} of rank {process.rank}", encode(value)), process.device
    )
    sizes = [
        torch.zeros(1, dtype=torch.int64, device=process.device) for _ in range(process.world_size)
    ]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=process.device))
    lengths = numbers(torch.cat(sizes))
    most = max(lengths)
    rooms = (
        [torch.empty(most, dtype=torch.uint8, device=process.device) for _ in sizes]
        if process.first
        else None
    )
    dist.gather(functional.pad(mine, (0, most - len(mine))), rooms)
    return [
        decode(verified(f"exchange {number} of rank {rank}", as_bytes(room[:length])))
        for rank, (room, length) in enumerate(zip(rooms or [], lengths, strict=bool(rooms)))
    ]


def broadcast(content: bytes, process: Process) -> bytes:
    """Rank 0's bytes on every process; those of the others do not count.

    Raises:
        Refusal: on the other ranks, if the value was not sent by rank 0 of this job.
    """
    if not dist.is_initialized():
        return content
    what = f"exchange {next(EXCHANGES)} of rank 0"
    size = torch.tensor([len(content)], device=process.device)
    dist.broadcast(size, 0)
    (length,) = numbers(size)
    received = bytearray(0 if process.first else length)
    # A large state is in memory once or twice, and a piece of it a few times more.
    for start in range(0, max(length, 1), PIECE):
        name = f"{what}, {start} of {length}"
        part = min(length - start, PIECE)
        if process.first:
            room = as_tensor(signed(name, content[start : start + part]), process.device)
        else:
            room = torch.empty(SIZE + part, dtype=torch.uint8, device=process.device)
        dist.broadcast(room, 0)
        if not process.first:
            received[start : start + part] = verified(name, as_bytes(room))
    return content if process.first else bytes(received)


def as_tensor(content: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def as_bytes(tensor: Tensor) -> bytes:
    return on_cpu(tensor).numpy().tobytes()
