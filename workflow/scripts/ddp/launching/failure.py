"""Which failure came first, from what the processes of a launch left. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddp.base.processes import how
from ddp.launching.agents import Outcome
from ddp.launching.endings import Ending, cause
from ddp.launching.whereabouts import Whereabouts, hung


@dataclass(frozen=True)
class Failure:
    """The first failure.

    Attributes:
        line: who failed and why, in one line.
        details: the last lines of that rank, if there are several.
        preempted: nothing failed: the program was asked to stop, and can be resumed.
        again: an immediate restart is useful. It is not if a signal of the scheduler's stopped
            the program: the scheduler restarts it if it wants to. After a failure it is only if
            the program had saved something new; so a program that fails again and again at the
            same place is not restarted for ever. A lost node is no fault of the program's.
        saved: whether the program had saved something new.
        in_place: the restart may be in the same job: its nodes are all there, and its time is not
            up.
    """

    line: str
    details: tuple[str, ...] = ()
    preempted: bool = False
    again: bool = False
    saved: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Source:
    """Where the processes of a launch came from.

    Attributes:
        starter: name of the process that ended first, `srun` for one.
        explanation: why it failed, if the scheduler said so.
        inspect: command that shows why the job ended; empty outside a job.
        lost: a node that was lost, if the scheduler has noticed.
    """

    starter: str
    explanation: str | None = None
    inspect: str = ""
    lost: str | None = None

    @property
    def node_lost(self) -> bool:
        """Whether a whole node was lost, not only the command on it."""
        return " is lost: " in (self.lost or "")


def first_failure(
    outcome: Outcome,
    endings: Sequence[Ending],
    seen: Sequence[Whereabouts],
    errors: Sequence[str],
    source: Source,
    restarted: bool = False,
) -> Failure:
    """Find the first failure.

    Args:
        endings, seen: sent by the supervisors of the ranks.
        errors: last lines of stderr of the started processes.
        restarted: the ranks had been started again in this job.
    """
    stopped = [ending for ending in endings if "stopped" in ending.report]
    failed = [ending for ending in endings if "stopped" not in ending.report]
    saved = any("saved" in ending.report for ending in endings)
    refused = any("refused" in ending.report for ending in failed)
    first = cause(failed) if failed else None
    waited = first is not None and first.lost_a_peer and any(each.timed_out for each in failed)
    suspended = waited and outcome.suspended > 0
    worth_it = (saved or suspended) and not refused
    # If a restart gets no further, the nodes may be the cause: a GPU is broken, or Slurm takes them
    # for busy (seen after its controller was restarted). A new job may get others.
    elsewhere = restarted and not saved and not outcome.stopped
    again = worth_it or (source.node_lost and not refused) or elsewhere
    in_place = worth_it and not source.node_lost
    if stopped and not failed:
        # Rank 0 says where it has saved.
        teller = min(stopped, key=lambda ending: "saved" not in ending.report)
        said = teller.lines[-1] if teller.lines else f"{teller.who} stopped"
        terminated = [ending for ending in stopped if ending.report["stopped"] == "SIGTERM"]
        if outcome.stopped or not (terminated or source.lost):
            by = f"; the reason: {source.inspect}" if outcome.stopped and source.inspect else ""
            return Failure(said + by, preempted=True, again=not outcome.stopped, saved=saved)
        # Neither the scheduler nor this process sent the signal. Either a process between the
        # scheduler and a rank was killed, which is a failure although the ranks have saved, or
        # somebody stopped one rank.
        if by_force := killed(outcome, errors, source):
            return Failure(f"{by_force}; {said}", again=again, saved=saved, in_place=in_place)
        told = min(terminated, key=lambda ending: ending.time)
        line = f"{told.who} got SIGTERM; {said}"
        # A scheduler that takes the job away may signal all of its ranks, but not `launch`.
        in_place = saved and len(terminated) < len(stopped)
        again = saved or elsewhere
        return Failure(line, preempted=True, again=again, saved=saved, in_place=in_place)
    if outcome.stopped:
        reason = f"; cancelled, preempted, or out of time: {source.inspect}"
        return Failure("stopped" + (reason if source.inspect else "; run the same command again"))
    if first:
        # When a supervisor is killed, or a node lost, the peers fail too.
        if (root := killed_supervisor(errors) or source.lost) and first.is_consequence:
            return Failure(root, again=again, saved=saved, in_place=in_place)
        several = len(first.lines) > 1
        details = tuple(f"{first.who} | {text}" for text in first.lines) if several else ()
        log = f"; its own log is {first.log}" if first.log else ""
        line = first.error + log
        if suspended:
            line = f"the job was suspended for {outcome.suspended:.0f} s; {line}"
        elif waited and (stuck := hung(seen)):
            details = tuple(f"{stuck.who} | {frame}" for frame in stuck.frames)
            line = f"{stuck.who} hung ({stuck.words}), and the others waited for it"
            line += f"; its own log is {stuck.log}" if stuck.log else ""
        again = worth_it or elsewhere
        return Failure(line, details, again=again, saved=saved, in_place=in_place)
    status = f"{source.starter} {how(outcome.status)}"
    line = killed(outcome, errors, source) or source.explanation or status
    return Failure(line, again=source.node_lost or elsewhere)


def killed(outcome: Outcome, errors: Sequence[str], source: Source) -> str | None:
    """The process or node between the scheduler and a rank that was lost; None if none was."""
    if outcome.status < 0:
        return f"{source.starter} {how(outcome.status)}"
    if supervisor := killed_supervisor(errors):
        return supervisor
    if source.lost:
        return source.lost
    said = source.explanation
    return said if said and "Killed" in said else None


def killed_supervisor(errors: Sequence[str]) -> str | None:
    """A rank's supervise.py that a signal has ended, from torchrun's report.

    The report has a line each for host, rank and exit code.
    """
    report = "\n".join(errors).partition("Root Cause (first observed failure):")[2]
    found = {}
    for key in ("host", "rank", "exitcode"):
        if match := re.search(rf"^.*?\b{key}\s*: (-?\S+)", report, re.MULTILINE):
            found[key] = match[1]
    if len(found) < 3 or not found["exitcode"].startswith("-"):
        return None
    return f"supervise.py of rank {found['rank']} on {found['host']} {how(int(found['exitcode']))}"
