"""Shared by the unit tests and their workers: the digits, and trainings on them."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from programs import program
from trainings import Training, complete, complete_on_ranks, newest_place, result

# The fixture of this name.
MadeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def digits(made_once: MadeOnce) -> Path:
    """A data folder with the digits. Tests that damage it copy it first."""

    def fetch(folder: Path) -> None:
        done = program("fetch", "--dataset", "digits", "--output", folder)
        assert done.returncode == 0, done.stderr

    return made_once("digits", fetch)


@pytest.fixture(scope="session")
def finished(digits: Path, made_once: MadeOnce) -> Callable[[int], Path]:
    """The output of an uninterrupted training on so many processes, without `launch`: a launched
    one must be equal. Tests that change it copy it first.
    """

    def output(processes: int) -> Path:
        def train(folder: Path) -> None:
            if processes == 1:
                complete(folder, digits)
            else:
                complete_on_ranks(folder, digits, processes)

        return made_once(f"finished-{processes}", train)

    return output


@pytest.fixture(scope="session")
def reference(finished: Callable[[int], Path]) -> Callable[[int], dict[str, Any]]:
    """The result of that training."""
    return lambda processes: result(finished(processes))


@pytest.fixture(scope="session")
def interrupted(digits: Path, made_once: MadeOnce) -> Path:
    """The output of a training on one process that was stopped within epoch 14 or 15, of 16.

    Tests copy it. Without the record of its owner, nobody waits for the owner.
    """

    def train(output: Path) -> None:
        while True:
            training = Training(output, digits)
            training.reach(13)
            training.process.send_signal(signal.SIGTERM)
            # It may get further before this process has sent the signal.
            if training.end() == 75 and newest_place(output) < (15, 0):
                break
            shutil.rmtree(output)
        (output / "state" / "owner.json").unlink()

    return made_once("interrupted", train)


@pytest.fixture(scope="session")
def evaluated(finished: Callable[[int], Path], digits: Path, made_once: MadeOnce) -> Path:
    """The results of an experiment of one run, that of `trainings.RUN`. Tests copy them."""

    def evaluate(results: Path) -> None:
        run = Path(shutil.copytree(finished(1), results / "run"))
        where = ["--data", digits, "--model", run / "model.safetensors", "--device", "cpu"]
        kept = ["--checkpoints", run / "checkpoints"]
        done = program("evaluate", *where, *kept, "--output", run / "evaluation.json")
        assert done.returncode == 0, done.stderr

    return made_once("evaluated", evaluate)
