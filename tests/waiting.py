"""Waiting for a condition."""

import time
from collections.abc import Callable


def until(what: Callable[[], object], seconds: float) -> float:
    """Wait until it is true; returns the seconds."""
    since = time.monotonic()
    while not what():
        assert time.monotonic() - since < seconds, f"not within {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - since
