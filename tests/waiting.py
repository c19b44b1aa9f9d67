"""Waiting for a condition. How long is for nobody to say here: a test has one limit for all."""

import subprocess
import time
from collections.abc import Callable, Collection


def until(what: Callable[[], object], *starts: subprocess.Popen) -> float:
    """Wait until it is true; returns the seconds, for a table of the docs.

    Args:
        starts: processes without which it cannot become true.

    Raises:
        AssertionError: one of them has ended before.
    """
    since = time.monotonic()
    asked = since
    while not what():
        ended = [process for process in starts if process.poll() is not None]
        assert not ended or what(), [(process.args, process.returncode) for process in ended]
        # A question may start a process, such as squeue; six tests that wait take half a CPU at
        # most.
        time.sleep(max(0.1, 10 * (time.monotonic() - asked)))
        asked = time.monotonic()
    return time.monotonic() - since


def until_none(what: Callable[[], Collection[object]]) -> float:
    """Wait until nothing is left; returns the seconds."""
    return until(lambda: not what())
