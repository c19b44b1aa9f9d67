"""The job states that the patched Slurm plugin gets from sequences of real Slurm states."""

import asyncio
import errno
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from snakemake_interface_executor_plugins import utils

from manynodes.base.errors import Refusal
from manynodes.schedulers import base
from manynodes.schedulers.registry import SCHEDULERS
from manynodes.schedulers.slurm import plugin as slurm_plugin
from manynodes.schedulers.slurm import scheduler
from manynodes.schedulers.slurm.commands import answer, shown_job
from manynodes.schedulers.slurm.plugin import (
    Follower,
    Sbatch,
    reason_of,
    start_one_snakemake,
    tmp_mb,
)
from manynodes.schedulers.slurm.submission import (
    check_submissions,
    gpus_in,
    partitions,
    refuse_replaced,
    refuse_too_large,
    try_submission,
)
from patches import quote_for_shells
from programs import program, python
from session.queue import refusal_of
from session.refusals import refuse_unquoted


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
    (f'{HEADER}; echo "7|PENDING|$(id -u)|$PWD"; echo "8|COMPLETING|$(id -u)|$PWD"', {"7": False}),
    (f'{HEADER}; echo "8|RUNNING|$(id -u)|$PWD"', {"8": True}),
    # Of another user, and of another folder: the numbers are those of another cluster.
    (f'{HEADER}; echo "7|RUNNING|12345|$PWD"; echo "8|RUNNING|$(id -u)|/somewhere/a|b"', {}),
    (HEADER, {}),
    ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", {}),
    ("echo slurm_load_jobs error: Unable to contact slurm controller >&2; exit 1", None),
])  # fmt: skip
def test_the_jobs_of_an_earlier_command_that_are_in_the_queue(slurm, squeue, left) -> None:
    command(slurm, "squeue", squeue)
    assert SCHEDULERS["srun"].unended(["7", "8"]) == left


def test_jobs_of_an_array_that_wait_are_seen(follower, slurm, monkeypatch) -> None:
    """squeue shows them in one line, unless it is told not to."""
    monkeypatch.setattr(slurm_plugin, "SUBMIT_WAIT", 0.01)
    script = """jobs='11_[1-2]'; case "$*" in *--array*) jobs='11_1 11_2';; esac
for job in $jobs; do
    case "$*" in
        *%k*) echo "$job|rule_train_3";;
        *%U*) echo "$job|PENDING|$(id -u)|$PWD";;
        *) echo "$job|PENDING|Priority|";;
    esac
done"""
    command(slurm, "squeue", script)
    assert SCHEDULERS["srun"].unended(["11_1", "11_2"]) == {"11_1": False, "11_2": False}
    assert slurm_plugin.details(["11_1"])["11_2"] == ("PENDING", "Priority", "")
    # As sbatch answers, whose answer was lost.
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    command(slurm, "sbatch", f"echo '{lost}' >&2; exit 1")
    assert submit(follower) == (0, "11")


@pytest.mark.parametrize(("running", "line"), [
    ([False], "job 7 (a) of an earlier command is still in the queue: scancel 7, then"),
    ([True], "job 7 (a) of an earlier command is running: wait for its results, or cancel it, "
     "then"),
    ([False, False], "job 7 (a) and 1 more of an earlier command are still in the queue: cancel "
     "them, then"),
    ([False, True], "job 7 (a) and 1 more of an earlier command are still in the queue, 1 running: "
     "wait for their results, or cancel them, then"),
])  # fmt: skip
def test_a_job_that_runs_is_better_left_to_its_end(running: list[bool], line: str) -> None:
    said = refusal_of(running, "7 (a)", "scancel 7")
    assert said == f"{line} run the same command again"


