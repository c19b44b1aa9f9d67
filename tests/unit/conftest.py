"""Shared by the unit tests: the digits, and trainings on them."""

import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from programs import program
from trainings import Training, complete, complete_on_ranks, newest_place, result


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the digits. Tests that damage it copy it first."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    done = program("fetch", "--dataset", "digits", "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def finished(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The output of an uninterrupted training on so many processes, without `launch`: a launched
    one must be equal. Tests that change it copy it first.
    """
    folder = tmp_path_factory.mktemp("finished")

    def output(processes: int) -> Path:
        trained = folder / str(processes)
        if not trained.exists():
            if processes == 1:
                complete(trained, digits)
            else:
                complete_on_ranks(trained, digits, processes)
        return trained

    return output


@pytest.fixture(scope="session")
def reference(finished: Callable[[int], Path]) -> Callable[[int], dict[str, Any]]:
    """The result of that training."""
    return lambda processes: result(finished(processes))


@pytest.fixture(scope="session")
def interrupted(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a training on one process that was stopped within epoch 14 or 15, of 16.

    Tests copy it. Without the record of its owner, nobody waits for the owner.
    """
    for attempt in count():
        output = tmp_path_factory.mktemp("interrupted") / str(attempt)
        training = Training(output, digits)
        training.reach(13)
        training.process.send_signal(signal.SIGTERM)
        # It may get further before this process has sent the signal.
        if training.end() == 75 and newest_place(output) < (15, 0):
            break
    (output / "state" / "owner.json").unlink()
    return output
