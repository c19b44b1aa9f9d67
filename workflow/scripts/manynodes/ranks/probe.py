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

from manynodes.ranks.device import numbers, settle
from manynodes.ranks.process_group import Process, all_reduce, everyone_is_here, gather

SIZES = (4, 4_096, 262_144, 4_194_304, 33_554_432)  # bytes of an all-reduce
TIMES = 5
LINK = 1_000_000  # bytes that two neighbours exchange
EDGE = 1024  # of the matrices
SECONDS = 0.3  # of matrix products
LEAST_READ = 10_000_000  # bytes of a file; less is read too fast to be compared
MOST_READ = 256_000_000
MOST_SECONDS = 3.0  # of reading it, or of all-reduces of one size
# A node is slow if it is so much worse than the median of the nodes.
SLOW = 1.5
# A reply that takes less is never slow, in seconds.
QUICK = 5e-4
# What is compared, and whether more of it is better.
MEASURES = {
    "matmul_flops_per_second": True,
    "scratch_bytes_per_second": True,
    "shared_bytes_per_second": True,
    "link_bytes_per_second": True,
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
    reduced = all_reduces(process)
    links = link_times(process, places(process))
    own: dict[str, Any] | None = None
    if process.local_rank == 0:
        own = {
            "links": links,
            "matmul_flops_per_second": matmul_rate(process.device),
            "scratch_bytes_per_second": read_rate(scratch) if scratch != shared else None,
            "shared_bytes_per_second": read_rate(shared),
        }
    everyone_is_here()
    found = gather(own, process)
    known = {rank: measured for rank, measured in enumerate(found) if measured}
    best = best_links({rank: measured.pop("links") for rank, measured in known.items()})
    nodes = [{"host": hosts[rank], **known[rank], **best[rank]} for rank in known]
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
                unit = " per second" if more_is_better else ""
                lines.append(
                    f"{host} is {cost / usual:.1f} times slower than the median of the nodes: "
                    f"{name} {known[host]:.3g}{unit}"
                )
    return lines


def all_reduces(process: Process) -> list[dict[str, Any]]:
    """The median seconds of an all-reduce by its bytes; without sizes that would take too long."""
    found: list[dict[str, Any]] = []
    means: list[float] = []
    for size, larger in zip(SIZES, (*SIZES[1:], SIZES[-1]), strict=True):
        tensor = torch.ones(size // 4, device=process.device)

        def once(tensor: torch.Tensor = tensor) -> None:
            all_reduce(tensor)
            settle(process.device)

        once()
        seconds = median(timed(once) for _ in range(TIMES))
        found.append({"bytes": size, "seconds": round(seconds, 7)})
        # All ranks must come to the same decision.
        (total,) = numbers(all_reduce(torch.tensor([seconds], device=process.device)))
        means.append(total / process.world_size)
        # What the smallest one takes is latency, which does not grow with the size.
        expected = means[0] + (means[-1] - means[0]) * larger / size
        if expected * (TIMES + 1) > MOST_SECONDS:
            break
    return found


def places(process: Process) -> list[int]:
    """The first rank of each node."""
    firsts = torch.zeros(process.world_size, device=process.device)
    firsts[process.rank] = float(process.local_rank == 0)
    return [rank for rank, first in enumerate(numbers(all_reduce(firsts))) if first]


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """The pairs of neighbours in a ring of nodes, in rounds in which no node is in two pairs."""
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else nodes - 1)]
    even = ring[: len(ring) // 2 * 2]
    return [pairs for pairs in (even[::2], even[1::2], ring[len(even) :]) if pairs]


def link_times(process: Process, firsts: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Exchange messages with the neighbouring nodes, all of them at once.

    Args:
        firsts: the first rank of each node.

    Returns:
        On the rank that asked: seconds until its neighbour had answered a short message, and LINK
        bytes, by the neighbour's rank. The shortest of several, without waiting for a processor.
    """
    found = {}
    for pairs in rounds(len(firsts)):
        for asking, answering in ((firsts[one], firsts[other]) for one, other in pairs):
            if process.rank == asking:
                found[answering] = (
                    min(timed_exchanges(process, answering, 4, TIMES)),
                    min(timed_exchanges(process, answering, LINK, 2)),
                )
            elif process.rank == answering:
                for size, times in ((4, TIMES), (LINK, 2)):
                    message = torch.zeros(size // 4, device=process.device)
                    for _ in range(times):
                        dist.recv(message, asking)
                        dist.send(message, asking)
        everyone_is_here()
    return found


def timed_exchanges(process: Process, other: int, size: int, times: int) -> list[float]:
    message = torch.zeros(size // 4, device=process.device)

    def once() -> None:
        dist.send(message, other)
        dist.recv(message, other)
        settle(process.device)

    return [timed(once) for _ in range(times)]


def best_links(links: dict[int, dict[int, tuple[float, float]]]) -> dict[int, dict[str, Any]]:
    """For each node the better one of its links: a slow node slows those of its neighbours too.

    Args:
        links: what `link_times` has returned, by rank.
    """
    of_node: dict[int, list[tuple[float, float]]] = {rank: [] for rank in links}
    for asking, answers in links.items():
        for answering, times in answers.items():
            of_node[asking].append(times)
            of_node[answering].append(times)
    best: dict[int, dict[str, Any]] = {}
    for rank, known in of_node.items():
        reply = min((seconds for seconds, _ in known), default=None)
        exchange = min((seconds for _, seconds in known), default=None)
        best[rank] = {
            "link_bytes_per_second": round(2 * LINK / exchange) if exchange else None,
            "reply_seconds": round(reply, 7) if reply else None,
        }
    return best


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations per second of products of fp32 matrices, on this rank's device. The
    best of several, without waiting for a processor.
    """
    matrix = torch.ones(EDGE, EDGE, device=device)
    out = torch.empty_like(matrix)

    def once() -> None:
        torch.matmul(matrix, matrix, out=out)
        settle(device)

    once()
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        times.append(timed(once))
    return round(2 * EDGE**3 / min(times))


def read_rate(path: Path) -> float | None:
    """Bytes per second of the beginning of a file, not from the page cache if the system agrees to
    forget it; None if it cannot be read, or is too small.
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
            return round(done / (time.perf_counter() - start)) if done >= LEAST_READ else None
    except OSError:
        return None


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
