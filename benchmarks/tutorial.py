"""Training throughput against the usual tutorial loop, tutorial_loop.py, in its precision and, on a
CPU that has it, in bf16, which `precision: auto` takes there.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from measured import Measured
from throughput import CPUS, Bare, Case, Ours

from manynodes.ranks.device import computes_in_bf16
from manynodes.ranks.process_group import process_group

ROUNDS = 5
# The peer's own recipe, except for augmentation, which the peer lacks.
AS_THE_TUTORIAL = Case(
    "resnet18_imagenet",
    128,
    8,
    {"model": "resnet18_imagenet", "optimizer": "adamw", "weight_decay": 1e-4, "warmup": 0.0},
)


IN_BF16 = replace(AS_THE_TUTORIAL, keys=AS_THE_TUTORIAL.keys | {"precision": "bf16"})


def measure(data: Path, work: Path) -> Iterator[Measured]:
    with process_group("cpu") as process:
        torch.set_num_threads(CPUS)
        cases = [AS_THE_TUTORIAL, *([IN_BF16] if computes_in_bf16(process.device) else [])]
        yield from against_tutorial([Ours(case, process, data, work) for case in cases], data)


def against_tutorial(ours: list[Ours], data: Path) -> Iterator[Measured]:
    """Against the faster of its two ways to read data: this process, or one worker per CPU.

    Args:
        ours: in its precision and in others, which take turns with it.
    """
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

        bare = Bare(case, ours[0].training)
        rounds = [
            {each.training.run.precision: case.batch / each.images_per_second() for each in ours}
            | {
                "fp32_bare": case.batch / bare.images_per_second(),
                "peer_0_workers": step("loop"),
                "peer_all_workers": step("loop", CPUS),
                "peer_data": step("data"),
                "peer_bare": step("bare"),
                "peer_bare_and_metrics": step("metrics"),
            }
            for _ in range(ROUNDS)
        ]
        ask.close()
    steps = {f"{key}_ms": round(1e3 * median(each[key] for each in rounds), 1) for key in rounds[0]}
    for each in ours:
        precision = each.training.run.precision
        yield Measured(
            f"training throughput, resnet18_imagenet, {precision}",
            "the usual tutorial loop in fp32, with its best number of workers",
            median(
                min(of["peer_0_workers"], of["peer_all_workers"]) / of[precision] for of in rounds
            ),
            details={
                "workers": CPUS, "rounds": len(rounds), "batch": case.batch, "threads": CPUS,
                "a_step": steps,
            },
        )  # fmt: skip
