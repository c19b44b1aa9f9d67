"""Failures in jobs of a real OpenPBS and over ssh: what ends, when, with which message, and that
nothing stays.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable

import pytest

from checkout import PbsCheckout
from cluster.handle import PbsCluster
from cluster.namespaces import UID
from launched import WAYS, Launched, left
from submissions import on
from waiting import until, until_none

# Seconds that ranks wait for one that hangs.
HUNG = 15


def send(number: signal.Signals) -> Callable[[Launched], None]:
    """To the rank on n2."""
    return lambda training: os.kill(training.ranks("n2")[0], number)


def exhaust(training: Launched) -> None:
    """From now on the rank cannot allocate memory."""
    command = ["prlimit", f"--pid={training.ranks('n2')[0]}", "--as=1000000"]
    subprocess.run(command, check=True, user=UID, group=UID, extra_groups=[])


def kill_agent(training: Launched) -> None:
    os.kill(training.find("n2", "node_agent")[0], signal.SIGKILL)


def kill_launcher(training: Launched) -> None:
    os.kill(on(training.cluster, "n3", "torch.distributed.run")[0], signal.SIGKILL)


def kill_launch(training: Launched) -> None:
    os.kill(training.find("n1", "launch")[0], signal.SIGKILL)


def kill_step(training: Launched) -> None:
    os.kill(training.find("n1", "remote_step")[0], signal.SIGKILL)


FAULTS: dict[str, tuple[Callable[[Launched], None], str]] = {
    "rank-killed": (send(signal.SIGKILL), r"rank 1 on n2 was ended by SIGKILL"),
    # With gloo's threads at work, Python may abort after its traceback.
    "rank-raises": (
        send(signal.SIGINT),
        r"rank 1 on n2(: KeyboardInterrupt| was ended by SIGABRT)",
    ),
    "out-of-memory": (exhaust, r"rank 1 on n2: [^;]*([Mm]emory|alloc).*"),
    "rank-hangs": (
        send(signal.SIGSTOP),
        r"rank 1 on n2 hung \(stopped by a signal, in [\w.]+ \(\S+:\d+\)\)",
    ),
    "agent-killed": (kill_agent, r"n2 is lost: its agent has ended; was it killed\?"),
    "launcher-killed": (kill_launcher, r"n3: its command was ended by SIGKILL"),
    "step-killed": (kill_step, r"remote_step was ended by SIGKILL"),
    "launch-killed": (kill_launch, ""),
}


# What the agents do differs between the ways; what a launcher does with its ranks does not.
PAIRS = [
    (fault, way)
    for fault in FAULTS
    for way in (WAYS if fault in ("rank-killed", "agent-killed", "step-killed", "launch-killed")
                else WAYS[:1])
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "way"),
    [pytest.param(*pair, marks=() if pair[0] == "rank-killed" else pytest.mark.faults)
     for pair in PAIRS],
)  # fmt: skip
def test_a_failure_ends_everything_and_is_named(
    checkout: PbsCheckout, launched: Callable[..., Launched], fault: str, way: str
) -> None:
    do, error = FAULTS[fault]
    training = launched(fault, way, options=("--timeout", str(HUNG)))
    training.trains()
    do(training)
    seconds = until_none(lambda: left(checkout))
    print(f"{fault} by {way}: over on all nodes {seconds:.1f} s later")
    print(training.text[-1500:])
    if error:
        assert re.search(rf"launch: train failed: {error}", training.text), training.text
        assert training.text.endswith("status 1\n")
        assert (training.results / "logs/rank=1.log").exists()
    else:
        assert training.text.endswith("status 137\n")
    if fault == "rank-raises":
        assert "rank 1 on n2 | KeyboardInterrupt" in training.text
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
        f"stubborn-{how.name}", way, options=("--launcher", "none"),
        program=(str(program), str(folder)),
    )  # fmt: skip
    until(lambda: len(list(folder.glob("alive-*"))) == 3)
    os.kill(training.find("n1", "launch")[0], how)
    seconds = until_none(lambda: left(checkout))
    print(f"stubborn, {how.name} to launch by {way}: over on all nodes {seconds:.1f} s later")


def test_a_full_scratch_costs_only_the_copy(
    cluster: PbsCluster, launched: Callable[..., Launched]
) -> None:
    full = ("mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "full", "/scratch")
    assert cluster.run(*full, node="n2", as_root=True).returncode == 0
    try:
        training = launched("full", "pbs", changes={"epochs": 1, "learning_rate": 0.5})
        until(lambda: "status " in training.text)
    finally:
        assert cluster.run("umount", "--lazy", "/scratch", node="n2", as_root=True).returncode == 0
    assert training.text.endswith("status 0\n"), training.text
    assert re.search(r"/scratch.*No space left on device|shared copy", training.text)
