"""A training that is interrupted again and again ends with the weights of one left alone."""

import os
import random
import re
import signal
import time
from typing import Any

import pytest

from classifier.states import state
from trainings import (
    CONNECTED,
    Training,
    attempts,
    complete,
    complete_on_ranks,
    newest_place,
    result,
    rows_of,
)

SEED = 20261121
# By fault: how the ranks are connected; no weight depends on it.
FAULTS = {
    "SIGKILL train.py": "nccl",
    "SIGKILL launch.py": "nccl",
    "SIGKILL supervise.py": "gloo",
    "SIGKILL torchrun.py": "gloo",
    # To what stands between them: test_launch.py.
    "SIGTERM train.py": "gloo",
    "SIGTERM launch.py": "nccl",
    "SIGUSR1 train.py": "nccl",
    "time is up": "nccl",
}
# If any of its processes is asked to stop, a training saves and ends with status 75.
STOPPED_IN_ORDER = tuple(fault for fault in FAULTS if not fault.startswith("SIGKILL"))
PROCESSES = 2
# Many more epochs than pass between the faults.
EPOCHS = 60
LONGER = {"epochs": EPOCHS, "checkpoint_every": 10}


@pytest.fixture(scope="module")
def alone(digits, tmp_path_factory) -> dict[str, Any]:
    """The result of the same training without interruptions."""
    output = tmp_path_factory.mktemp("alone") / "out"
    complete_on_ranks(output, digits, PROCESSES, **LONGER)
    return result(output)


@pytest.mark.faults
def test_interrupted_again_and_again_at_random_moments(digits, alone, tmp_path) -> None:
    rng = random.Random(SEED)
    output = tmp_path / "out"
    told, saved = [f"seed {SEED}"], {}
    faults = rng.sample([*FAULTS], len(FAULTS))
    # One fault comes during the start; an orderly stop needs a running training.
    early = rng.choice([fault for fault in faults if fault not in STOPPED_IN_ORDER])
    for fault in faults:
        before = newest_place(output)
        what, _, victim = fault.partition(" ")
        moment = rng.uniform(0, 4) if fault == early else rng.uniform(0, 0.8)
        environment = (
            {"LAUNCH_STOP_AT": str(time.time() + rng.uniform(3, 9))}
            if fault == "time is up"
            else {}
        )
        environment |= CONNECTED[FAULTS[fault]]
        how = {"processes": PROCESSES, "environment": environment}
        training = Training(output, digits, **how, **LONGER)
        if fault not in (early, "time is up"):
            training.reach(before[0] + 1)
        if fault != "time is up":
            time.sleep(moment)
            os.kill(rng.choice(training.await_start(victim)), getattr(signal, what))
        status = training.end()
        after = newest_place(output)
        if after > before:
            saved[f"process {training.process.pid}"] = before
        told.append(
            f"{fault} after {moment:.2f} s{' of its start' if fault == early else ''}: "
            f"{before} to {after}\n{training.said}"
        )
        problem = "\n\n".join(told)
        assert status == (
            75
            if fault in STOPPED_IN_ORDER
            else -signal.SIGKILL
            if fault == "SIGKILL launch.py"
            else 1
        ), problem
        if fault in STOPPED_IN_ORDER:
            said = re.search(
                (
                    rf"^launch: train was interrupted: .* after (.*), of {EPOCHS} epochs; saved in "
                    rf"{output}/state; run the same command"
                ),
                training.said,
                re.MULTILINE,
            )
            assert said, problem
            assert said[1] == state.progress(*after), problem
        # At most an interval, here an epoch, is lost.
        assert after >= max(before, (max(training.epochs, default=0) - 1, 0)), problem
    how = {"processes": PROCESSES, "environment": CONNECTED["nccl"]}
    last = complete(output, digits, **how, **LONGER)
    saved[f"process {last.process.pid}"] = after
    assert result(output) == alone, problem
    assert [int(row["epoch"]) for row in rows_of(output)] == list(range(1, EPOCHS + 1))
    # Each attempt resumed the newest state; attempts that saved nothing are not recorded.
    noted = {
        " ".join(attempt["by"].split()[:2]): (attempt["from"]["epoch"], attempt["from"]["step"])
        for attempt in attempts(output)
    }
    assert noted == saved, problem
