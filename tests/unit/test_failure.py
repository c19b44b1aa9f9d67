"""The failure that a launch reports. The lines are Slurm's own."""

from dataclasses import replace

import pytest

from ddp.launching.agents import Outcome
from ddp.launching.endings import LATE, Ending
from ddp.launching.failure import Failure, Source
from ddp.launching.failure import first_failure as found_failure
from ddp.launching.whereabouts import Whereabouts
from ddp.schedulers.registry import SCHEDULERS

FAILED = Outcome(failed=0, status=1)
TIMED_OUT = (
    "slurmstepd-n1: error: *** STEP 94.0 ON n1 CANCELLED AT 2026-11-21T07:42:02 DUE TO "
    "TIME LIMIT ***"
)


def first_failure(
    outcome: Outcome, endings: list[Ending], errors: list[str], job: str | None
) -> Failure:
    """Of Slurm job `job`, or on this machine if it is None."""
    scheduler = SCHEDULERS["srun" if job else "local"]
    inspect = f"sacct -X -j {job}" if job else ""
    source = Source(scheduler.starter(outcome.failed or 0), scheduler.explain(errors), inspect)
    return found_failure(outcome, endings, [], errors, source)


def test_a_rank_that_could_tell_is_believed_before_slurm() -> None:
    ending = Ending(
        "rank 1 on n2",
        "ended with status 1",
        1.0,
        ("Traceback (most recent call last):", "ValueError: x"),
        "logs/rank=1.log",
    )
    assert first_failure(FAILED, [ending], ["srun: error: n1: task 0: Killed"], "7") == Failure(
        "rank 1 on n2: ValueError: x; its own log is logs/rank=1.log",
        ("rank 1 on n2 | Traceback (most recent call last):", "rank 1 on n2 | ValueError: x"),
    )


def test_a_task_that_was_killed_is_named_by_slurm() -> None:
    errors = [
        "1: loading",
        "0: all well",
        "srun: error: n2: task 1: Killed",
        "srun: error: n1: task 0: Exited with exit code 1",
    ]
    assert first_failure(FAILED, [], errors, "7") == Failure("n2: Killed: loading")
    assert first_failure(FAILED, [], ["srun: error: n2: tasks 2-3: Out Of Memory"], "7") == Failure(
        "n2: Out Of Memory"
    )


def test_a_time_limit_is_told_as_one() -> None:
    errors = ["srun: error: n1: task 0: Exited with exit code 1", TIMED_OUT]
    assert first_failure(FAILED, [], errors, "7") == Failure("Slurm ended it on n1: time limit")


def test_a_step_that_could_not_begin_says_why() -> None:
    errors = ["srun: error: Unable to create step for job 12: Requested nodes are busy"]
    assert first_failure(FAILED, [], errors, "12") == Failure(
        "Unable to create step for job 12: Requested nodes are busy"
    )


def test_where_nobody_said_anything_the_status_is_told() -> None:
    assert first_failure(Outcome(failed=1, status=-9), [], ["x"], None).line.startswith(
        "the command of node 1 was ended by SIGKILL"
    )
    assert first_failure(FAILED, [], [], "7") == Failure("srun ended with status 1")


SAVED = "stopped (SIGTERM) after step 3 of epoch 2, of 9 epochs; saved in results/x/run/state"


def stopped(who: str, reason: str, time: float, saved: bool = False) -> Ending:
    report = {"stopped": reason} | ({"saved": "step 3 of epoch 2"} if saved else {})
    return Ending(
        who, "ended with status 75", time, (SAVED if saved else "stopped",), report=report
    )


def test_what_was_asked_to_stop_and_has_saved_was_preempted() -> None:
    endings = [
        stopped("rank 1 on n2", "SIGTERM", 1.0),
        stopped("rank 0 on n1", "SIGTERM", 2.0, saved=True),
    ]
    by_slurm = Outcome(stopped=True, failed=0, status=1)
    assert first_failure(by_slurm, endings, [], "7") == Failure(
        f"{SAVED}; the reason: sacct -X -j 7", preempted=True, saved=True
    )
    assert first_failure(by_slurm, endings, [], None) == Failure(SAVED, preempted=True, saved=True)


