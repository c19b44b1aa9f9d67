"""Before the first step: is every rank there, on what it should compute on, and does a sum over all of them come out right?"""

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

from ddp.errors import Refusal
from ddp.signing import signed, verified

# How long ranks wait for one that has not come: importing torch from a cold network file system takes minutes on some nodes and
# seconds on others. One that has ended ends the job at once, see supervise.py.
COME = timedelta(minutes=5)
# How long an exchange over the network may take once all are there.
ANSWER = timedelta(seconds=50)


@dataclass(frozen=True)
class RankReport:
    """What a rank says of itself.

    Attributes:
        address: where its node is reached, as seen on the way to rank 0.
        device: `cpu`, `cuda:0`, …
        device_id: what tells one GPU from another, whatever the number it is seen under; empty for a CPU.
        threads: that it computes with.
        cpus: that it may use.
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
    cpu: str | None = None
    onednn_isa: str | None = None
    mkl: str | None = None
    aten: str | None = None

    def __str__(self) -> str:
        device = f"{self.device} {self.device_name}".strip()
        return f"rank {self.rank} on {self.host} ({self.address}): {device}, {self.threads} threads, may use {self.cpus} CPUs"


def join(store: Store, report: RankReport, world_size: int, wait: timedelta = COME) -> dict[str, str]:
    """Wait for all ranks to have reported through the store; rank 0 judges, and prints what they said.

    Returns:
        The address of every host.

    Raises:
        Refusal: on every rank, if one is missing or what they report does not fit together.
    """
    tell(store, f"preflight/{report.rank}", asdict(report))
    if report.rank == 0:
        keys = [f"preflight/{rank}" for rank in range(world_size)]
        reports: list[RankReport] = []
        try:
            store.wait(keys, wait)
        except RuntimeError:
            there = [rank for rank in range(world_size) if store.check([keys[rank]])]
            fault: str | None = missing(world_size, there, wait)
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
    # A store takes text, some of them only text.
    store.set(key, signed(key, json.dumps(value).encode()).hex())


def told(store: Store, key: str) -> dict[str, Any]:
    """What another rank has told.

    Raises:
        Refusal: it was not a rank of this job that told it.
    """
    try:
        return json.loads(verified(key, bytes.fromhex(store.get(key).decode())))
    except ValueError:
        raise Refusal(f"{key}: what was received is not in the form of this job's ranks; see who else can reach its ports") from None


def summary(reports: Sequence[RankReport]) -> str:
    hosts = list(dict.fromkeys(report.host for report in reports))
    devices = sorted({report.device_name or report.device for report in reports})
    return f"preflight: {len(reports)} ranks on {', '.join(hosts)}: {', '.join(devices)}"


def missing(world_size: int, there: Sequence[int], wait: timedelta) -> str:
    absent = ", ".join(str(rank) for rank in range(world_size) if rank not in there)
    return f"of {world_size} ranks these have not come within {wait.seconds} s: {absent}; see their logs"


def judge(reports: Sequence[RankReport]) -> str | None:
    """What is wrong with the ranks, in one line that names the node; None if nothing is."""
    first = reports[0]
    for report in reports:
        kinds = [r.device.partition(":")[0] for r in (first, report)]
        if kinds[0] != kinds[1]:
            return (
                f"rank {report.rank} on {report.host} computes on {kinds[1]}, rank {first.rank} on {first.host} on {kinds[0]}; "
                "give every node a GPU for each of its processes, or set device: cpu"
            )
    users = defaultdict(list)
    for report in reports:
        if report.device_id:
            users[report.device_id].append(report)
    for sharing in users.values():
        if len(sharing) > 1:
            ranks = " and ".join(str(report.rank) for report in sharing)
            return f"ranks {ranks} on {sharing[0].host} share one GPU, {sharing[0].device_name}; ask for one per process"
    return None


def warnings(reports: Sequence[RankReport]) -> list[str]:
    """What costs speed but no correctness: more threads on a node than CPUs that they may use."""
    nodes = defaultdict(list)
    for report in reports:
        nodes[report.host].append(report)
    return [
        f"preflight: warning: {sum(r.threads for r in ranks)} threads on {host} have {max(r.cpus for r in ranks)} CPUs; "
        "ask for more CPUs, or for fewer with cpus_per_proc"
        for host, ranks in nodes.items()
        if sum(r.threads for r in ranks) > max(r.cpus for r in ranks) and ranks[0].device == "cpu"
    ]


def check_sum(contribution: float, report: RankReport, world_size: int) -> None:
    """All-reduce a vector to which rank r contributes r + 1.

    Raises:
        Refusal: the sum is wrong here.
    """
    vector = torch.full((1024,), contribution, dtype=torch.float64, device=report.device)
    dist.all_reduce(vector)
    wanted = world_size * (world_size + 1) / 2
    wrong = vector[vector != wanted]
    if len(wrong):
        raise Refusal(
            f"preflight: a sum over all ranks gives {wrong[0].item():g} on {report.host} instead of {wanted:g}; "
            "leave that node out (--exclude) and tell its administrator"
        )
