"""Waiting for a condition."""

import time
from collections.abc import Callable, Collection


def until(what: Callable[[], object], seconds: float) -> float:
    """Wait until it is true; returns the seconds."""
    since = time.monotonic()
    while not what():
        assert time.monotonic() - since < seconds, f"not within {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - since


def until_none(what: Callable[[], Collection[object]], seconds: float) -> float:
    """Wait until nothing is left, and name what is; returns the seconds."""
    try:
        return until(lambda: not what(), seconds)
    except AssertionError:
        raise AssertionError(f"left after {seconds} s: {list(what())}") from None