def test_what_stops_for_want_of_time_is_worth_starting_again() -> None:
    endings = [
        stopped("rank 1 on n2", "another rank was asked to", 1.0),
        stopped("rank 0 on n1", "SIGUSR1", 2.0, saved=True),
    ]
    assert first_failure(FAILED, endings, [], "7") == Failure(
        SAVED, preempted=True, again=True, saved=True
    )


def test_a_rank_that_somebody_ends_is_named_and_was_preempted() -> None:
    endings = [
        stopped("rank 1 on n2", "SIGTERM", 1.0),
        stopped("rank 0 on n1", "another rank was asked to", 2.0, saved=True),
    ]
    assert first_failure(FAILED, endings, [], "7") == Failure(
        f"rank 1 on n2 got SIGTERM; {SAVED}", preempted=True, again=True, saved=True, in_place=True
    )
    killed = ["srun: error: n2: task 1: Killed"]
    assert first_failure(FAILED, endings, killed, "7") == Failure(
        f"n2: Killed; {SAVED}", again=True, saved=True, in_place=True
    )
    agent = Outcome(failed=1, status=-9)
    assert first_failure(agent, endings, [], None).line.startswith(
        "the command of node 1 was ended by SIGKILL; "
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
    killed = (
        "supervise.py of rank 1 on n2 was ended by SIGKILL; the system does that when "
        "memory runs out"
    )
    assert first_failure(FAILED, [], errors, "7" if label else None) == Failure(killed)
    endings = [stopped("rank 0 on n1", "SIGTERM", 2.0, saved=True)]
    assert first_failure(FAILED, endings, errors, None) == Failure(
        f"{killed}; {SAVED}", again=True, saved=True, in_place=True
    )
    peer = Ending(
        "rank 0 on n1", "ended with status 1", 2.0, ("RuntimeError: Connection reset by peer",)
    )
    assert first_failure(FAILED, [peer], errors, None) == Failure(killed)
    ended = [line.replace("-9", "1") for line in errors]
    assert (
        first_failure(FAILED, [], ended, None).line == "the command of node 0 ended with status 1"
    )


def test_a_failure_is_tried_again_only_if_something_was_saved_before() -> None:
    killed = Ending("rank 1 on n2", "was ended by SIGKILL", 1.0)
    peer = Ending(
        "rank 0 on n1",
        "ended with status 1",
        2.0,
        ("RuntimeError: Connection closed by peer",),
        report={"saved": "epoch 2"},
    )
    assert first_failure(FAILED, [killed, peer], [], "7") == Failure(
        "rank 1 on n2 was ended by SIGKILL", again=True, saved=True, in_place=True
    )
    assert first_failure(FAILED, [killed], [], "7") == Failure("rank 1 on n2 was ended by SIGKILL")
    refused = replace(peer, report={"saved": "epoch 2", "refused": True}, lines=("too large",))
    assert not first_failure(FAILED, [refused], [], "7").again
    waited = replace(peer, report={}, lines=("gloo/x.cc: Timed out",))
    suspended = first_failure(replace(FAILED, suspended=40.0), [waited], [], "7")
    assert suspended.in_place
    assert suspended.line == "the job was suspended for 40 s; rank 0 on n1: gloo/x.cc: Timed out"


def test_a_restart_that_gets_no_further_is_tried_on_other_nodes_unless_it_was_cancelled() -> None:
    killed = Ending("rank 1 on n2", "was ended by SIGKILL", 1.0)
    busy = Source("srun", "Unable to create step for job 7: Requested nodes are busy")

    def after_restart(outcome: Outcome, endings: list[Ending], source: Source) -> Failure:
        return found_failure(outcome, endings, [], [], source, restarted=True)

    for endings, source in (([killed], Source("srun")), ([], busy)):
        failure = after_restart(FAILED, endings, source)
        assert (failure.again, failure.saved, failure.in_place) == (True, False, False)
        assert not found_failure(FAILED, endings, [], [], source).again
    # A GPU that is gone is refused.
    refused = Ending("rank 1 on n2", "ended with status 1", 1.0, ("x",), report={"refused": True})
    assert after_restart(FAILED, [refused], Source("srun")).again
    # scancel, qdel or Ctrl-C.
    cancelled = Outcome(stopped=True, failed=0, status=1)
    for endings in ([], [killed], [stopped("rank 0 on n1", "SIGTERM", 1.0)]):
        assert not after_restart(cancelled, endings, Source("srun")).again


def test_a_rank_that_hangs_is_named_before_those_that_waited_for_it() -> None:
    said = "gloo/transport/tcp/unbound_buffer.cc:81: Timed out waiting 10000ms for recv operation"
    waited = Ending("rank 0 on n1", "ended with status 1", 1.0, (f"RuntimeError: [{said}]",))
    seen = [
        Whereabouts("rank 2 on n3", frames=("all_reduce (x.py:1)",), waits=True),
        Whereabouts(
            "rank 1 on n2",
            frames=("wait (threading.py:2)", "load (mine.py:3)"),
            frame="load (mine.py:3)",
            log="logs/rank=1.log",
        ),
    ]
    source = Source("srun")
    found = found_failure(FAILED, [waited], seen, [], source)
    assert found.line == (
        "rank 1 on n2 hung (in load (mine.py:3)), and the others waited for it; "
        "its own log is logs/rank=1.log"
    )
    assert found.details == (
        "rank 1 on n2 | wait (threading.py:2)",
        "rank 1 on n2 | load (mine.py:3)",
    )
    # A rank that cannot run is the cause before one that could.
    still = Whereabouts("rank 3 on n4", state="stopped by a signal")
    assert "rank 3 on n4 hung (stopped by a signal)" in (
        found_failure(FAILED, [waited], [*seen, still], [], source).line
    )
    # If all of them wait, or nothing is known of them, the one that said so is named.
    for nobody in ([seen[0]], [Whereabouts("rank 1 on n2")], []):
        assert found_failure(FAILED, [waited], nobody, [], source).line == waited.error
    # Of several that do not wait, it is the one that is where no other is.
    reads = [
        replace(seen[1], who=f"rank {rank} on n5", frames=("item (mine.py:9)",)) for rank in (5, 6)
    ]
    assert "rank 1 on n2 hung" in found_failure(FAILED, [waited], [*reads, *seen], [], source).line
    assert found_failure(FAILED, [waited], reads, [], source).line == waited.error
    # An error of another rank is the cause, even if somebody waited too long.
    cause = Ending("rank 7 on n8", "ended with status 1", 2.0, ("ValueError: x",))
    assert found_failure(FAILED, [waited, cause], seen, [], source).line == cause.error
    # Without a time-out, nobody hangs: the others were only told to end.
    error = replace(waited, lines=("ValueError: x",))
    assert found_failure(FAILED, [error], seen, [], source).line == error.error


def test_stopped() -> None:
    assert first_failure(Outcome(stopped=True), [], [], None) == Failure(
        "stopped; run the same command again"
    )
    assert first_failure(Outcome(stopped=True), [], [], "7") == Failure(
        "stopped; cancelled, preempted, or out of time: sacct -X -j 7"
    )


LOST = "n3 is lost: it has not answered for 20 s"


def test_a_lost_node_is_named_and_worth_starting_again() -> None:
    """Its peers say only that they lost it, or that they had to be killed."""
    peer = Ending("rank 0 on n1", "ended with status 1", 1.0, ("RuntimeError: [gloo/transport] x",))
    late = Ending("rank 1 on n2", f"{LATE} 25 s of SIGTERM", 2.0)
    source = Source("remote_step", LOST, lost=LOST)
    for endings in ([], [peer], [late], [late, peer]):
        assert found_failure(FAILED, endings, [], [], source) == Failure(LOST, again=True)


def test_a_failure_before_a_node_is_lost_is_the_first_one() -> None:
    own = Ending("rank 1 on n2", "ended with status 1", 1.0, ("ValueError: no",))
    source = Source("remote_step", LOST, lost=LOST)
    found = found_failure(FAILED, [own], [], [], source)
    assert found.line == "rank 1 on n2: ValueError: no"
    assert not found.again
