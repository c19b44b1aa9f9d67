"""Processes that go on long after another one has ended well: one of them may hang."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from manynodes.launching.endings import records
from manynodes.launching.whereabouts import Whereabouts

ASK = 5  # seconds between two looks


@contextmanager
def told_of_unfinished(
    lines: Sequence[str], processes: int, patience: float, tell: Callable[[str], None]
) -> Iterator[None]:
    """Meanwhile, tell once of processes that go on so long after the first one has ended well.
    Nothing ends them: they may have more to do, such as the last test on rank 0.

    Args:
        lines: of records, as they come.
        patience: in seconds.
    """
    over = threading.Event()
    watching = (lines, processes, patience, tell, over)
    thread = threading.Thread(target=watch, args=watching, daemon=True)
    if processes > 1:
        thread.start()
    try:
        yield
    finally:
        over.set()
        # It must not tell anything when nobody listens any more.
        if processes > 1:
            thread.join()


def watch(
    lines: Sequence[str],
    processes: int,
    patience: float,
    tell: Callable[[str], None],
    over: threading.Event,
) -> None:
    since = 0.0
    while not over.wait(min(ASK, patience)):
        sent = [record["finished"] for record in records(tuple(lines)) if "finished" in record]
        if not sent or len(sent) == processes:
            continue
        since = since or time.monotonic()
        if time.monotonic() - since >= patience:
            kind = sent[0].partition(" ")[0]
            ended = {name.partition(" on ")[0] for name in sent}
            left = [f"{kind} {n}" for n in range(processes) if f"{kind} {n}" not in ended]
            more = f" and {len(left) - 1} more go" if len(left) > 1 else " goes"
            tell(
                f"{sent[0]} ended with status 0 more than {patience:.0f} s ago, and "
                f"{left[0]}{more} on; if nothing more is to come, end the job, which tells where"
            )
            return


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
