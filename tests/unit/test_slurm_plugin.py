"""The job states that the patched Slurm plugin gets from sequences of real Slurm states."""

import asyncio
import os
import re
import subprocess
import types
from pathlib import Path

import pytest

from manynodes.base.errors import Refusal
from manynodes.schedulers.registry import SCHEDULERS
from manynodes.schedulers.slurm import plugin as slurm_plugin
from manynodes.schedulers.slurm.plugin import Follower, Sbatch, reason_of, tmp_mb


class Executor:
    """The parts of Snakemake's executor that the follower uses."""

    run_uuid = "uuid"
    next_seconds_between_status_checks = 180
    workflow = types.SimpleNamespace(
        remote_execution_settings=types.SimpleNamespace(seconds_between_status_checks=0.5)
    )

    def __init__(self) -> None:
        self.submitted: list[str] = []

    def run_job(self, job) -> None:
        self.submitted.append(job)

    def report_job_submission(self, info) -> None:
        pass

    report_job_success = report_job_submission

    def report_job_error(self, info, msg=None) -> None:
        pass


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def follower(told: list[str]) -> Follower:
    return Follower(
        lambda job, number, state, _waits: told.append(f"job {number}, {job}: {state}"), told.append
    )


def submitted(number: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        external_jobid=number, job=f"train of x/{number}", aux={"slurm_logfile": f"{number}.log"}
    )


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for commands that replace Slurm's."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def command(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (["PENDING", "RUNNING", "COMPLETED"], ["PENDING", "RUNNING", "COMPLETED"]),
        (["RUNNING", "CANCELLED by 1000"], ["RUNNING", "CANCELLED"]),
        # Requeued, and not.
        (
            ["PREEMPTED", "PENDING", "PREEMPTED", "RUNNING"],
            ["PREEMPTED", "PENDING", "PREEMPTED", "RUNNING"],
        ),
        (["PREEMPTED", "PREEMPTED"], ["PREEMPTED", "CANCELLED"]),
        (
            ["NODE_FAIL", "RUNNING", "NODE_FAIL", "COMPLETED"],
            ["PENDING", "RUNNING", "PENDING", "COMPLETED"],
        ),
        (["NODE_FAIL", "NODE_FAIL"], ["PENDING", "CANCELLED"]),
    ],
)
def test_states_are_in_words_that_the_plugin_knows(follower, monkeypatch, states, told) -> None:
    monkeypatch.setattr(slurm_plugin, "LASTING", 0)
    assert [follower.plain("7", state) for state in states] == told


