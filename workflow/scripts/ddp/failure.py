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
        preempted: nothing failed: the program was asked to stop, and can go on where it was.
        again: it is worth being started again at once. What has been stopped by a signal of the scheduler's is not: the scheduler starts it
            again if it will. What has failed is only if it has saved something before: so what fails again at the same place, before
            anything new is saved, has an end.
    """

    line: str
    details: tuple[str, ...] = ()
    preempted: bool = False
    again: bool = False


def first_failure(outcome: Outcome, endings: Sequence[Ending], errors: Sequence[str], job: str | None) -> Failure:
    """Tell what failed first.

    Args:
        endings: what the ranks' supervisors sent.
        errors: last lines of stderr of what was started.
        job: id of the Slurm job if srun was started, else None.
    """
    stopped = [ending for ending in endings if "stopped" in ending.report]
    failed = [ending for ending in endings if "stopped" not in ending.report]
    saved = any("saved" in ending.report for ending in endings)
    if stopped and not failed:
        # Rank 0 says where it has saved.
        said = min(stopped, key=lambda ending: "saved" not in ending.report).lines[-1]
        terminated = [ending for ending in stopped if ending.report["stopped"] == "SIGTERM"]
        if outcome.stopped or not terminated:
            by = f"; what by: sacct -X -j {job}" if outcome.stopped and job else ""
            return Failure(said + by, preempted=True, again=not outcome.stopped)
        # Neither the scheduler's doing nor ours. A process between the scheduler and the rank was killed, which is a failure although the
        # ranks have saved; or somebody asked one of them to stop.
        if by_force := killed(outcome, errors, job):
            return Failure(f"{by_force}; {said}", again=saved)
        first = min(terminated, key=lambda ending: ending.time)
        return Failure(f"{first.who} got SIGTERM; {said}", preempted=True, again=saved)
    if outcome.stopped:
        return Failure(f"stopped; cancelled, preempted, or over its time: sacct -X -j {job}" if job else "stopped")
    if failed:
        first = cause(failed)
        # Its rank dies with it, or of it, and so do the peers.
        if (supervisor := killed_supervisor(errors)) and first.is_consequence:
            return Failure(supervisor, again=saved)
        details = tuple(f"{first.who} | {text}" for text in first.lines) if len(first.lines) > 1 else ()
        return Failure(first.error + (f"; its own log is {first.log}" if first.log else ""), details, again=saved)
    by_slurm = said_by_slurm(errors) if job else None
    return Failure(killed(outcome, errors, job) or by_slurm or f"{starter(job, outcome)} {how(outcome.status)}")


def killed(outcome: Outcome, errors: Sequence[str], job: str | None) -> str | None:
    """The process that was killed, where it stood between the scheduler and a rank and could not say so itself; None if none was."""
    if outcome.status < 0:
        return f"{starter(job, outcome)} {how(outcome.status)}"
    if supervisor := killed_supervisor(errors):
        return supervisor
    said = said_by_slurm(errors) if job else None
    return said if said and "Killed" in said else None


def killed_supervisor(errors: Sequence[str]) -> str | None:
    """A rank's supervise.py that a signal has ended, from torchrun's report, which has a line each for host, rank and exit code."""
    report = "\n".join(errors).partition("Root Cause (first observed failure):")[2]
    found = {}
    for key in ("host", "rank", "exitcode"):
        if match := re.search(rf"^.*?\b{key}\s*: (-?\S+)", report, re.MULTILINE):
            found[key] = match[1]
    if len(found) < 3 or not found["exitcode"].startswith("-"):
        return None
    return f"supervise.py of rank {found['rank']} on {found['host']} {how(int(found['exitcode']))}"


def starter(job: str | None, outcome: Outcome) -> str:
    return "srun" if job else f"the command of node {outcome.failed}"


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
