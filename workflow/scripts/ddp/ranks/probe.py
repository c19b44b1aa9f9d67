"""What the nodes of a training can do, measured in seconds before it begins: the network between
them, their disks and their processors. A node that is slower than the others is named.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist

from ddp.ranks.process_group import Process, all_reduce, everyone_is_here, gather

SIZES = (4, 4_096, 262_144, 4_194_304, 33_554_432)  # bytes of an all-reduce
TIMES = 5
EDGE = 1024  # of the matrices
SECONDS = 0.3  # of matrix products
MOST_READ = 256_000_000  # bytes of a file
MOST_SECONDS = 3.0  # of reading it
# A node is slow if it is so much worse than the median of the nodes.
SLOW = 1.5
# A reply that takes less is never slow, in seconds.
QUICK = 5e-4
# What is compared, and whether more of it is better.
MEASURES = {
    "matmul_flops_per_second": True,
    "scratch_bytes_per_second": True,
    "shared_bytes_per_second": True,
    "reply_seconds": False,
}


def probe(process: Process, hosts: Sequence[str], shared: Path, scratch: Path) -> dict[str, Any]:
    """Measure, on all ranks at once.

    Args:
        hosts: of the ranks; needed on rank 0.
        shared, scratch: a large file in the shared folder, and its copy on this node; the same
            path if nothing is staged.

    Returns:
        On rank 0: `all_reduce`, a list with `bytes` and median `seconds`, and `nodes`, one entry
        for each host with MEASURES; else empty. A speed that could not be measured is null.
    """
    reduced = [{"bytes": size, "seconds": all_reduce_seconds(size, process)} for size in SIZES]
    replies = reply_seconds(process, places(process))
    own: dict[str, Any] | None = None
    if process.local_rank == 0:
        own = {
            "matmul_flops_per_second": matmul_rate(process.device),
            "scratch_bytes_per_second": read_rate(scratch) if scratch != shared else None,
            "shared_bytes_per_second": read_rate(shared),
        }
    everyone_is_here()
    found = gather(own, process)
    nodes = [
        {"host": hosts[rank], **measured, "reply_seconds": replies.get(rank)}
        for rank, measured in enumerate(found)
        if measured
    ]
    return {"all_reduce": reduced, "nodes": nodes} if process.first else {}


def outliers(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each measure in which a node is slower than the median of the nodes."""
    lines = []
    for measure, more_is_better in MEASURES.items():
        known = {node["host"]: node[measure] for node in nodes if node[measure]}
        if len(known) < 2:
            continue
        # In seconds for a unit: the smaller the better. Of two, the median is the better one.
        costs = {host: 1 / value if more_is_better else value for host, value in known.items()}
        usual = median_low(costs.values())
        for host, cost in costs.items():
            if cost >= SLOW * usual and (more_is_better or cost >= usual + QUICK):
                name = measure.replace("_per_second", "").replace("_", " ")
                lines.append(
                    f"warning: probe: {host} is {cost / usual:.1f} times slower than the median of "
                    f"the nodes: {name} {known[host]:.3g}"
                )
    return lines


def all_reduce_seconds(size: int, process: Process) -> float:
    """Median seconds of an all-reduce of so many bytes, as this rank sees it."""
    tensor = torch.ones(size // 4, device=process.device)

    def once() -> None:
        all_reduce(tensor)
        settle(process.device)

    once()
    return round(median(timed(once) for _ in range(TIMES)), 7)


def places(process: Process) -> list[int]:
    """The first rank of each node."""
    firsts = torch.zeros(process.world_size, device=process.device)
    firsts[process.rank] = float(process.local_rank == 0)
    return [rank for rank, first in enumerate(all_reduce(firsts).tolist()) if first]


def reply_seconds(process: Process, firsts: Sequence[int]) -> dict[int, float]:
    """Median seconds until each other node has answered rank 0, by rank; known to rank 0."""
    found: dict[int, float] = {}
    message = torch.zeros(1, device=process.device)
    for rank in firsts[1:]:
        if process.first:

            def ask(rank: int = rank) -> None:
                dist.send(message, rank)
                dist.recv(message, rank)
                settle(process.device)

            ask()
            found[rank] = round(median(timed(ask) for _ in range(TIMES)), 7)
        elif process.rank == rank:
            for _ in range(TIMES + 1):
                dist.recv(message, 0)
                dist.send(message, 0)
    return found


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations per second of products of fp32 matrices, on this rank's device."""
    matrix = torch.ones(EDGE, EDGE, device=device)
    out = torch.empty_like(matrix)

    def once() -> None:
        torch.matmul(matrix, matrix, out=out)
        settle(device)

    once()
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        times.append(timed(once))
    return round(2 * EDGE**3 / median(times))


def read_rate(path: Path) -> float | None:
    """Bytes per second of the beginning of a file, not from the page cache if the system agrees to
    forget it; None if it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start, done = time.perf_counter(), 0
            while done < MOST_READ and time.perf_counter() - start < MOST_SECONDS:
                part = file.read(4_000_000)
                done += len(part)
                if not part:
                    break
            return round(done / (time.perf_counter() - start))
    except OSError:
        return None


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