def test_a_job_has_not_ended_while_its_processes_are_being_ended(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    completing, gone = {"7": ("COMPLETING", "None", "n1")}, dict[str, tuple[str, str, str]]()
    assert [
        follower.settled("7", "CANCELLED", queued) for queued in (completing, completing, gone)
    ] == [*["COMPLETING"] * 2, "CANCELLED"]
    assert follower.settled("7", "COMPLETED", completing) == "COMPLETED"
    # Not for ever: a process can be stuck so that no signal reaches it.
    monkeypatch.setattr(slurm_plugin, "LASTING", 0)
    assert [follower.settled("8", "TIMEOUT", {"8": completing["7"]}) for _ in range(2)] == [
        "COMPLETING",
        "TIMEOUT",
    ]


@pytest.mark.parametrize("tool", ["sacct", "squeue"])
def test_an_outage_gives_no_states_and_is_told_once(follower, told, slurm, tool) -> None:
    """The plugin forgets its jobs at None, and asks again without states."""

    def ask() -> dict[str, str]:
        states, seconds = asyncio.run(follower.query(f"{tool} --name x", None))
        assert seconds >= 0
        return states

    command(slurm, "squeue", "exit 1")
    follower.jobs["7"] = submitted("7")
    for _ in range(3):
        command(slurm, tool, "echo 'Unable to contact slurm controller' >&2; exit 1")
        assert ask() == {}
    command(slurm, tool, "echo '7|RUNNING'")
    assert ask() == {"7": "RUNNING"}
    outage = [line for line in told if tool in line]
    assert len(outage) == 2
    assert outage[0] == (
        f"{tool} gives no job states (Unable to contact slurm controller); jobs are not affected; "
        "asking again until it does"
    )
    assert re.fullmatch(rf"{tool} gives job states again, after \d+ s", outage[1])


def test_a_query_that_hangs_is_ended(follower, told, slurm, monkeypatch) -> None:
    monkeypatch.setattr(slurm_plugin, "QUERY_TIMEOUT", 0.5)
    command(slurm, "sacct", "exec sleep 60")
    assert asyncio.run(follower.query("sacct", None))[0] == {}
    assert told == [
        "sacct gives no job states (no answer within 0.5 s); jobs are not affected; asking again "
        "until it does"
    ]


def test_what_lasts_a_moment_is_no_end(follower) -> None:
    """Slurm takes seconds to requeue a job, and is asked more than once meanwhile."""
    assert [follower.plain("7", "PREEMPTED") for _ in range(5)] == ["PREEMPTED"] * 5


def test_a_job_that_squeue_has_forgotten_has_ended(follower, monkeypatch) -> None:
    monkeypatch.setattr(slurm_plugin, "LASTING", 0)
    follower.jobs = {"7": submitted("7"), "8": submitted("8")}
    assert follower.forgotten({"7"}) == []
    assert follower.forgotten(set()) == []
    # Job 8 was never listed: it may not have got that far.
    assert follower.forgotten(set()) == ["7"]
    assert follower.forgotten({"7", "8"}) == []


SBATCH = "sbatch --parsable --job-name uuid --output x --export=ALL --comment rule_train_3"


def submit(follower: Follower) -> tuple[int, str]:
    """As the plugin does; returns sbatch's status and what it has written."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = Sbatch(follower, follower.tell, SBATCH, shell=True, text=True, **pipes)
    return process.returncode, "".join(process.communicate())


def test_ctrl_c_cancels_all_jobs_and_what_is_being_submitted(follower, slurm) -> None:
    """Snakemake's base class may have an empty list of jobs at that moment."""
    calls = slurm / "calls"
    command(slurm, "scancel", f'echo "$@" >> {calls}')
    command(slurm, "sbatch", "echo 9")
    executor = Executor()
    follower.attach(executor)
    executor.run_job("first")
    assert submit(follower) == (0, "9")
    assert not calls.exists()
    executor.cancel_jobs([])
    assert submit(follower) == (0, "9")
    executor.run_job("second")
    assert executor.submitted == ["first"]
    assert calls.read_text() == f"--name=uuid --user={os.getuid()}\n" * 2


@pytest.mark.parametrize("wait", [0, 60])
def test_jobs_are_cancelled_when_the_controller_is_back(
    follower, slurm, told, monkeypatch, wait: int
) -> None:
    """It answers the third time."""
    away = "scancel: error: Unable to contact slurm controller (connect failure)"
    command(slurm, "scancel", f'echo >> {slurm}/n; [ $(wc -l < {slurm}/n) = 3 ] || '
                              f'{{ echo "{away}" >&2; exit 1; }}')  # fmt: skip
    monkeypatch.setattr(slurm_plugin, "CANCELLING", wait)
    monkeypatch.setattr(slurm_plugin, "CANCEL_WAIT", 0)
    follower.attach(Executor())
    follower.cancel()
    by_hand = f"{away}; when Slurm answers: scancel --name=uuid --user={os.getuid()}"
    assert told == ([] if wait else [by_hand])


@pytest.mark.parametrize(("lost", "listed", "number"), [
    # Not taken; taken, and the answer lost; a job of an earlier submission of the same rule.
    ("Unable to contact slurm controller (connect failure)", "", "9"),
    ("Socket timed out on send/recv operation", "7|rule_train_2\n8|rule_train_3", "8"),
    ("Unexpected message received", "5|rule_train_3", "9"),
])  # fmt: skip
def test_a_job_is_submitted_once_when_the_controller_is_back(
    follower, slurm, told, monkeypatch, lost: str, listed: str, number: str
) -> None:
    """squeue does not answer at first either."""
    monkeypatch.setattr(slurm_plugin, "SUBMIT_WAIT", 0.01)
    follower.numbers = {"5"}
    failed = f"sbatch: error: Batch job submission failed: {lost}"
    command(slurm, "sbatch", f'[ -e {slurm}/back ] && echo 9 || {{ echo "{failed}" >&2; exit 1; }}')
    (slurm / "listed").write_text(listed)
    command(slurm, "squeue", f"[ -e {slurm}/asked ] || {{ touch {slurm}/asked; exit 1; }}\n"
                             f"touch {slurm}/back; cat {slurm}/listed")  # fmt: skip
    assert submit(follower) == (0, number)
    assert number in follower.numbers
    assert told == [f"sbatch: {lost}; jobs are submitted when Slurm's controller answers"]


def test_a_refusal_is_final(follower, slurm, told) -> None:
    """Whatever a site's own plugin says with it."""
    command(slurm, "sbatch", "printf 'sbatch: error: try again with a budget, f\\374r jobs\\n"
            "sbatch: error: Batch job submission failed: Invalid qos\\n' >&2; exit 1")  # fmt: skip
    assert submit(follower)[1].endswith("Invalid qos\n")
    assert told == []


HEADER = "echo 'JOBID|STATE|UID|WORK_DIR'"


@pytest.mark.parametrize(("squeue", "left"), [
    (f'{HEADER}; echo "7|PENDING|$(id -u)|$PWD"; echo "8|COMPLETING|$(id -u)|$PWD"', ["7"]),
    # Of another user, and of another folder: the numbers are those of another cluster.
    (f'{HEADER}; echo "7|RUNNING|12345|$PWD"; echo "8|RUNNING|$(id -u)|/somewhere/a|b"', []),
    (HEADER, []),
    ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", []),
    ("echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1", None),
])  # fmt: skip
def test_the_jobs_of_an_earlier_command_that_are_in_the_queue(slurm, squeue, left) -> None:
    command(slurm, "squeue", squeue)
    assert SCHEDULERS["srun"].unended(["7", "8"]) == left


def test_a_job_is_told_as_soon_as_it_is_submitted(follower, told) -> None:
    executor = Executor()
    follower.attach(executor)
    executor.report_job_submission(submitted("7"))
    assert told == ["job 7, train of x/7: is submitted"]


def test_the_interval_between_status_checks_has_the_length_asked_for(follower, monkeypatch) -> None:
    executor, slept = Executor(), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    follower.attach(executor)
    monkeypatch.setattr(slurm_plugin.asyncio, "sleep", sleep)
    asyncio.run(executor.sleep())
    assert slept == [0.5]


def test_changes_are_shown_and_nothing_else(follower, told) -> None:
    follower.jobs["7"] = submitted("7")
    details = [
        {"7": ("PENDING", "Resources", "")},
        {"7": ("PENDING", "Resources", "")},
        {"7": ("PENDING", "Priority", "")},
        {"7": ("RUNNING", "None", "n[1-2]")},
        {},
        {"7": ("COMPLETED", "None", "n[1-2]")},
    ]
    for row in details:
        follower.show({"7": "RUNNING"} if not row else {}, row)
    what = "job 7, train of x/7: "
    assert told == [
        f"{what}PENDING (Resources)",
        f"{what}PENDING (Priority)",
        f"{what}RUNNING on n[1-2]",
    ]


def test_a_failure_is_told_in_slurm_s_words() -> None:
    refused = (
        "SLURM sbatch failed. The error message was 'sbatch: error: Batch job submission "
        "failed: Invalid qos'.\n    sbatch call:\n  x"
    )
    assert reason_of(refused) == "sbatch refused the job: Batch job submission failed: Invalid qos"
    ended = "SLURM-job '12' failed, SLURM status is: 'TIMEOUT'. Reason: Unknown."
    assert reason_of(ended) == "SLURM-job '12' failed, SLURM status is: 'TIMEOUT'."


@pytest.mark.parametrize(
    ("wanted", "megabytes"),
    [("auto", 41_000), ("20G", 20_480), ("500", 500), ("2T", 2_097_152), ("", 0)],
)
def test_local_disk(wanted: str, megabytes: int) -> None:
    assert tmp_mb({"slurm_tmp": wanted, "disk_mb": 40_000}) == megabytes


@pytest.mark.parametrize("wanted", ["plenty", "-1", "1G;true", "٣G", "0"])
def test_local_disk_that_is_no_size_is_refused(wanted: str) -> None:
    with pytest.raises(Refusal, match="slurm_tmp: .*; give a size such as 20G, or auto"):
        tmp_mb({"slurm_tmp": wanted})


@pytest.mark.parametrize(("limit", "waits"), [
    ("AssocMaxSubmitJobLimit", True),
    ("QOSMaxSubmitJobPerUserLimit", True),
    ("QOSMaxWallDurationPerJobLimit", False),
])  # fmt: skip
def test_only_a_limit_on_submitted_jobs_is_waited_for(limit: str, waits: bool) -> None:
    said = f"""sbatch: error: {limit}
sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit,
user's size and/or time limits)"""
    assert bool(slurm_plugin.FULL.search(said)) == waits
