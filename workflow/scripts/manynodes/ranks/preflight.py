"""Checks before the first step: all ranks connect, have the right devices, and can sum."""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from manynodes.base.errors import Refusal
from manynodes.base.signing import signed, verified
from manynodes.ranks.device import numbers

# Time for a rank to connect: importing torch from a cold network file system takes minutes on some
# nodes. A rank that has ended ends the job at once, see supervise.py.
COME = timedelta(minutes=5)
# Time for an exchange over the network when all ranks have connected.
ANSWER = timedelta(seconds=50)


@dataclass(frozen=True)
class RankReport:
    """The report of a rank on itself.

    Attributes:
        address: of its node, on the route to rank 0.
        device: `cpu`, `cuda:0`, …
        device_id: unique to a GPU, under any number; empty for a CPU.
        threads: that it computes with.
        cpus: that it may use.
        cpu_ids: their numbers as Linux writes them, such as `0-3,8`.
        cpu, onednn_isa, mkl, aten: see `processor.processor`.
    """

    rank: int
    local_rank: int
    host: str
    address: str
    device: str
    device_name: str
    device_id: str
    threads: int
    cpus: int
    cpu_ids: str
    cpu: str | None = None
    onednn_isa: str | None = None
    mkl: str | None = None
    aten: str | None = None

    def __str__(self) -> str:
        device = f"{self.device} {self.device_name}".strip()
        where = f"rank {self.rank} on {self.host} ({self.address})"
        return f"{where}: {device}, {self.threads} threads, {self.cpus} CPUs"


def join(
    store: Store, report: RankReport, world_size: int, wait: timedelta = COME
) -> dict[str, str]:
    """Wait for the reports of all ranks in the store. Rank 0 checks and prints them.

    Returns:
        The address of every host.

    Raises:
        Refusal: on every rank, if a rank is missing or the reports contradict each other.
    """
    tell(store, f"preflight/{report.rank}", asdict(report))
    if report.rank == 0:
        keys = [f"preflight/{rank}" for rank in range(world_size)]
        reports: list[RankReport] = []
        try:
            store.wait(keys, wait)
        except RuntimeError:
            absent = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            late = f"{absent} of {world_size} did not connect within {wait.seconds} s"
            fault: str | None = f"ranks {late}; see their logs"
        else:
            reports = [RankReport(**told(store, key)) for key in keys]
            fault = judge(reports)
            print(*(f"preflight: {report}" for report in reports), sep="\n", file=sys.stderr)
            print(summary(reports), *warnings(reports), sep="\n", flush=True)
        addresses = {report.host: report.address for report in reports}
        tell(store, "preflight/verdict", {"fault": fault, "addresses": addresses})
    else:
        store.wait(["preflight/verdict"], 2 * wait)
    verdict = told(store, "preflight/verdict")
    if verdict["fault"]:
        raise Refusal(f"preflight: {verdict['fault']}")
    return verdict["addresses"]


def tell(store: Store, key: str, value: dict[str, Any]) -> None:
    # Some stores take only text.
    store.set(key, signed(key, json.dumps(value).encode()).hex())


def told(store: Store, key: str) -> dict[str, Any]:
    """A value from another rank.

    Raises:
        Refusal: it was not sent by a rank of this job.
    """
    try:
        return json.loads(verified(key, bytes.fromhex(store.get(key).decode())))
    except ValueError:
        raise Refusal(
            f"{key}: the received value is not from a rank of this job; check who else can reach "
            "its ports"
        ) from None


def summary(reports: Sequence[RankReport]) -> str:
    hosts = list(dict.fromkeys(report.host for report in reports))
    devices = sorted({report.device_name or report.device for report in reports})
    return f"preflight: {len(reports)} ranks on {', '.join(hosts)}: {', '.join(devices)}"


def judge(reports: Sequence[RankReport]) -> str | None:
    """The problem with the ranks, in one line with the name of the node; None if there is none."""
    first = reports[0]
    for report in reports:
        kinds = [r.device.partition(":")[0] for r in (first, report)]
        if kinds[0] != kinds[1]:
            return (
                f"rank {report.rank} on {report.host} computes on {kinds[1]}, rank {first.rank} on "
                f"{first.host} on {kinds[0]}; "
                "give every node a GPU for each of its processes, or set device: cpu"
            )
    users = defaultdict(list)
    for report in reports:
        if report.device_id:
            users[report.device_id].append(report)
    for sharing in users.values():
        if len(sharing) > 1:
            ranks = " and ".join(str(report.rank) for report in sharing)
            gpu = f"{sharing[0].host} share one GPU, {sharing[0].device_name}"
            return f"ranks {ranks} on {gpu}; ask for one per process"
    return None


def warnings(reports: Sequence[RankReport]) -> list[str]:
    """Problems that cost only speed: more threads on a node than CPUs."""
    nodes = defaultdict(list)
    for report in reports:
        nodes[report.host].append(report)
    return [
        f"preflight: warning: {sum(r.threads for r in ranks)} threads on {host} have "
        f"{max(r.cpus for r in ranks)} CPUs; "
        "ask for more CPUs, or for fewer with cpus_per_proc"
        for host, ranks in nodes.items()
        if sum(r.threads for r in ranks) > max(r.cpus for r in ranks) and ranks[0].device == "cpu"
    ]


def check_sum(contribution: float, report: RankReport, world_size: int) -> None:
    """All-reduce a vector to which rank r contributes r + 1.

    Raises:
        Refusal: the sum is wrong on this rank.
    """
    vector = torch.full((1024,), contribution, dtype=torch.float64, device=report.device)
    dist.all_reduce(vector)
    wanted = world_size * (world_size + 1) / 2
    wrong = [found for found in numbers(vector) if found != wanted]
    if wrong:
        raise Refusal(
            f"preflight: the test all-reduce gives {wrong[0]:g} on {report.host} instead "
            f"of {wanted:g}; "
            "exclude that node (--exclude) and tell its administrator"
        )
