"""The failure that a launch reports, and its record. The lines are Slurm's and torchrun's own."""

import json
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from manynodes.base import failure
from manynodes.base.errors import Refusal, Stopped
from manynodes.base.failure import Again, Failure, Kind, recorded
from manynodes.launching.agents import Outcome
from manynodes.launching.endings import Ending, records
from manynodes.launching.first_failure import First, Source, of_unknown_ends
from manynodes.launching.first_failure import first_failure as found_failure
from manynodes.launching.restarts import MOST_ALIKE, SHORT, Reached, Starts
from manynodes.launching.whereabouts import Observer, Whereabouts, state_of
from manynodes.schedulers.base import Cause, Trouble
from manynodes.schedulers.registry import SCHEDULERS
from waiting import until

FAILED = Outcome(failed=0, status=1)
KILLED_FIRST = Outcome(failed=0, status=-9)
TIMED_OUT = (
    "slurmstepd-n1: error: *** STEP 94.0 ON n1 CANCELLED AT 2026-11-21T07:42:02 DUE TO "
    "TIME LIMIT ***"
)
KILLED = "was ended by SIGKILL; the system does that when memory runs out"


def first_failure(
    outcome: Outcome, endings: list[Ending], errors: list[str], job: str | None
) -> First:
    """Of Slurm job `job`, or on this machine if it is None."""
    scheduler = SCHEDULERS["srun" if job else "local"]
    inspect = f"sacct -X -j {job}" if job else ""
    starter = scheduler.starter.format(outcome.failed or 0)
    source = Source(starter, scheduler.explain(errors), inspect)
    return found_failure(outcome, endings, [], errors, source)


def rank(number: int, status: int, time: float, *lines: str, **report: object) -> Ending:
    """How rank k on node n(k + 1) ended."""
    report = {key: str(value) for key, value in report.items()}
    return Ending(f"rank {number}", f"n{number + 1}", status, time, lines=lines, report=report)


def judged(first: First) -> tuple[str, Kind, str]:
    """Line, kind, and what may be done."""
    flags = [name for name in ("again", "saved", "in_place") if getattr(first, name)]
    return first.failure.line, first.failure.kind, " ".join(flags)


def test_a_rank_that_could_tell_is_believed_before_slurm() -> None:
    ending = replace(
        rank(1, 1, 1.0, "Traceback (most recent call last):", "ValueError: x"),
        log="logs/rank=1.log",
    )
    found = first_failure(FAILED, [ending], ["srun: error: n1: task 0: Killed"], "7")
    assert found == First(
        Failure("rank 1 on n2: ValueError: x", Kind.FAILED, "rank 1", "n2", "logs/rank=1.log"),
        ("rank 1 on n2 | Traceback (most recent call last):", "rank 1 on n2 | ValueError: x"),
    )
    assert found.failure.line == "rank 1 on n2: ValueError: x; its own log is logs/rank=1.log"


@pytest.mark.parametrize(
    ("errors", "line", "kind"),
    [
        (["1: loading", "0: all well", "srun: error: n2: task 1: Killed",
          "srun: error: n1: task 0: Exited with exit code 1"], "n2: Killed: loading", Kind.LOST),
        (["srun: error: n2: tasks 2-3: Out Of Memory"], "n2: Out Of Memory", Kind.FAILED),
        (["srun: error: n1: task 0: Exited with exit code 1", TIMED_OUT],
         "Slurm ended it on n1: time limit", Kind.FAILED),
        (["srun: error: Unable to create step for job 12: Requested nodes are busy"],
         "Unable to create step for job 12: Requested nodes are busy", Kind.FAILED),
        ([], "srun ended with status 1", Kind.FAILED),
    ],
)  # fmt: skip
def test_where_no_rank_said_anything_slurm_is_believed(
    errors: list[str], line: str, kind: Kind
) -> None:
    assert judged(first_failure(FAILED, [], errors, "7")) == (line, kind, "")


