"""A time limit that somebody lowers while the job runs: ranks know the one that it began with."""

import math
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from manynodes.base.errors import Refusal
from manynodes.schedulers.base import Allocation, Scheduler

# Seconds between two questions, and by which a limit must be lower to count as another one.
ASK = 60
# Seconds to the next one without an answer, and to the next warning, once the limit is lower.
AGAIN = 5


@contextmanager
def warned_of_a_lower_limit(scheduler: Scheduler, job: Allocation, before: float) -> Iterator[None]:
    """Meanwhile, warn the ranks these seconds before the end, if it comes sooner than they know."""
    over = threading.Event()
    thread = threading.Thread(target=watch, args=(scheduler, job, before, over), daemon=True)
    if job.job:
        thread.start()
    try:
        yield
    finally:
        over.set()


def watch(scheduler: Scheduler, job: Allocation, before: float, over: threading.Event) -> None:
    known = job.end or math.inf
    wait, again = 0.0, ASK
    while not over.wait(wait):
        # Without an answer, ask again.
        wait = again
        with suppress(Refusal, OSError, subprocess.CalledProcessError):
            end = scheduler.end(job)
            if end is None or end > known - ASK:
                wait = again = ASK
                continue
            left = end - before - time.time()
            wait = again = AGAIN
            if left <= 0:
                scheduler.warn(job)
                return
            wait = min(left, ASK)
