"""What a launch says of its failure, from what its processes left. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddp.agents import Outcome
from ddp.endings import Ending, cause, how, last_words


@dataclass(frozen=True)
class Failure:
    """The first failure.

    Attributes:
        line: who it was and why, in one line.
        details: the last lines of the rank that it was, if they are more than one.
    """

    line: str
    details: tuple[str, ...] = ()


def first_failure(outcome: Outcome, endings: Sequence[Ending], errors: Sequence[str], job: str | None) -> Failure:
    """Tell what failed first.

    Args:
        endings: what the ranks' supervisors sent.
        errors: last lines of stderr of what was started.
        job: id of the Slurm job if srun was started, else None.
    """
    if outcome.stopped:
        return Failure(f"stopped; cancelled, preempted, or over its time: sacct -X -j {job}" if job else "stopped")
    if endings:
        first = cause(endings)
        details = tuple(f"{first.who} | {text}" for text in first.lines) if len(first.lines) > 1 else ()
        return Failure(first.error + (f"; its own log is {first.log}" if first.log else ""), details)
    started = "srun" if job else f"the command of node {outcome.failed}"
    return Failure((said_by_slurm(errors) if job else None) or f"{started} {how(outcome.status)}")


def said_by_slurm(errors: Sequence[str]) -> str | None:
    """What is known where no rank could say how it ended: its launcher failed, or everything on its node was killed."""
    for text in errors:
        # slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-21T07:00:00 DUE TO TIME LIMIT ***
        if found := re.search(r"ON (\S+) CANCELLED AT \S+ DUE TO (.*?) \*\*\*", text):
            return f"Slurm ended it on {found[1]}: {found[2].lower()}"
    for text in errors:
        # srun: error: n2: task 1: Killed
        # srun: error: n2: tasks 2-3: Exited with exit code 1
        if found := re.match(r"srun: error: (\S+): tasks? (\d+)\S*: (.*)", text):
            host, task, ended = found.groups()
            said = last_words([line.partition(": ")[2] for line in errors if re.match(rf"\s*{task}: ", line)], "")
            return f"{host}: {ended}" + (f": {said[-1]}" if said else "")
    # srun: error: Unable to create step for job 12: Requested nodes are busy
    others = [text.removeprefix("srun: error: ") for text in errors if text.startswith("srun: error: ")]
    return others[0] if others else None