def test_a_good_end_is_one_that_all_processes_have_told() -> None:
    """When Slurm loses touch with all nodes of a step, srun ends with 0."""
    said = SCHEDULERS["srun"].explain(["0: loading", "srun: error: Node failure on n1"])
    one = ["rank 0 on n1"]
    for finished, silent in (([], 2), (one, 1), (one * 2, 1)):
        lost = of_unknown_ends(Outcome(), finished, 2, said)
        line = f"it is not known how {silent} of 2 processes ended: Node failure on n1"
        assert lost == Trouble(line, cause=Cause.NODE_LOST)
        found = found_failure(Outcome(), [], [], [], Source("srun", lost), finished=finished)
        assert judged(found) == (line, Kind.LOST, "again")
    peer = rank(1, 1, 2.0, "RuntimeError: Connection reset by peer")
    assert found_failure(Outcome(), [peer], [], [], Source("srun", lost)) == found
    assert of_unknown_ends(Outcome(), [*one, "rank 1 on n2"], 2, said) is None
    for failed in (FAILED, Outcome(stopped=True)):
        assert of_unknown_ends(failed, one, 2, said) is None
    # Without a word of the scheduler's too, unless the words are still on their way.
    assert of_unknown_ends(Outcome(), one, 2, None) == Trouble(
        "it is not known how 1 of 2 processes ended", cause=Cause.NODE_LOST
    )
    assert of_unknown_ends(Outcome(heard_out=False), one, 2, None) is None


def test_where_nobody_said_anything_the_status_is_told() -> None:
    found = first_failure(Outcome(failed=1, status=-9), [], ["x"], None)
    assert judged(found) == (f"the command of node 1 {KILLED}", Kind.LOST, "")


SAVED = "stopped (SIGTERM) after step 3 of epoch 2, of 9 epochs; saved in results/x/run/state"


def stopped(number: int, reason: str, time: float, saved: bool = False) -> Ending:
    report = {"stopped": reason} | ({"saved": "step 3 of epoch 2"} if saved else {})
    return rank(number, 75, time, SAVED if saved else "stopped", **report)


def test_what_was_asked_to_stop_and_has_saved_was_preempted() -> None:
    endings = [stopped(1, "SIGTERM", 1.0), stopped(0, "SIGTERM", 2.0, saved=True)]
    by_slurm = Outcome(stopped=True, failed=0, status=1)
    assert judged(first_failure(by_slurm, endings, [], "7")) == (
        f"{SAVED}; the reason: sacct -X -j 7", Kind.PREEMPTED, "saved",
    )  # fmt: skip
    assert judged(first_failure(by_slurm, endings, [], None)) == (SAVED, Kind.PREEMPTED, "saved")
    # One that had waited for the other for ever in its handler, as Lightning's ranks do.
    killed = rank(1, 75, 1.0, stopped="SIGTERM", killed="SIGKILL")
    assert first_failure(by_slurm, [killed, endings[1]], [], None).failure.line == (
        f"{SAVED}; rank 1 on n2 did not end by itself, and was killed"
    )
    # Before it could say so.
    for job, line in (
        (None, "stopped"),
        ("7", "stopped; cancelled, preempted, or out of time: sacct -X -j 7"),
    ):
        found = first_failure(Outcome(stopped=True), [], [], job)
        assert judged(found) == (line, Kind.PREEMPTED, "")


def test_what_stops_for_want_of_time_is_worth_starting_again() -> None:
    endings = [stopped(1, "another rank was asked to", 1.0), stopped(0, "SIGUSR1", 2.0, saved=True)]
    assert judged(first_failure(FAILED, endings, [], "7")) == (
        SAVED, Kind.PREEMPTED, "again saved",
    )  # fmt: skip


