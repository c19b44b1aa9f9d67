"""Waiting for a condition. How long is for nobody to say here: a test has one limit for all."""

import os
import subprocess
import time
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")
# Seconds between two questions: a process that has ended between them may have used any time.
LONGEST = 5


def until(what: Callable[[], object], *starts: subprocess.Popen) -> float:
    """Wait until it is true; returns the seconds, for a table of the docs.

    Args:
        starts: processes without which it cannot become true.

    Raises:
        AssertionError: one of them has ended before.
    """
    since = time.monotonic()
    asked = used()
    while not what():
        ended = [process for process in starts if process.poll() is not None]
        assert not ended or what(), [(process.args, process.returncode) for process in ended]
        # A question may start a process, such as squeue; six tests that wait take a fifth of a CPU
        # at most.
        time.sleep(min(max(0.1, 30 * (used() - asked)), LONGEST))
        asked = used()
    return time.monotonic() - since


def given_enough(seconds: float, run: Callable[[float], T], enough: Callable[[], object]) -> T:
    """What it returns when it had the seconds for what must come first: twice as many each time."""
    while True:
        result = run(seconds)
        if enough():
            return result
        seconds *= 2


def used() -> float:
    """The CPU seconds of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def until_none(what: Callable[[], Collection[object]]) -> float:
    """Wait until nothing is left; returns the seconds."""
    return until(lambda: not what())
