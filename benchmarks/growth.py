"""What grows with the number of nodes, ranks and runs, as far as one machine can show it.

Commands in place of nodes, clients in place of ranks that join, and up to 32 real ranks that vote.
Of each, the cost for one more is fitted to all sizes, and stated beside the largest.
"""

import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from measured import Measured
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from classifier.training.timing import Clock
from manynodes.base import atomic
from manynodes.base.signing import new_secret
from manynodes.base.timeouts import BEAT
from manynodes.experiment.config import Experiment
from manynodes.launching.agents import Outcome, Output, Stop, run_all
from manynodes.launching.endings import Ending, record_lines, records
from manynodes.launching.first_failure import Source, first_failure
from manynodes.launching.launchers import Geometry
from manynodes.launching.logs import Log
from manynodes.launching.plan import find_launcher, make_plan
from manynodes.ranks.preflight import RankReport, join
from manynodes.ranks.process_group import Process
from manynodes.ranks.vote import Vote
from manynodes.reporting.progress import read_all
from manynodes.schedulers.base import Allocation, Command
from manynodes.schedulers.registry import SCHEDULERS

NODES = (8, 64, 512)
RANKS = (64, 512, 4096)
JOINING = (8, 64, 512)
VOTING = (2, 4, 8, 16, 32)
VOTES = 200
RUNS = (10, 100, 1000)
TIMES = 3
STEP = 0.01  # seconds
STEPS = 100_000


def measure(data: Path, work: Path) -> Iterator[Measured]:  # noqa: ARG001, the data are not read
    yield watched_step(work)
    yield from grows("launch: commands started, followed and ended", NODES, commands_seconds)
    yield from grows("launch: a plan for nodes", NODES, plan_seconds)
    yield from grows("launch: ranks that fail explained", RANKS, failure_seconds)
    yield from grows("preflight: ranks that join through rank 0's store", JOINING, join_seconds)
    yield from grows(
        "a vote of ranks on this machine's CPUs",
        VOTING,
        lambda ranks: vote_seconds(ranks, work / f"store-{ranks}"),
    )
    yield from grows(
        "watch: a look at runs", RUNS, lambda runs: watch_seconds(runs, work / str(runs))
    )


def watched_step(work: Path) -> Measured:
    """What a step of 10 ms, a short one, pays for its two times and for the heartbeat beside it."""
    clock = Clock(torch.device("cpu"))
    start = time.perf_counter()
    for _ in clock.inputs(range(STEPS)):
        with clock.forward_pass():
            pass
    times = (time.perf_counter() - start) / STEPS
    live = {"epoch": 10, "step": 100, "steps": 200, "loss": 1.2345, "images_per_second": 1234.5}

    beats = median_seconds(lambda: atomic.write_often(work / "live.json", json.dumps(live) + "\n"))
    return Measured(
        "step times and heartbeat",
        f"a step of {STEP * 1000:.0f} ms",
        times / STEP + beats / BEAT,
        most=0.005,
        details={"us_of_times_per_step": 1e6 * times, "us_of_a_heartbeat": 1e6 * beats},
    )


def grows(
    what: str, sizes: Sequence[int], seconds_of: Callable[[int], float]
) -> Iterator[Measured]:
    """The largest size in seconds, and its cost for one more against that of a straight line."""
    seconds = {size: seconds_of(size) for size in sizes}
    slope, start = np.polyfit(sizes, [seconds[size] for size in sizes], 1)
    fewer, many = sizes[-2:]
    first = (seconds[fewer] - seconds[sizes[0]]) / (fewer - sizes[0])
    last = (seconds[many] - seconds[fewer]) / (many - fewer)
    yield Measured(
        f"{what}: {many:,}",
        "seconds",
        seconds[many],
        details={
            "seconds": {str(size): round(each, 6) for size, each in seconds.items()},
            "ms_for_one_more": 1e3 * slope,
            "start_seconds": start,
            "one_more_at_the_end_against_before": last / first if first > 0 else None,
        },
    )


def commands_seconds(nodes: int) -> float:
    """CPU seconds of this process alone for so many commands that print a few lines."""
    commands = [Command(("/bin/sh", "-c", "echo one >&2; echo two >&2"))] * nodes
    with Log(None) as nowhere:
        before = time.process_time()
        outcome = run_all(commands, Output(nowhere, nowhere), Stop(), 10)
        assert outcome.failed is None
        return time.process_time() - before


def plan_seconds(nodes: int) -> float:
    hosts = tuple(f"node{number:04}" for number in range(nodes))
    allocation = Allocation("Slurm job 1", hosts, hosts, 1)
    launcher = find_launcher("torchrun", SCHEDULERS["srun"])

    def once() -> None:
        plan = make_plan(
            launcher,
            Geometry(nodes, 8, 4, "auto", "cuda"),
            ["train.py"],
            allocation,
            20_000,
            "logs/launcher",
            None,
        )
        json.dumps([node.environment for node in plan])

    return median_seconds(once)


def failure_seconds(ranks: int) -> float:
    """All ranks fail, each with a traceback of 40 lines, as when one loses its network."""
    lines = tuple(f'  File "train.py", line {number}, in step' for number in range(39))
    said = [
        line
        for rank in range(ranks)
        for line in record_lines(
            Ending(
                f"rank {rank}",
                f"node{rank // 8}",
                status=1,
                time=float(rank),
                lines=(*lines, "RuntimeError: Connection closed by peer"),
                log=f"logs/rank={rank}.log",
            ).record()
        )
    ]

    def once() -> None:
        endings = [Ending(**record["ending"]) for record in records(said)]
        assert len(endings) == ranks
        first_failure(Outcome(failed=0, status=1), endings, [], [], Source("srun"))

    return median_seconds(once)


def join_seconds(ranks: int) -> float:
    """Clients of one store, each in a thread of this process."""
    os.environ["LAUNCH_SECRET"] = new_secret()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [
        TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(minutes=5))
        for _ in range(ranks)
    ]

    def enter(rank: int) -> None:
        report = RankReport(
            rank=rank, local_rank=rank % 8, host=f"node{rank // 8}", address="127.0.0.1",
            device="cpu", device_name="", device_id="", threads=1, cpus=8, cpu_ids="0-7",
        )  # fmt: skip
        join(clients[rank], report, ranks)

    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        ThreadPoolExecutor(ranks) as threads,
    ):
        start = time.perf_counter()
        list(threads.map(enter, range(ranks)))
        return time.perf_counter() - start


def vote_seconds(ranks: int, store: Path) -> float:
    """Median seconds of a vote, as rank 0 sees it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    # Of an earlier run.
    store.unlink(missing_ok=True)
    processes = [
        context.Process(target=voter, args=(rank, ranks, str(store), there))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    seconds = here.recv()
    for process in processes:
        process.join()
    return seconds


def voter(rank: int, ranks: int, store: str, result: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    process = Process(rank, rank, ranks, torch.device("cpu"))
    one = torch.ones(())
    times = []
    for _ in range(VOTES):
        start = time.perf_counter()
        Vote(process, None, False, one, one).verdict()
        times.append(time.perf_counter() - start)
    if rank == 0:
        result.send(statistics.median(times))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def watch_seconds(runs: int, folder: Path) -> float:
    """All of them trained for 100 epochs."""
    experiment = Experiment.from_config({"experiment": "many", "seed": list(range(runs))})
    rows = "epoch,train_loss,images_per_second,seconds\n" + "1,2.0,100.0,10.0\n" * 100
    for name in experiment.runs:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "metrics.csv").write_text(rows)
    return median_seconds(lambda: read_all(experiment, folder))


def median_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