def test_a_rank_that_somebody_ends_is_named_and_was_preempted() -> None:
    endings = [stopped(1, "SIGTERM", 1.0), stopped(0, "another rank was asked to", 2.0, saved=True)]
    found = first_failure(FAILED, endings, [], "7")
    assert judged(found) == (
        f"rank 1 on n2 got SIGTERM; {SAVED}", Kind.PREEMPTED, "again saved in_place",
    )  # fmt: skip
    assert (found.failure.who, found.failure.where) == ("rank 1", "n2")
    killed = ["srun: error: n2: task 1: Killed"]
    assert judged(first_failure(FAILED, endings, killed, "7")) == (
        f"n2: Killed; {SAVED}", Kind.LOST, "again saved in_place",
    )  # fmt: skip
    agent = Outcome(failed=1, status=-9)
    assert first_failure(agent, endings, [], None).failure.line == (
        f"the command of node 1 {KILLED}; {SAVED}"
    )


# As torchrun 2.14 writes it.
ROOT_CAUSE = """
============================================================
workflow/scripts/supervise.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_02:00:00
  host      : n2
  rank      : 1 (local_rank: 0)
  exitcode  : -9 (pid: 1234)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 1234
============================================================
"""


@pytest.mark.parametrize("label", ["", "1: "])
def test_a_killed_supervise_is_named(label: str) -> None:
    errors = [label + line for line in ROOT_CAUSE.splitlines()]
    killed = f"supervise.py of rank 1 on n2 {KILLED}"
    found = first_failure(FAILED, [], errors, "7" if label else None)
    assert judged(found) == (killed, Kind.LOST, "")
    assert (found.failure.who, found.failure.where) == ("rank 1", "n2")
    endings = [stopped(0, "SIGTERM", 2.0, saved=True)]
    assert judged(first_failure(FAILED, endings, errors, None)) == (
        f"{killed}; {SAVED}", Kind.LOST, "again saved in_place",
    )  # fmt: skip
    peer = rank(0, 1, 2.0, "RuntimeError: Connection reset by peer")
    assert first_failure(FAILED, [peer], errors, None) == found
    ended = [line.replace("-9", "1") for line in errors]
    assert first_failure(FAILED, [], ended, None).failure.line == (
        "the command of node 0 ended with status 1"
    )


def test_a_rank_that_ended_because_it_was_told_to_is_not_the_cause() -> None:
    """One that was stopped is continued for its end; blocked in a collective, it ends at once."""
    waited = rank(
        1,
        -6,
        2.0,
        "Watchdog caught collective operation timeout: "
        "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=15000) ran for 15001 milliseconds",
    )
    told = replace(rank(0, 143, 1.0, "preflight", saved="epoch 3"), told=True)
    stuck = Whereabouts("rank 0", "n1", state="stopped by a signal")
    found = found_failure(FAILED, [told, waited], [stuck], [], Source("srun"))
    assert found.failure.line.startswith("rank 0 on n1 hung (stopped by a signal)")


def test_what_a_killed_supervise_cannot_tell_is_known_from_the_files() -> None:
    source = Source("the command of node 0", None, "")
    for changed in (False, True):
        found = found_failure(KILLED_FIRST, [], [], [], source, changed=changed)
        assert (found.saved, found.again, found.in_place) == (changed,) * 3
    # The step of a killed srun lives on, and its ranks own the run.
    found = found_failure(KILLED_FIRST, [], [], [], Source("srun"), changed=True)
    assert (found.saved, found.again, found.in_place) == (True, True, False)


def test_a_failure_is_tried_again_only_if_something_was_saved_before() -> None:
    killed = rank(1, -9, 1.0)
    peer = rank(0, 1, 2.0, "RuntimeError: Connection closed by peer", saved="epoch 2")
    line = f"rank 1 on n2 {KILLED}"
    for endings, flags in (([killed, peer], "again saved in_place"), ([killed], "")):
        assert judged(first_failure(FAILED, endings, [], "7")) == (line, Kind.FAILED, flags)
    refused = rank(0, 1, 2.0, "too large", saved="epoch 2", refused=True)
    found = judged(first_failure(FAILED, [refused], [], "7"))
    assert found == ("rank 0 on n1: too large", Kind.REFUSED, "saved")
    waited = rank(0, 1, 2.0, "gloo/x.cc: Timed out")
    suspended = first_failure(replace(FAILED, suspended=40.0), [waited], [], "7")
    assert suspended.in_place
    assert suspended.failure.line == (
        "the job was suspended for 40 s; rank 0 on n1: gloo/x.cc: Timed out"
    )


