"""Failures in jobs of a real OpenPBS and over ssh: what ends, when, with which message, and that
nothing stays.
"""

import os
import re
import signal
from collections.abc import Callable

import pytest

from checkout import PbsCheckout
from launched import WAYS, Launched, left
from submissions import on
from waiting import until, until_none


def kill_rank(training: Launched) -> None:
    os.kill(training.ranks("n2")[0], signal.SIGKILL)


def kill_agent(training: Launched) -> None:
    os.kill(training.find("n2", "node_agent")[0], signal.SIGKILL)


def kill_launcher(training: Launched) -> None:
    os.kill(on(training.cluster, "n2", "torchrun.py")[0], signal.SIGKILL)


def kill_launch(training: Launched) -> None:
    os.kill(training.find("n1", "launch")[0], signal.SIGKILL)


def kill_step(training: Launched) -> None:
    os.kill(training.find("n1", "remote_step")[0], signal.SIGKILL)


# How a rank can fail is tested on Slurm; here, what the agents add, and whether they tell it. A
# waiting program is enough for that; torchrun, whose agents take three CPU seconds on each node to
# import torch, only where it has a part in it.
FAULTS: dict[str, tuple[Callable[[Launched], None], str, str]] = {
    "rank-killed": (kill_rank, "torchrun", r"rank 1 on n2 was ended by SIGKILL"),
    "agent-killed": (kill_agent, "none", r"n2 is lost: its agent has ended; was it killed\?"),
    "launch-killed": (kill_launch, "none", ""),
    "launcher-killed": (kill_launcher, "torchrun", r"n2: its command was ended by SIGKILL"),
    "step-killed": (kill_step, "none", r"remote_step was ended by SIGKILL"),
}
BOTH_WAYS = ("rank-killed", "launch-killed")


@pytest.mark.parametrize(("fault", "way"), [
    pytest.param(fault, way, marks=() if fault == "rank-killed" else pytest.mark.faults)
    for fault in FAULTS for way in (WAYS if fault in BOTH_WAYS else WAYS[:1])
])  # fmt: skip
def test_a_failure_ends_everything_and_is_named(
    checkout: PbsCheckout, launched: Callable[..., Launched], fault: str, way: str
) -> None:
    do, launcher, error = FAULTS[fault]
    training = launched(fault, way, options=("--launcher", launcher), waits=True, nodes=2)
    training.trains()
    do(training)
    seconds = until_none(lambda: left(checkout))
    print(f"{fault} by {way}: over on all nodes {seconds:.1f} s later")
    print(training.text[-1500:])
    if error:
        assert re.search(rf"launch: train failed: {error}", training.text), training.text
        assert training.text.endswith("status 1\n")
        log = "rank=1.log" if launcher == "torchrun" else "node=1.log"
        assert (training.results / "logs" / log).exists()
    else:
        assert training.text.endswith("status 137\n")
    assert not (training.results / "model.safetensors").exists()


STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
pathlib.Path(sys.argv[1], f"alive-{os.environ['LAUNCH_NODE_RANK']}").touch()
while True:
    time.sleep(1)
"""


@pytest.mark.faults
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_processes_that_ignore_signals_and_daemons_are_ended(
    checkout: PbsCheckout,
    launched: Callable[..., Launched],
    how: signal.Signals,
    way: str,
) -> None:
    program = checkout.path / "results/stubborn.py"
    program.write_text(STUBBORN)
    folder = checkout.path / f"results/stubborn-{how.name}-{way}/run"
    training = launched(
        f"stubborn-{how.name}", way, options=("--launcher", "none", "--output", str(folder)),
        program=("{python}", str(program), str(folder)),
    )  # fmt: skip
    until(lambda: len(list(folder.glob("alive-*"))) == 3)
    os.kill(training.find("n1", "launch")[0], how)
    seconds = until_none(lambda: left(checkout))
    print(f"stubborn, {how.name} to launch by {way}: over on all nodes {seconds:.1f} s later")
