"""Votes of ranks, and trainings whose numbers are not finite."""

import json
import re
from pathlib import Path

import pytest

from classifier.states import state
from forked import run_ranks
from programs import python
from trainings import CONNECTED, Training


@pytest.fixture(scope="module")
def verdicts() -> dict[str, tuple]:
    """Results by vote, equal on both ranks."""
    script = Path(__file__).with_name("votes.py")
    ranks = run_ranks([str(script)], 2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    one, other = (
        json.loads(line.removeprefix("found "))
        for rank in ranks
        for line in rank.stdout.splitlines()
        if line.startswith("found ")
    )
    assert one == other
    return {name: tuple(verdict.values()) for name, verdict in one.items()}


@pytest.mark.parametrize(("name", "verdict"), [
    ("nothing", (None, False, None, None)),
    ("stop on 1", ("its time is nearly up", False, None, None)),
    ("stop on both", ("SIGTERM", False, None, None)),
    ("save on 0", (None, True, None, None)),
    ("loss of 1", (None, False, 1, None)),
    ("infinite loss of both", (None, False, 0, None)),
    ("gradient of 1, and 0 stops", ("SIGTERM", False, None, 1)),
])  # fmt: skip
def test_all_ranks_come_to_the_same(verdicts, name, verdict) -> None:
    assert verdicts[name] == verdict


def test_a_gradient_is_looked_at_before_it_is_averaged(verdicts) -> None:
    """After the average it is bad on all ranks, and its origin is unknown."""
    assert verdicts["step 1"] == (None, False, None, None)
    assert verdicts["step 2"] == (None, False, None, 1)
    # The step was taken, with the weights of all: the loss after it is everybody's.
    assert verdicts["step 3"][2] == 0


@pytest.mark.parametrize("connection", ["gloo", pytest.param("nccl", marks=pytest.mark.faults)])
def test_a_rate_that_is_absurd_ends_all_ranks_at_once(digits, tmp_path, connection: str) -> None:
    training = Training(
        tmp_path / "out", digits, processes=2, environment=CONNECTED[connection],
        launch=["--restart"], learning_rate=1e6, crop_size=32,
    )  # fmt: skip
    assert training.end() == 1
    # It would come again.
    assert "starting again" not in training.said
    *_, last = training.said.splitlines()
    assert re.search(
        (
            r"epoch 1, step \d+: the loss of rank 0 is not finite; use a lower "
            r"learning_rate than 1000000\.0 or a longer warmup"
        ),
        last,
    )
    logs = [(training.logs / "ranks" / f"rank={rank}.log").read_text() for rank in (0, 1)]
    assert all(
        re.search(r"train: epoch 1, step \d+: the loss of rank 0 is not finite", log)
        for log in logs
    ), logs
    assert training.epochs == []
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.faults
@pytest.mark.parametrize("connection", CONNECTED)
def test_what_was_saved_before_numbers_went_bad_is_whole_and_finite(
    digits, tmp_path, connection: str
) -> None:
    """With a slowly rising rate, training gets worse for epochs before numbers are not finite.

    The first such number is a variance in BatchNorm, after a step with finite loss and gradient.
    """
    training = Training(
        tmp_path / "out", digits, processes=2, environment=CONNECTED[connection],
        launch=["--restart", "--state", tmp_path / "out/state"],
        learning_rate=1000.0, warmup=0.9, epochs=8,
    )  # fmt: skip
    assert training.end() == 1
    assert "starting again" not in training.said
    *_, last = training.said.splitlines()
    assert re.search(
        r"(after epoch \d+: \S+\.running_var|epoch \d+, step \d+: the (loss|gradient) of rank \d)"
        r" is not finite; use a lower "
        r"learning_rate than 1000\.0 or a longer warmup; the last good state is kept",
        last,
    ), last
    found = [state.read(path)[0] for path, _ in state.states(tmp_path / "out" / "state")]
    assert found
    for tensors in [each.model for each in found] + [
        rank["buffers"] for each in found for rank in each.ranks
    ]:
        assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_signal_while_python_shuts_down_does_not_hide_how_a_rank_ended() -> None:
    """What is left in `sys.modules` is deleted after Python has restored the signals' effects."""
    script = """
import os, signal, sys
from manynodes.ranks import stopping

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

stopping.listen(None)
sys.modules["last"] = Last()
sys.exit("train: refused")
"""
    done = python(script)
    assert (done.returncode, done.stderr) == (1, "train: refused\n")