def test_a_restart_that_gets_no_further_is_tried_on_other_nodes_unless_it_was_cancelled() -> None:
    killed = rank(1, -9, 1.0)
    busy = Source("srun", Trouble("Unable to create step for job 7: Requested nodes are busy"))

    def after_restart(outcome: Outcome, endings: list[Ending], source: Source) -> First:
        return found_failure(outcome, endings, [], [], source, restarted=True)

    for endings, source, flags in (
        ([killed], Source("srun"), "again in_place"), ([], busy, "again"),
    ):  # fmt: skip
        assert judged(after_restart(FAILED, endings, source))[2] == flags
        assert not found_failure(FAILED, endings, [], [], source).again
    # A GPU that is gone is refused.
    refused = rank(1, 1, 1.0, "x", refused=True)
    assert judged(after_restart(FAILED, [refused], Source("srun")))[2] == "again"
    # scancel, qdel or Ctrl-C.
    cancelled = Outcome(stopped=True, failed=0, status=1)
    for endings in ([], [killed], [stopped(0, "SIGTERM", 1.0)]):
        assert not after_restart(cancelled, endings, Source("srun")).again


LAST = frozenset({("last.pt", 9)})
GIVEN_UP = "failed in this way and got no further; does it continue from what it has saved?"
MANY = 2 * MOST_ALIKE
SAME = [": ValueError: bad row in epoch 3"] * MANY
NOTHING = [Reached()] * MANY


def numbers(*limits: int) -> frozenset[bytes]:
    """Counts of a table."""
    return frozenset(str(each).encode() for each in range(*limits))


def judged_starts(
    reached: list[Reached],
    said: list[str],
    reasons: list[str],
    kind: Kind = Kind.FAILED,
    seconds: float = SHORT,
) -> list[First]:
    """What is judged of each start of a program until it is not started again: they have saved, and
    another rank fails each time.
    """
    starts, found = Starts(Reached()), []
    for number, (at, word, reason) in enumerate(zip(reached, said, reasons, strict=True)):
        who = f"rank {number}"
        failure = Failure(f"{who} on n1{reason}", kind, who, "n1")
        first = First(failure, (), True, True, True, said=frozenset({word} if word else ()))
        found.append(starts.judged(first, seconds, at))
        if not found[-1].in_place:
            break
    return found


@pytest.mark.parametrize(
    ("reached", "said", "reasons", "kind", "given_up"),
    [
        # What it says, writes and saves is that of an earlier start.
        (NOTHING, ["step 100"] * MANY, SAME, Kind.FAILED, True),
        (NOTHING, ["step 100", "step 200"] * MOST_ALIKE, SAME, Kind.FAILED, True),
        ([Reached("", numbers(3), LAST)] * MANY, [""] * MANY, SAME, Kind.FAILED, True),
        # It gets further, or fails otherwise each time.
        (NOTHING, [f"step {each}" for each in range(MANY)], SAME, Kind.FAILED, False),
        ([Reached("", numbers(each), LAST) for each in range(MANY)], [""] * MANY, SAME,
         Kind.FAILED, False),
        # Each start writes a table of its own, with the counts where it continued.
        ([Reached("", numbers(each, each + 2), LAST) for each in range(MANY)], [""] * MANY,
         SAME, Kind.FAILED, False),
        ([Reached(files=frozenset({(f"{each}.pt", 9)})) for each in range(MANY)], [""] * MANY,
         SAME, Kind.FAILED, False),
        (NOTHING, ["step 100"] * MANY, [f": row {each}" for each in range(MANY)],
         Kind.FAILED, False),
        # It was preempted.
        (NOTHING, ["step 100"] * MANY, SAME, Kind.PREEMPTED, False),
    ],
)  # fmt: skip
def test_starts_that_fail_alike_and_get_no_further_come_to_an_end(
    reached: list[Reached], said: list[str], reasons: list[str], kind: Kind, given_up: bool
) -> None:
    *before, last = judged_starts(reached, said, reasons, kind)
    # One start at least is new.
    assert MOST_ALIKE < len(before) + 1 <= MOST_ALIKE + 2 if given_up else not before[MANY - 1 :]
    assert all(each.in_place and each.again and not each.failure.after for each in before)
    assert (last.in_place, last.again) == (not given_up,) * 2
    assert last.failure.after == (f"the last {MOST_ALIKE} starts {GIVEN_UP}" if given_up else "")