@pytest.mark.parametrize(("folder", "python", "line"), [
    ("a b", "/a b/python", "cannot start a Python in a path with blanks"),
    ("a b", "/bin/python", ""),
])  # fmt: skip
def test_a_path_that_no_job_finds_is_refused(
    tmp_path, monkeypatch, folder: str, python: str, line: str
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    with pytest.raises(Refusal, match=re.escape(line)) if line else nullcontext():
        refuse_unquoted(python)


@pytest.mark.parametrize(("elsewhere", "left"), [
    (f'echo CLUSTER: a; {HEADER}; echo "8|PENDING|$(id -u)|$PWD"', {"8": False}),
    # Of one cluster that does not know the number, and of one that does not answer.
    (f"echo CLUSTER: a; {HEADER}; echo slurm_load_jobs error: Invalid job id specified >&2; "
     "exit 1", {}),
    (f"echo CLUSTER: a; {HEADER}; echo error: Unable to contact slurm controller >&2; exit 1",
     None),
    ("echo \"squeue: error: 'all' can't be reached now\" >&2; exit 1", None),
])  # fmt: skip
def test_a_job_that_the_local_cluster_does_not_know_may_be_on_another(
    slurm, elsewhere, left
) -> None:
    unknown = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
    command(slurm, "squeue", f'case "$*" in *=all*) {elsewhere};; *) {unknown};; esac')
    assert SCHEDULERS["srun"].unended(["8"]) == {}
    accounting = "AccountingStorageType   = accounting_storage/slurmdbd"
    command(slurm, "scontrol", f"echo '{accounting}'")
    assert SCHEDULERS["srun"].unended(["8"]) == left
    # What the local one has said stands.
    known = f'{HEADER}; echo "7|RUNNING|$(id -u)|$PWD"'
    command(slurm, "squeue", f'case "$*" in *=all*) {elsewhere};; *) {known};; esac')
    assert SCHEDULERS["srun"].unended(["7", "8"]) == {"7": True} | (left or {})


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


def test_the_controller_is_asked_again_while_it_does_not_answer(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or while this node has too many processes for scontrol."""
    plain, tries = subprocess.run, iter([BlockingIOError(errno.EAGAIN, "Try again")])

    def run(*arguments, **options) -> subprocess.CompletedProcess[str]:
        for error in tries:
            raise error
        return plain(*arguments, **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(base, "PAUSE", 0)
    command(slurm, "scontrol", f"[ -e {slurm}/asked ] && echo JobId=7 A=1 && exit\n"
            f"touch {slurm}/asked; echo Unable to contact slurm controller >&2; "
            "exit 1")  # fmt: skip
    assert shown_job("7", 60) == "JobId=7 A=1"
    told = "slurm: the controller does not answer; trying again for 60 s\n"
    assert capsys.readouterr().err == told
    (slurm / "asked").unlink()
    line = "Slurm's controller does not answer (Unable to contact slurm controller); try again once"
    with pytest.raises(Refusal, match=f"^{re.escape(line)} sinfo does$"):
        shown_job("7")


@pytest.fixture
def in_a_job(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands in job 7 on n1, the last job of array 7; they note what they are asked."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    more = "JobName=a Restarts=0 StartTime=2026-11-28T18:00:00 EndTime=Unknown NodeList=n1"
    ids = ("JobId=8 ArrayJobId=7 ArrayTaskId=1", "JobId=7 ArrayJobId=7 ArrayTaskId=2")
    jobs = "\n".join(f"{job} {more}" for job in ids)
    noted = f'echo "$(basename $0) $@" >> {slurm}/calls'
    command(slurm, "scontrol", f'{noted}; [ "$2" = hostnames ] && echo n1 || echo "{jobs}"')
    command(slurm, "scancel", noted)
    return slurm


def test_a_warning_does_not_wait_for_a_controller_that_hangs(in_a_job: Path, monkeypatch) -> None:
    job = SCHEDULERS["srun"].allocation(1)
    monkeypatch.setattr(scheduler, "answer", partial(answer, patience=0.1))
    command(in_a_job, "scancel", "exec sleep 9")
    with pytest.raises(Refusal, match=r"^scancel: no answer within 0\.1 s$"):
        SCHEDULERS["srun"].warn(job)


def test_one_job_of_an_array_leaves_the_others_alone(in_a_job: Path) -> None:
    slurm = SCHEDULERS["srun"]
    job = slurm.allocation(1)
    assert (job.owner, job.number, job.job) == ("Slurm job 7", 7, "7_2")
    assert job.inspect == "sacct -X -j 7_2"
    slurm.warn(job)
    assert slurm.end(job) is None
    assert slurm.requeue(job, saved=True) is None
    *_, warned, _, _, requeued = (in_a_job / "calls").read_text().splitlines()
    assert [warned, requeued] == ["scancel --signal=USR1 7_2", "scontrol requeue 7_2"]


def test_a_job_without_a_state_that_ends_at_once_is_not_requeued_for_ever(
    in_a_job: Path, tmp_path
) -> None:
    text = (in_a_job / "scontrol").read_text()
    (in_a_job / "scontrol").write_text(text.replace("Restarts=0", "Restarts=3"))
    run = 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_NODEID=0 exec "$@"'
    command(in_a_job, "srun", run)
    (tmp_path / "program.py").write_text("raise SystemExit(75)")
    done = program("launch", "--launcher", "none", "--restart", "--", tmp_path / "program.py")
    assert done.returncode == 75, done.stderr
    line = "the job was restarted 3 times, and this start saved nothing new in less than 60 s"
    assert line in done.stderr
    assert "requeue" not in (in_a_job / "calls").read_text()


def test_a_launch_that_srun_has_started_several_times_is_refused(
    in_a_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(tasks: int, number: int, **more: str) -> None:
        for name, value in ({"STEP_NUM_TASKS": str(tasks), "PROCID": str(number)} | more).items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        SCHEDULERS["srun"].allocation(1)

    start(1, 0)
    line = "launch was started by srun as task 1 of 2; start it once, without srun"
    with pytest.raises(Refusal, match=f"^{line}$"):
        start(2, 1)
    assert (in_a_job / "calls").read_text().count("hostnames") == 1
    # A shell: the other tasks of `srun --pty bash` have no terminal.
    start(2, 0, PTY_PORT="1234")
    # Submitted in a step.
    monkeypatch.delenv("SLURM_PTY_PORT", raising=False)
    monkeypatch.setattr(scheduler, "step_here", lambda: "batch")
    start(2, 0)


def test_a_step_is_known_by_what_watches_over_it() -> None:
    script = "from manynodes.schedulers.slurm.scheduler import step_here; print(step_here())"
    watch = "import subprocess, sys; subprocess.run(sys.argv[2:], check=True)"
    for name, step in (("slurmstepd: [7.batch]", "batch"), ("slurmstepd: [7.0]", "0")):
        shell = ["bash", "-c", 'exec -a "$0" "$@"', name, sys.executable, "-c", watch, "7"]
        done = python(script, before=shell)
        assert done.stdout == f"{step}\n", done.stderr


@pytest.mark.parametrize(("gres", "gpus"), [
    ("gpu:4", 4), ("gpu:a100:4(S:0-1),gpu:a100_1g.5gb:2(S:0,2),shard:8", 6), ("(null)", 0),
    ("mygpu:3", 0), ("", 0),
])  # fmt: skip
def test_gpus_are_counted_in_slurm_s_words(gres: str, gpus: int) -> None:
    assert gpus_in(gres) == gpus


def test_more_gpus_than_any_node_has_are_refused(slurm: Path) -> None:
    command(slurm, "sinfo", "echo 'main|8|16000|50000|(null)|infinite|n1'\n"
                            "echo 'main|8|16000|50000|gpu:4|infinite|n2'")  # fmt: skip
    command(slurm, "scontrol", "echo PartitionName=main State=UP TotalNodes=2 X=1")
    main = partitions()["main"]
    assert main == {
        "nodes": 2, "runtime": None,
        "cpus_per_task": 8, "mem_mb": 16000, "slurm_tmp": 50000, "gres": 4,
    }  # fmt: skip
    for gres in ("gpu:4", "gpu:a100:4", ""):
        refuse_too_large({"gres": gres}, "main", main)
    line = "gres: 5 GPUs a node are asked for, the largest node of main has 4; lower nproc_per_node"
    with pytest.raises(Refusal, match=f"^{line} "):
        refuse_too_large({"gres": "gpu:5"}, "main", main)
    # Some nodes are switched off, and not shown.
    command(slurm, "scontrol", "echo PartitionName=main State=UP TotalNodes=3 X=1")
    refuse_too_large({"gres": "gpu:5"}, "main", partitions()["main"])


def test_a_refusal_begins_with_sbatch_s_reason(slurm, told, monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("SBATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SBATCH_QOS", "nope")
    options = ("-p", "main", f"--comment={300 * 'x'}")
    command(slurm, "sbatch", "echo 'allocation failure: Invalid qos specification' >&2; exit 1")
    line = "sbatch would refuse a job: Invalid qos specification; of this shell sbatch takes "
    with pytest.raises(Refusal, match=f"^{line}SBATCH_QOS$"):
        try_submission(options, told.append)
    assert told == [f"options of the job: {' '.join(options)}"]
    monkeypatch.delenv("SBATCH_QOS")
    command(slurm, "sbatch", "echo 'sbatch: error: Nodes are down' >&2; exit 1")
    try_submission(options, told.append)
    said = "sbatch says of a job: Nodes are down; options of the job: "
    assert told[1:] == [said + " ".join(options)]


class Resources(dict):
    """Of a job, as Snakemake has them."""

    __getattr__ = dict.get


class Submitting(Executor):
    """The parts of Snakemake's executor for Slurm with which a job is submitted."""

    __module__ = "snakemake_executor_plugin_slurm"
    workflow = types.SimpleNamespace(
        executor_settings=types.SimpleNamespace(
            array_jobs=False, pass_command_as_script=False, requeue=True, qos="", reservation=""
        )
    )

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.words = list(words)

    def get_account_arg(self, _job) -> Iterator[str]:
        yield ""

    def get_partition_arg(self, _job) -> str:
        return "-p 'main'"

    def get_python_executable(self) -> str:
        return "program"

    def get_job_exec_prefix(self, _job) -> str:
        return "true"

    def format_job_exec(self, job) -> str:
        words = utils.format_cli_arg("--wait-for-files", self.words)
        return f"{self.get_job_exec_prefix(job)} && program -m snakemake {words}"


class SubmittedJob(types.SimpleNamespace):
    """The parts of Snakemake's job that are looked at."""

    __hash__ = object.__hash__


def submitted_job(**resources: object) -> SubmittedJob:
    return SubmittedJob(
        resources=Resources(nodes=1, tasks=1, cpus_per_task=2, **resources), threads=1,
        rule=types.SimpleNamespace(name="train"), is_local=False, is_group=lambda: False,
    )  # fmt: skip


@pytest.mark.parametrize("resources", [{}, {"mpi": "srun"}])
def test_the_command_of_a_job_has_every_word_as_it_is(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, resources: dict[str, str]
) -> None:
    monkeypatch.setattr(utils, "repr", repr, raising=False)
    quote_for_shells()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    # Folders, and values of --config.
    words = ["a b", "it's", 'a"b', 'it\'s "$HOME" `id` \\n', "x=$HOME", "a`id`b", "ä", "a\nb"]
    show = r'printf "%s\0" "$SLURM_JOB_ID$SLURM_STEP_ID" "$@"'
    command(slurm, "sbatch", 'exec sh -c "${1#--wrap=}"')
    command(slurm, "srun", 'while [ "$1" != program ]; do shift; done; exec "$@"')
    command(slurm, "program", show)
    executor = Submitting(words)
    start_one_snakemake(executor)
    # As the plugin does.
    text = executor.format_job_exec(submitted_job(**resources)).replace('"', '\\"')
    assert text.count("srun") == (not resources)
    out = subprocess.check_output(f'sbatch --wrap="{text}"', shell=True, text=True)
    assert out.split("\0") == ["7", "-m", "snakemake", "--wait-for-files", *words, ""]


@pytest.mark.parametrize(("folder", "found"), [
    ("a\\b", "\\"), ("of %u", "%u"), ("a%3j", "%3j"), ("100%%", "%%"),
    ("50%", ""), ("a%b", ""), ("it's \"$HOME\" `id`", ""),
])  # fmt: skip
def test_a_folder_that_sbatch_takes_for_another_one_is_refused(folder: str, found: str) -> None:
    """The others were seen to work on Slurm 22.05."""
    logs = f"/home/{folder}/.snakemake/slurm_logs"
    line = re.escape(f"{logs}: jobs do not find a path with {found}; work in another folder")
    with pytest.raises(Refusal, match=line) if found else nullcontext():
        refuse_replaced(logs, arrays=False)


def test_an_array_of_jobs_does_not_find_a_folder_with_a_dollar_sign() -> None:
    with pytest.raises(Refusal, match="jobs do not find a path with [$]; work in another folder"):
        refuse_replaced("/home/a$b/.snakemake/slurm_logs", arrays=True)


@pytest.mark.parametrize(("given", "variable", "refused"), [
    ({}, "", True),
    ({"qos": "long"}, "", False),
    ({"slurm_extra": "-q long"}, "", False),
    ({}, "SBATCH_QOS", False),
    ({"clusters": "other"}, "", False),
    ({"slurm_extra": "-M other"}, "", False),
    ({}, "SBATCH_CLUSTERS", False),
])  # fmt: skip
def test_what_may_exceed_a_partition_s_limit_is_left_to_sbatch(
    slurm: Path, monkeypatch, told, given: dict[str, str], variable: str, refused: bool
) -> None:
    for name in [name for name in os.environ if name.startswith("SBATCH_")]:
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "other")
    command(slurm, "sinfo", "echo 'main|8|16000|50000|(null)|1-00:00:00|n1'")
    command(slurm, "scontrol", "echo PartitionName=main State=UP TotalNodes=1 X=1")
    command(slurm, "sbatch", "exit 0")
    jobs = [submitted_job(runtime=2880, **given)]
    dag = types.SimpleNamespace(needrun_jobs=lambda: jobs, get_job_group=lambda _job: None)
    line = "runtime: 2880 minutes are asked for, main allows 1440"
    with pytest.raises(Refusal, match=line) if refused else nullcontext():
        check_submissions(dag, Submitting(), told.append)
    assert told == []
