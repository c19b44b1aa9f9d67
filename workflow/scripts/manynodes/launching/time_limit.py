"""A time limit that somebody lowers while the job runs: ranks know the one that it began with."""

import math
import time
from contextlib import suppress
from threading import Event

from manynodes.base.errors import Refusal
from manynodes.base.timeouts import BEFORE_THE_END
from manynodes.schedulers.base import Allocation, Scheduler

# Seconds between two questions, and by which a limit must be lower to count as another one.
ASK = 60
# Seconds to the next one without an answer, and to the next warning, once the limit is lower.
AGAIN = 5


def warn_of_a_lower_limit(scheduler: Scheduler, job: Allocation, over: Event) -> None:
    """Until it is over, follow the job's end, and warn the ranks BEFORE_THE_END seconds before it
    if it comes sooner than they know.
    """
    known = job.end or math.inf
    wait, again = 0.0, ASK
    while not over.wait(wait):
        # Without an answer, ask again.
        wait = again
        with suppress(Refusal):
            end = scheduler.end(job)
            if end is None or end > known - ASK:
                wait = again = ASK
                continue
            left = end - BEFORE_THE_END - time.time()
            wait = again = AGAIN
            if left <= 0:
                scheduler.warn(job)
                return
            wait = min(left, ASK)
