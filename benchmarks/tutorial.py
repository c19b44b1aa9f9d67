"""Training throughput against the usual tutorial loop, tutorial_loop.py."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from measured import Measured
from throughput import CPUS, Bare, Case, Ours

from manynodes.ranks.process_group import process_group

ROUNDS = 5
# The peer's own recipe, except for augmentation, which the peer lacks.
AS_THE_TUTORIAL = Case(
    "resnet18_imagenet",
    128,
    8,
    {"model": "resnet18_imagenet", "optimizer": "adamw", "weight_decay": 1e-4, "warmup": 0.0},
)


def measure(data: Path, work: Path) -> Iterator[Measured]:
    with process_group("cpu") as process:
        torch.set_num_threads(CPUS)
        yield against_tutorial(Ours(AS_THE_TUTORIAL, process, data, work), data)


def against_tutorial(ours: Ours, data: Path) -> Measured:
    """Against the faster of its two ways to read data: this process, or one worker per CPU."""
    case = AS_THE_TUTORIAL
    command = [
        sys.executable,
        str(Path(__file__).with_name("tutorial_loop.py")),
        str(data),
        str(case.batch),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        ask, answer = peer.stdin, peer.stdout
        assert ask is not None
        assert answer is not None

        def step(mode: str, workers: int = 0) -> float:
            print(
                json.dumps({"mode": mode, "workers": workers, "steps": case.steps}),
                file=ask,
                flush=True,
            )
            return float(answer.readline())

        bare = Bare(case, ours.training)
        rounds = [
            {
                "ours": case.batch / ours.images_per_second(),
                "ours_bare": case.batch / bare.images_per_second(),
                "peer_0_workers": step("loop"),
                "peer_all_workers": step("loop", CPUS),
                "peer_data": step("data"),
                "peer_bare": step("bare"),
                "peer_bare_and_metrics": step("metrics"),
            }
            for _ in range(ROUNDS)
        ]
        ask.close()
    ratio = median(
        min(each["peer_0_workers"], each["peer_all_workers"]) / each["ours"] for each in rounds
    )
    steps = {f"{key}_ms": round(1e3 * median(each[key] for each in rounds), 1) for key in rounds[0]}
    details = {"workers": CPUS, "rounds": len(rounds), "batch": case.batch, "threads": CPUS} | {
        "a_step": steps
    }
    return Measured(
        "training throughput, resnet18_imagenet",
        "the usual tutorial loop, with its best number of workers",
        ratio,
        details=details,
    )