def test_short_starts_with_files_of_their_own_come_to_an_end() -> None:
    files = [Reached(files=frozenset({(f"version_{each}.pt", 9)})) for each in range(MANY)]
    words = [f"version_{each}.pt" for each in range(MANY)]
    *before, last = judged_starts(files, words, SAME, seconds=1)
    assert len(before) == 2
    assert last.failure.after == "the last 3 starts lasted less than 60 s each"


@pytest.mark.parametrize(
    ("restarts", "kind", "more", "seconds", "requeued"),
    [
        (2, Kind.PREEMPTED, {}, 1.0, True),
        (3, Kind.PREEMPTED, {}, 1.0, False),
        (3, Kind.PREEMPTED, {"saved": True}, 1.0, True),
        (3, Kind.PREEMPTED, {"stopped": True}, 1.0, True),
        (3, Kind.LOST, {}, 1.0, True),
        (3, Kind.PREEMPTED, {}, 99.0, True),
    ],
)
def test_a_job_that_ends_at_once_and_saves_nothing_is_requeued_a_few_times(
    restarts: int, kind: Kind, more: dict[str, bool], seconds: float, requeued: bool
) -> None:
    """One that runs until its time is up may save without a word; others were preempted."""
    first = First(Failure("stopped", kind), again=True, **more)
    found = Starts(Reached(), restarts).judged(first, seconds, Reached())
    assert found.again == requeued
    line = "the job was restarted 3 times, and this start saved nothing new in less than 60 s"
    assert found.failure.after == ("" if requeued else line)


def test_a_rank_that_hangs_is_named_before_those_that_waited_for_it() -> None:
    said = "gloo/transport/tcp/unbound_buffer.cc:81: Timed out waiting 10000ms for recv operation"
    waited = rank(0, 1, 1.0, f"RuntimeError: [{said}]")
    waits = Whereabouts("rank 2", "n3", frames=("all_reduce (x.py:1)",), waits=True)
    loads = Whereabouts(
        "rank 1", "n2", frames=("wait (threading.py:2)", "load (mine.py:3)"),
        frame="load (mine.py:3)", log="logs/rank=1.log",
    )  # fmt: skip

    def found(endings: list[Ending], seen: list[Whereabouts]) -> First:
        return found_failure(FAILED, endings, seen, [], Source("srun"))

    assert found([waited], [waits, loads]) == First(
        Failure(
            "rank 1 on n2 hung (in load (mine.py:3)), and the others waited for it", Kind.HUNG,
            "rank 1", "n2", "logs/rank=1.log",
        ),
        ("rank 1 on n2 | wait (threading.py:2)", "rank 1 on n2 | load (mine.py:3)"),
    )  # fmt: skip
    # A rank that cannot run is the cause before one that could.
    still = Whereabouts("rank 3", "n4", state="stopped by a signal")
    assert found([waited], [waits, loads, still]).failure.line.startswith(
        "rank 3 on n4 hung (stopped by a signal)"
    )
    # If all of them wait, or nothing is known of them, the one that said so is named.
    for nobody in ([waits], [Whereabouts("rank 1", "n2")], []):
        assert found([waited], nobody).failure.line == waited.error
    # Of several that do not wait, it is the one that is where no other is.
    reads = [replace(loads, who=f"rank {number}", frames=("item (mine.py:9)",))
             for number in (5, 6)]  # fmt: skip
    assert found([waited], [*reads, waits, loads]).failure.who == "rank 1"
    assert found([waited], reads).failure.line == waited.error
    # An error of another rank is the cause, even if somebody waited too long.
    cause = rank(7, 1, 2.0, "ValueError: x")
    assert found([waited, cause], [waits, loads]).failure.line == cause.error
    # Without a time-out, nobody hangs: the others were only told to end.
    error = rank(0, 1, 1.0, "ValueError: x")
    assert found([error], [waits, loads]).failure.line == error.error


