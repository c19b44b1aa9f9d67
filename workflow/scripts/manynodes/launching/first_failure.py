"""Which failure came first, from what the processes of a launch left. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from manynodes.base.failure import Failure, Kind
from manynodes.base.processes import how
from manynodes.launching.agents import Outcome
from manynodes.launching.endings import Ending, cause
from manynodes.launching.whereabouts import Whereabouts, hung
from manynodes.schedulers.base import Cause, Trouble

# Words of a process that has lost its peer, if that has closed the connection.
CLOSED = re.compile(r"[Cc]onnection (closed|reset)|[Bb]roken pipe")


@dataclass(frozen=True)
class First:
    """The first failure, and what may be done about it.

    Attributes:
        details: the last lines of the rank that failed, if there are several.
        again: an immediate restart is useful. True after a failure that followed a save, or after
            a lost node. False after a scheduler's signal. `launch` bounds the starts that save
            nothing more.
        saved: whether the program had saved something new in this start.
        said: how far it was when it saved, see `said_of`.
        in_place: the restart may be in the same job: its nodes are all there, and its time is not
            up.
        stopped: `launch` was asked to stop while the program ran.
    """

    failure: Failure
    details: tuple[str, ...] = ()
    again: bool = False
    saved: bool = False
    in_place: bool = False
    stopped: bool = False
    said: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """Where the processes of a launch came from.

    Attributes:
        starter: name of the process that ended first, `srun` for one.
        trouble: what the scheduler says of it.
        inspect: command that shows why the job ended; empty outside a job.
    """

    starter: str
    trouble: Trouble | None = None
    inspect: str = ""

    @property
    def lost(self) -> Trouble | None:
        """The loss of a node, or of the launcher on it, if there is one: the ranks elsewhere only
        say that they have lost a peer.
        """
        lost = self.trouble and self.trouble.cause in (Cause.NODE_LOST, Cause.LAUNCHER_KILLED)
        return self.trouble if lost else None

    @property
    def node_lost(self) -> bool:
        """Whether a whole node was lost, not only the command on it."""
        return self.trouble is not None and self.trouble.cause == Cause.NODE_LOST


def first_failure(
    outcome: Outcome,
    endings: Sequence[Ending],
    seen: Sequence[Whereabouts],
    errors: Sequence[str],
    source: Source,
    restarted: bool = False,
    finished: Sequence[str] = (),
    changed: bool = False,
) -> First:
    """Find the first failure.

    Args:
        endings, seen: sent by the supervisors of the ranks.
        errors: last lines of stderr of the started processes.
        restarted: the ranks had been started again in this job.
        finished: the ranks that have ended with 0.
        changed: the files of its state have changed; for supervisors that cannot tell.
    """
    stopped = [ending for ending in endings if "stopped" in ending.report]
    late = [ending for ending in endings if "late" in ending.report]
    others = [ending for ending in endings if not {"stopped", "late"} & {*ending.report}]
    failed = [ending for ending in others if ending.status != 0 and not ending.only_told]
    saved = any("saved" in ending.report for ending in endings)
    refused = any("refused" in ending.report for ending in failed)
    first = cause(failed) if failed else None
    waited = first is not None and first.lost_a_peer and any(each.timed_out for each in failed)
    suspended = waited and outcome.suspended > 0
    # An earlier start has saved something, if there was one.
    worth_it = (saved or suspended or restarted) and not refused
    # If a restart gets no further, the nodes may be the cause: a GPU is broken, or Slurm takes
    # them for busy (seen after its controller was restarted). A new job may get others.
    elsewhere = restarted and not saved and not outcome.stopped
    again = worth_it or (source.node_lost and not refused) or elsewhere
    in_place = worth_it and not source.node_lost
    if stopped and not failed:
        usual = First(Failure(""), again=again, saved=saved, in_place=in_place)
        return all_stopped(outcome, stopped, errors, source, usual, elsewhere)
    if outcome.stopped:
        return told_to_stop(outcome, failed, source, saved)
    if late and not source.lost and (first is None or first.is_consequence):
        return First(of_late(min(late, key=lambda ending: ending.time)), again=restarted)
    if first:
        # When a supervisor is killed, or a node lost, the peers fail too.
        root = killed_supervisor(errors) or (of_trouble(source.lost) if source.lost else None)
        if root and first.is_consequence:
            in_place = in_place or (changed and not source.node_lost)
            return First(root, (), again or changed, saved or changed, in_place)
        if waited and not suspended and (stuck := hung(seen)):
            failure, details = of_hung(stuck)
        else:
            reason = reason_of(first, outcome.suspended if suspended else 0, finished)
            failure, details = of_rank(first, reason, refused), last_lines(first)
        return First(failure, details, worth_it or elsewhere, saved, in_place)
    failure = killed(outcome, errors, source) or of_none(outcome, others, source)
    again = source.node_lost or elsewhere or changed
    # A killed srun leaves its step, whose ranks own the run; a requeue ends them.
    lives_on = source.starter == "srun" and outcome.status < 0
    in_place = changed and not (source.node_lost or lives_on)
    return First(failure, again=again, saved=changed, in_place=in_place)


def said_of(endings: Sequence[Ending]) -> frozenset[str]:
    """What the processes report of their last save."""
    return frozenset(str(ending.report["saved"]) for ending in endings if "saved" in ending.report)


def of_unknown_ends(
    outcome: Outcome, finished: Sequence[str], processes: int, said: Trouble | None
) -> Trouble | None:
    """The loss of nodes if the commands have ended well, but not all processes have told that they
    have: srun ends with 0 when Slurm loses touch with all nodes of a step, whose processes may live
    on. None if nothing is lost.

    Args:
        finished: the processes that have told it.
        processes: how many supervisors were started.
        said: what the scheduler says.
    """
    silent = processes - len({*finished})
    if outcome.stopped or outcome.failed is not None or silent <= 0:
        return None
    if not (outcome.heard_out or said):
        # They may have told it to somebody who does not read.
        return None
    text = f"it is not known how {silent} of {processes} processes ended"
    text += f": {said.text}" if said else ""
    return Trouble(text, said.where if said else "", Cause.NODE_LOST)


def of_none(outcome: Outcome, endings: Sequence[Ending], source: Source) -> Failure:
    """The failure of a step of whose processes none has failed."""
    if source.trouble:
        return of_trouble(source.trouble)
    # All of them were told to end, the first one perhaps by somebody, and the others after it.
    if endings:
        return of_ended(min(endings, key=lambda ending: (ending.status != 0, ending.time)))
    return Failure(f"{source.starter} {how(outcome.status)}")


def told_to_stop(outcome: Outcome, failed: Sequence[Ending], source: Source, saved: bool) -> First:
    """What ended a launch that was asked to stop: a failure before that, which comes again, if
    there was one.
    """
    before = [
        each
        for each in failed
        if each.time < outcome.asked and not (each.is_consequence or each.is_disconnected)
    ]
    if before:
        first = cause(before)
        failure = of_rank(first, first.error, "refused" in first.report)
        return First(failure, last_lines(first), saved=saved)
    why = f"; cancelled, preempted, or out of time: {source.inspect}" if source.inspect else ""
    return First(Failure(f"stopped{why}", Kind.PREEMPTED))


def all_stopped(
    outcome: Outcome,
    stopped: Sequence[Ending],
    errors: Sequence[str],
    source: Source,
    usual: First,
    elsewhere: bool,
) -> First:
    """What ended a launch whose ranks have all stopped in order.

    Args:
        usual: without its failure; what may be done about it after a failure.
        elsewhere: whether other nodes may help.
    """
    # Rank 0 says where it has saved.
    teller = min(stopped, key=lambda ending: "saved" not in ending.report)
    said = teller.lines[-1] if teller.lines else f"{teller.name} stopped"
    if late := [each.name for each in stopped if "killed" in each.report and each is not teller]:
        said += f"; {late[0]} did not end by itself, and was killed"
    terminated = [ending for ending in stopped if ending.report["stopped"] == "SIGTERM"]
    if outcome.stopped or not (terminated or source.lost):
        by = f"; the reason: {source.inspect}" if outcome.stopped and source.inspect else ""
        failure = Failure(said + by, Kind.PREEMPTED)
        return First(failure, again=not outcome.stopped, saved=usual.saved)
    # Neither the scheduler nor this process sent the signal. Either a process between the
    # scheduler and a rank was killed, which is a failure although the ranks have saved, or
    # somebody stopped one rank.
    if by_force := killed(outcome, errors, source):
        return replace(usual, failure=replace(by_force, reason=f"{by_force.reason}; {said}"))
    told = min(terminated, key=lambda ending: ending.time)
    line = f"{told.name} got SIGTERM; {said}"
    failure = Failure(line, Kind.PREEMPTED, told.who, told.where)
    # A scheduler that takes the job away may signal all of its ranks, but not `launch`.
    in_place = usual.saved and len(terminated) < len(stopped)
    return First(failure, again=usual.saved or elsewhere, saved=usual.saved, in_place=in_place)


def of_late(ending: Ending) -> Failure:
    # Every rank that has a state would have said that it has stopped.
    said = f"{ending.name}: {ending.report['late']}"
    return of_rank(ending, f"{said}: give it more time, or let it save more often", refused=False)


def of_ended(ending: Ending) -> Failure:
    said = f"{ending.name} was told to end, and {how(ending.status or 0)}"
    if ending.late:
        said = ending.error
    elif not ending.status:
        # It may not have finished its work.
        said += ", not with 75"
    return of_rank(ending, said, refused=False)


def of_hung(stuck: Whereabouts) -> tuple[Failure, tuple[str, ...]]:
    line = f"{stuck.name} hung ({stuck.words}), and the others waited for it"
    frames = tuple(f"{stuck.name} | {frame}" for frame in stuck.frames)
    return Failure(line, Kind.HUNG, stuck.who, stuck.where, stuck.log), frames


def reason_of(ending: Ending, suspended: float, finished: Sequence[str]) -> str:
    """Why a rank failed: in its own words, or what it says nothing of.

    Args:
        suspended: seconds for which the job was suspended, so that it waited too long; 0 if not.
        finished: ranks that have ended with 0.
    """
    if suspended:
        return f"the job was suspended for {suspended:.0f} s; {ending.error}"
    # NCCL tells nobody of a peer that has gone: an operation with it takes too long.
    gone = ending.lost_a_peer and CLOSED.search("\n".join(ending.lines))
    if finished and (gone or ending.timed_out):
        return f"{finished[0]} ended with status 0 while {ending.name} waited for it"
    return ending.error


def of_rank(ending: Ending, reason: str, refused: bool) -> Failure:
    kind = Kind.REFUSED if refused else Kind.FAILED
    return Failure(reason, kind, ending.who, ending.where, ending.log)


def last_lines(ending: Ending) -> tuple[str, ...]:
    """The last lines of a rank; none if there is only one, which is told anyway."""
    lines = ending.lines if len(ending.lines) > 1 else ()
    return tuple(f"{ending.name} | {line}" for line in lines)


def of_trouble(trouble: Trouble) -> Failure:
    kind = Kind.FAILED if trouble.cause == Cause.OTHER else Kind.LOST
    return Failure(trouble.text, kind, where=trouble.where)


def killed(outcome: Outcome, errors: Sequence[str], source: Source) -> Failure | None:
    """The process or node between the scheduler and a rank that was lost; None if none was."""
    if outcome.status < 0:
        return Failure(f"{source.starter} {how(outcome.status)}", Kind.LOST, source.starter)
    if supervisor := killed_supervisor(errors):
        return supervisor
    if source.trouble and source.trouble.cause != Cause.OTHER:
        return of_trouble(source.trouble)
    return None


def killed_supervisor(errors: Sequence[str]) -> Failure | None:
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
    who, where = f"rank {found['rank']}", found["host"]
    line = f"supervise.py of {who} on {where} {how(int(found['exitcode']))}"
    return Failure(line, Kind.LOST, who, where)
