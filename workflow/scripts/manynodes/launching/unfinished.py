"""Processes that go on long after another one has ended well: one of them may hang."""

import math
import time
from collections.abc import Callable, Sequence
from threading import Thread

from manynodes.launching.endings import sent
from manynodes.launching.whereabouts import Whereabouts

ASK = 5  # seconds between two looks


def told_of_unfinished(
    lines: Sequence[str], processes: int, patience: float, tell: Callable[[str], None]
) -> Callable[[int, bool], None]:
    """For `agents.run_all`: tells once of processes that go on so long after the first one has
    ended well. Nothing ends them: they may have more to do, such as the last test on rank 0.

    Args:
        lines: of records, as they come.
        patience: in seconds.
    """
    every, since = min(ASK, patience), 0.0
    following = time.monotonic() + every

    def look(_pid: int, _last: bool) -> None:
        nonlocal since, following
        if (now := time.monotonic()) < following:
            return
        following = now + every
        finished = sent(tuple(lines), "finished")
        if not finished or len(finished) == processes:
            return
        since = since or now
        if now - since < patience:
            return
        following = math.inf
        kind = finished[0].partition(" ")[0]
        ended = {name.partition(" on ")[0] for name in finished}
        left = [f"{kind} {n}" for n in range(processes) if f"{kind} {n}" not in ended]
        more = f" and {len(left) - 1} more go" if len(left) > 1 else " goes"
        text = (
            f"{finished[0]} ended with status 0 more than {patience:.0f} s ago, and "
            f"{left[0]}{more} on; if nothing more is to come, end the job, which tells where"
        )
        # In a thread: a terminal that somebody has stopped must not hold up the ranks.
        Thread(target=tell, args=(text,), daemon=True).start()

    return look


def place_of_unfinished(finished: Sequence[str], seen: Sequence[Whereabouts]) -> str:
    """Where a process was when it was told to end, long after others had ended well; empty if none
    was, or it is not known.

    Args:
        finished: the processes that have ended with 0.
        seen: sent by the supervisors of those that were told to end.
    """
    left = [each for each in seen if each.words and each.name not in finished]
    if not (finished and left):
        return ""
    return f"{left[0].name} was {left[0].words}, after {finished[0]} had ended with status 0"