@pytest.mark.parametrize("continues", [False, True], ids=["signalled together", "gone before"])
def test_a_rank_that_could_not_run_is_known_after_it_was_continued(
    continues: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm continues all processes of a step that it ends, before their supervisors notice."""

    def look(last: bool = False) -> None:
        observer.next_state = 0.0
        observer(rank.pid, last)

    observer = Observer("rank 1", "n2", "logs/rank=1.log", 100)
    with subprocess.Popen(["sleep", "1000"]) as rank:
        try:
            look()
            rank.send_signal(signal.SIGSTOP)
            until(lambda: state_of(rank.pid))
            look()
            assert observer.last(aborted=False) is None
            look()
            rank.send_signal(signal.SIGCONT)
            until(lambda: not state_of(rank.pid))
            look()
            if not continues:
                look(last=True)
        finally:
            rank.kill()
    last = observer.last(aborted=False)
    # Of one that is told to end it is sent at once: Slurm may kill its supervisor soon.
    sent = [each["whereabouts"] for each in records(capfd.readouterr().err.split("\n"))]
    assert len(sent) == (0 if continues else 1)
    assert (last is None) == bool(sent)
    stuck = last or Whereabouts(**sent[0])
    assert (stuck.name, stuck.state) == ("rank 1 on n2", "stopped by a signal")


def test_a_download_that_breaks_off_has_waited_for_no_rank() -> None:
    for words, told in (
        ("ConnectionResetError: Connection reset by peer: https://hub/bert", "rank 0 on n1: Conn"),
        ("BrokenPipeError: [Errno 32] Broken pipe", "rank 0 on n1: BrokenPipeError"),
        ("RuntimeError: [gloo/tcp/pair.cc:9] Connection closed by peer", "rank 1 on n2 ended with"),
    ):
        lost = rank(0, 1, 1.0, "Traceback (most recent call last):", words)
        source, finished = Source("srun"), ["rank 1 on n2"]
        found = found_failure(FAILED, [lost], [], [], source, finished=finished)
        assert found.failure.line.startswith(told)


def test_what_failed_before_it_was_told_to_stop_has_failed() -> None:
    """It fails again, and is not started again: somebody asked it to stop."""
    told_to = Outcome(stopped=True, failed=0, status=1, asked=5.0)
    own = rank(1, 1, 4.0, "ValueError: x", saved="epoch 2")
    peer = rank(0, 1, 3.0, "RuntimeError: [gloo/tcp/pair.cc:9] Connection closed by peer")
    found = found_failure(told_to, [own, peer], [], [], Source("srun"), restarted=True)
    assert judged(found) == ("rank 1 on n2: ValueError: x", Kind.FAILED, "saved")
    for endings in ([replace(own, time=6.0), peer], [peer], [replace(own, status=-15)]):
        found = found_failure(told_to, endings, [], [], Source("srun"))
        assert found.failure == Failure("stopped", Kind.PREEMPTED)


def test_what_ended_because_it_was_told_to_end_is_named_if_nothing_else_is_known() -> None:
    ended = rank(1, 0, 2.0)
    line = "rank 1 on n2 was told to end, and ended with status 0, not with 75"
    assert judged(first_failure(FAILED, [ended], [], "7")) == (line, Kind.FAILED, "")
    # The first of those that say nothing, which has ended the others.
    quiet = [replace(rank(0, -15, 3.0, gpu="PCI 1"), told=True),
             replace(rank(1, -15, 2.0), told=True)]  # fmt: skip
    line = "rank 1 on n2 was told to end, and was ended by SIGTERM"
    assert judged(first_failure(FAILED, quiet, [], None)) == (line, Kind.FAILED, "")
    late = replace(rank(1, -9, 2.0), told=True, late=25)
    assert first_failure(FAILED, [late], [], None).failure.line == late.error
    own = rank(0, 1, 3.0, "ValueError: x")
    for first in ([ended], quiet, [late]):
        found = first_failure(FAILED, first, [TIMED_OUT], "7")
        assert found.failure.line.startswith("Slurm ended")
        assert first_failure(FAILED, [*first, own], [], "7").failure.line == own.error
        killed = first_failure(KILLED_FIRST, first, [], None)
        assert killed.failure.line == f"the command of node 0 {KILLED}"
    for saved in (stopped(0, "SIGTERM", 2.0, saved=True), replace(ended, time=9.0)):
        alone = first_failure(FAILED, [saved], [], None)
        assert first_failure(FAILED, [saved, *quiet], [], None) == alone


NODE_LOST = Trouble("n3 is lost: it has not answered for 20 s", "n3", Cause.NODE_LOST)


def test_a_lost_node_is_named_and_worth_starting_again() -> None:
    """Its peers say only that they lost it, or that they had to be killed."""
    peer = rank(0, 1, 1.0, "RuntimeError: [gloo/transport] x")
    late = replace(rank(1, -9, 2.0), late=25)
    assert late.error == "rank 1 on n2 did not end within 25 s of SIGTERM"
    for endings in ([], [peer], [late], [late, peer]):
        found = found_failure(FAILED, endings, [], [], Source("remote_step", NODE_LOST))
        assert found == First(Failure(NODE_LOST.text, Kind.LOST, where="n3"), again=True)
    # A failure before the loss is the first one.
    own = rank(1, 1, 1.0, "ValueError: no")
    found = found_failure(FAILED, [own], [], [], Source("remote_step", NODE_LOST))
    assert judged(found) == ("rank 1 on n2: ValueError: no", Kind.FAILED, "")
    # The launcher on it can be started there again.
    killed = replace(NODE_LOST, cause=Cause.LAUNCHER_KILLED)
    saved = rank(0, 1, 1.0, "RuntimeError: Connection closed by peer", saved="epoch 2")
    found = found_failure(FAILED, [saved], [], [], Source("remote_step", killed))
    assert judged(found) == (NODE_LOST.text, Kind.LOST, "again saved in_place")


def test_a_record_is_read_as_it_was_written_and_is_that_of_the_newest_attempt(
    tmp_path: Path,
) -> None:
    written = Failure(
        "n2\x1b[31m\b hung", Kind.HUNG, "rank 1", "n2", "l/rank=1.log", "x", Again.HERE
    )
    folder = tmp_path / "results" / "run"
    assert failure.read(folder) is None
    failure.write(folder, "train", written)
    found = failure.read(folder)
    assert found
    assert found == replace(written, reason=r"n2\x08 hung", stage="train", time=found.time)
    for error, kind in ((Refusal("no"), Kind.REFUSED), (OSError("full"), Kind.FAILED),
                        (Stopped("saved"), Kind.PREEMPTED)):  # fmt: skip
        with suppress(type(error)), recorded(folder, "evaluate"):
            assert failure.read(folder) is None
            raise error
        found = failure.read(folder)
        assert found
        assert (found.stage, found.kind, found.reason) == ("evaluate", kind, str(error))
    with suppress(IndexError), recorded(folder, "evaluate"):
        [][0]
    found = failure.read(folder)
    assert found
    assert (found.kind, found.reason) == (Kind.FAILED, "IndexError: list index out of range")
    with recorded(folder, "evaluate"):
        pass
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '"failed"', json.dumps({"kind": "failed"}), "\0" * 100, "[" * 100_000],
)
def test_a_damaged_record_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / failure.FILE).write_text(content)
    assert failure.read(tmp_path) is None


def test_a_link_among_somebody_s_results_leads_to_no_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / failure.RESERVED).symlink_to(mine)
    with suppress(Refusal), recorded(run, "fetch"):
        raise Refusal("no")
    found = failure.read(run)
    assert found
    assert found.reason == "no"
    assert mine.read_text() == "mine"
