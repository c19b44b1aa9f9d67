"""Patches of Snakemake's Slurm plugin, applied from outside, and a line for each change of a job's
state.

Tested with version 2.8.0 of snakemake-executor-plugin-slurm. Each patch names its upstream issue,
if there is one.
"""

import asyncio
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from snakemake_executor_plugin_slurm_jobstep import (  # type: ignore[import-untyped]
    get_cpu_setting,
    get_gpu_setting,
    get_node_setting,
)
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import (  # type: ignore[import-untyped]
    SubmittedJobInfo,
)

from manynodes.base.errors import Refusal, one_line, shown
from manynodes.base.processes import ignore_interrupts
from manynodes.base.reading import is_file
from manynodes.schedulers.base import SPARE_MB, TellState, Watch
from manynodes.schedulers.slurm.commands import ENDED, UNREACHABLE, answer

TESTED = "2.8.0"
# Seconds for a status query; sacct was seen to wait for ever for a stopped slurmdbd.
QUERY_TIMEOUT = 60
# Seconds after which a job that squeue no longer lists has ended; after which a job that stays
# PREEMPTED or NODE_FAIL will not be requeued (otherwise it changes within seconds); and to wait for
# the last processes of an ended job.
LASTING = 60

TMP = re.compile(r"([1-9][0-9]{0,8})([MGT]?)")
UNITS = {"": 1, "M": 1, "G": 1024, "T": 1024**2}  # MB, as sbatch counts them

# What sbatch says when a limit on submitted jobs is reached, of an association or of a QOS. Not
# "job submit limit", which stands in every refusal by policy, also in one that would never pass.
FULL = re.compile(r"\w*MaxSubmit\w*Limit\w*", re.IGNORECASE)
# Of a refusal, what the controller has said, or why it has not been reached.
SUBMISSION_FAILED = re.compile(r"submission failed: (.*)")
# Seconds between two tries to submit a job beyond a limit, or to a controller that is away.
SUBMIT_WAIT = 30
# Seconds for which jobs are cancelled again and again if the controller is away, and between two
# tries.
CANCELLING, CANCEL_WAIT = 60, 5
# Shell code that removes the variables that the plugin's job removes before its step.
FORGET_VARIABLES = (
    "for name in $(env | grep -oE '^(SLURM|SRUN|SBATCH)_[A-Za-z0-9_]+' | grep -vxE 'SLURM_(CONF|"
    "JOB_?ID|ARRAY_JOB_ID|ARRAY_TASK_(ID|MIN|MAX|STEP)|CLUSTER_NAME|SUBMIT_(DIR|HOST))'); "
    "do unset $name; done"
)
# What --parsable prints; a site's wrapper may print more.
JOB_ID = re.compile(r"\d+(;\S+)?")


class Follower(Watch):
    """Follows an executor's jobs from submission to end, through outages of Slurm's daemons.

    Attributes:
        jobs: submitted and not known to have ended, by Slurm's id.

    Args:
        tell_state, tell: as in `Scheduler.watch`.
    """

    def __init__(self, tell_state: TellState, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.tell_state, self.tell = tell_state, tell
        self.jobs: dict[str, Any] = {}
        self.numbers: set[str] = set()
        self.run_uuid = ""
        self.over = threading.Event()
        self.shown: dict[str, str] = {}
        self.silent_since: float | None = None
        self.listed: set[str] = set()
        self.since: dict[tuple[str, str], float] = {}

    def attach(self, executor: Any) -> None:
        """Follow the jobs of a Slurm executor from now on."""
        plugin = sys.modules[type(executor).__module__]
        plugin.query_job_status = self.query  # type: ignore[attr-defined]
        submitted, succeeded, failed = (
            executor.report_job_submission,
            executor.report_job_success,
            executor.report_job_error,
        )
        run_job, self.run_uuid = executor.run_job, executor.run_uuid
        # The module's only use of it is sbatch, and with it the plugin keeps its own subprocess.
        plugin.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
            **vars(subprocess) | {"Popen": partial(Sbatch, self, cache(self.tell))}
        )

        def on_run(job: Any) -> None:
            # The plugin submits what is still in its own queue before it ends (measured).
            if self.over.is_set():
                return
            # Its own handler fails for a group of jobs, in a thread whose errors nobody sees, and
            # Snakemake would wait for ever (measured).
            try:
                run_job(job)
            except Exception as error:
                cause = error.__context__ or error
                line = f"the submission failed: {one_line(str(cause))}; is it in squeue? "
                executor._report_job_error_threadsafe(SubmittedJobInfo(job), line)

        def on_submission(info: Any, *arguments: Any, **options: Any) -> None:
            self.jobs[info.external_jobid] = info
            submitted(info, *arguments, **options)
            # Also for the next command, if this one is killed before its first query.
            self.tell_state(info.job, info.external_jobid, "is submitted", True)

        def on_success(info: Any) -> None:
            self.jobs.pop(info.external_jobid, None)
            succeeded(info)

        def on_error(info: Any, msg: str | None = None, **options: Any) -> None:
            self.jobs.pop(info.external_jobid, None)
            self.failures[info.job] = reason_of(msg or "")
            self.logs[info.job] = log_of(info)
            failed(info, msg=msg, **options)

        def on_cancel(_known: list[Any]) -> None:
            ignore_interrupts()
            self.over.set()
            self.cancel()

        # The plugin lets its intervals grow by 10 s up to 180 s, whatever
        # --seconds-between-status-checks says.
        longest = executor.workflow.remote_execution_settings.seconds_between_status_checks

        async def sleep() -> None:
            await asyncio.sleep(min(executor.next_seconds_between_status_checks, longest))

        executor.report_job_submission, executor.report_job_success = on_submission, on_success
        executor.report_job_error, executor.cancel_jobs = on_error, on_cancel
        executor.run_job = on_run
        executor.sleep = sleep

    def submitted(self, number: str) -> None:
        """Note what sbatch has submitted; if it is too late, cancel it."""
        self.numbers.add(number)
        if self.over.is_set():
            self.cancel()

    def cancel(self) -> None:
        """Cancel all jobs of this command.

        By their common name: also those of which sbatch has not told yet. The plugin asks once, and
        its base class has an empty list of jobs while it asks for states: Ctrl-C at such a moment
        cancelled nothing (both measured).
        """
        command = ["scancel", f"--name={self.run_uuid}", f"--user={os.getuid()}"]
        # Otherwise it asks the local cluster alone.
        command += ["--clusters=all"] if any(";" in number for number in self.numbers) else []
        deadline = time.monotonic() + CANCELLING
        while True:
            status, _, said = answer(*command, patience=QUERY_TIMEOUT)
            if status == 0 or not said or ENDED.search(said):
                return
            if not UNREACHABLE.search(said) or time.monotonic() >= deadline:
                why = f"scancel: {said}" if status is None else said
                self.tell(f"{one_line(why)}; when Slurm answers: {shlex.join(command)}")
                return
            time.sleep(CANCEL_WAIT)

    async def query(self, command: str, _logger: Any) -> tuple[dict[str, str], float]:
        """The states of the jobs, in words that the plugin knows; empty while Slurm does not
        answer.

        The plugin asks five times within a second and then forgets all its jobs for good, neither
        checking nor cancelling them (measured;
        https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/207 and /331).
        Without states it asks again at its next poll.
        """
        start = time.time()
        states, error = await asyncio.to_thread(ask, command)
        tool = command.split()[0]
        if states is None:
            if self.silent_since is None:
                self.silent_since = start
                self.tell(
                    f"{tool} gives no job states ({error}); jobs are not affected; asking again "
                    "until it does"
                )
            return {}, time.time() - start
        if self.silent_since is not None:
            self.tell(
                f"{tool} gives job states again, after {time.time() - self.silent_since:.0f} s"
            )
            self.silent_since = None
        plain = {job: self.plain(job, state) for job, state in states.items() if state}
        if tool == "squeue":
            plain |= dict.fromkeys(self.forgotten(set(plain)), "UNKNOWN")
        queued = await asyncio.to_thread(details, list(self.jobs))
        # sacct's query by time leaves out a job that was cancelled before it could have started,
        # such as one that was held (measured).
        plain |= {
            job: "CANCELLED"
            for job, (state, *_) in queued.items()
            if job not in plain and state.startswith("CANCELLED")
        }
        self.show(plain, queued)
        return {
            job: self.settled(job, word, queued) for job, word in plain.items()
        }, time.time() - start

    def plain(self, job: str, state: str) -> str:
        """A job's state, as a word with which the plugin stops waiting for an ended job.

        sacct reports a cancelled job as `CANCELLED by 1000`, and keeps reporting `PREEMPTED` or
        `NODE_FAIL` for a job that is not requeued. The plugin takes none of these for an end and
        waits for ever (the first was measured, the others were read). At `NODE_FAIL` it also
        excludes the nodes that sacct names from all later jobs: all nodes of the job, or `None
        assigned`, after which nothing can be submitted (measured;
        https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/485). Slurm
        itself allocates no dead node.
        """
        word = state.split()[0]
        if self.lasts("not requeued", job, word in ("PREEMPTED", "NODE_FAIL")):
            return "CANCELLED"
        return "PENDING" if word == "NODE_FAIL" else word

    def settled(self, job: str, word: str, queued: Mapping[str, tuple[str, str, str]]) -> str:
        """A job's state; `COMPLETING` while processes of a failed job may still run.

        Slurm calls a job cancelled before it ends its processes. The plugin then shows the rule's
        log, which lacked its last line, the reason (measured).
        """
        ending = (
            word not in ("COMPLETED", "PENDING", "RUNNING")
            and queued.get(job, ("",))[0] == "COMPLETING"
        )
        # Called in any case, because it forgets a job that continues.
        long = self.lasts("ending", job, ending)
        return word if long or not ending else "COMPLETING"

    def forgotten(self, listed: set[str]) -> list[str]:
        """Jobs that squeue has listed and no longer lists: it forgets a job MinJobAge after
        its end.

        The plugin takes the state UNKNOWN for an end, and Snakemake then looks for the
        job's output.
        """
        self.listed |= listed & set(self.jobs)
        return [
            job
            for job in sorted(self.listed & set(self.jobs))
            if self.lasts("not listed", job, job not in listed)
        ]

    def lasts(self, what: str, job: str, holds: bool) -> bool:
        """Note whether something holds for a job now; returns whether it has held for LASTING
        seconds, at least twice in a row.
        """
        if not holds:
            self.since.pop((what, job), None)
            return False
        now, known = time.monotonic(), (what, job) in self.since
        return now - self.since.setdefault((what, job), now) >= LASTING and known

    def show(self, states: Mapping[str, str], known: Mapping[str, tuple[str, str, str]]) -> None:
        """Print a line for each job whose state, pending reason or nodes have changed."""
        for number, info in list(self.jobs.items()):
            state, reason, nodes = known.get(number, (states.get(number, ""), "", ""))
            if state in ("", "COMPLETED", "COMPLETING"):
                continue
            line = (
                state
                + (f" ({reason})" if state == "PENDING" and reason not in ("", "None") else "")
                + (f" on {nodes}" if nodes else "")
            )
            # Without squeue's answer the nodes are unknown, which is not a change.
            if number not in known and self.shown.get(number, "").startswith(state):
                continue
            if self.shown.get(number) != line:
                self.shown[number] = line
                self.tell_state(info.job, number, line, state == "PENDING")


class Sbatch:
    """sbatch as the plugin starts it, with the answers that it can read.

    The plugin takes a site's message for a failure if it contains certain words, and then neither
    follows the job nor ends (measured). It gets the job's id alone; the message is told, once.

    Args:
        follower: of the jobs.
        tell: prints a line that it has not printed before.
        call, options: of Popen.
    """

    def __init__(
        self, follower: Follower, tell: Callable[[str], None], call: str, **options: Any
    ) -> None:
        self.follower, self.tell, self.call = follower, tell, call
        # Ctrl-C in a terminal must not end it after the controller has taken the job.
        self.options = options | {"start_new_session": True, "errors": "replace"}
        self.returncode = 0

    def communicate(self, input: str | None = None) -> tuple[str, str]:  # noqa: A002
        """Submit; while a limit on submitted jobs is reached or the controller is away, again and
        again.
        """
        out, said = self.submit(input)
        if self.returncode:
            return out, said
        if said.strip():
            self.tell(f"sbatch says: {' '.join(said.split())}")
        ids = [line.strip() for line in out.splitlines() if JOB_ID.fullmatch(line.strip())]
        number = (ids or [out])[-1]
        self.follower.submitted(number)
        return number, ""

    def submit(self, text: str | None) -> tuple[str, str]:
        """What sbatch writes to stdout and stderr when it has submitted the job, or will not."""
        while True:
            process = subprocess.Popen(self.call, **self.options)
            out, said = process.communicate(text)
            self.returncode = process.returncode
            full, failed = FULL.search(said), SUBMISSION_FAILED.search(said)
            away = failed and UNREACHABLE.search(failed[1])
            if not self.returncode or not (full or away):
                return out, said
            self.tell(
                f"sbatch: {full[0]}; jobs are submitted when others have ended" if full else
                f"sbatch: {one_line(failed[1] if failed else '')}; jobs are submitted when Slurm's "
                "controller answers"
            )  # fmt: skip
            while not self.follower.over.wait(SUBMIT_WAIT):
                number = "" if full else self.accepted()
                if number:
                    self.returncode = 0
                    return number, ""
                if number is not None:
                    break
            else:
                return out, said

    def accepted(self) -> str | None:
        """The number of the job if the controller has taken it and its answer was lost; empty if it
        has not; None if squeue does not answer.
        """
        words = shlex.split(self.call)
        given = dict(pairwise(words))
        cluster = given.get("--clusters", "")
        found, _ = ask(shlex.join([
            "squeue", "--noheader", "--array", "--states=all", f"--name={given['--job-name']}",
            "--format=%i|%k", *([f"--clusters={cluster}"] if cluster else []),
        ]))  # fmt: skip
        if found is None:
            return None
        known = {number.partition(";")[0] for number in self.follower.numbers}
        for job, comment in found.items():
            # Of an array, what sbatch would have answered.
            number = job.partition("_")[0]
            if comment == given["--comment"] and number not in known:
                return f"{number};{cluster}" if cluster else number
        return ""


def ask(command: str) -> tuple[dict[str, str] | None, str]:
    """Run a status query; returns the states by job, or None and the reason in one line."""
    status, out, said = answer(*shlex.split(command), patience=QUERY_TIMEOUT)
    if status != 0:
        return None, " ".join(said.split())[:150] or f"status {status}"
    rows = [line.split("|") for line in out.splitlines()]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) > 1}, ""


def details(jobs: list[str]) -> dict[str, tuple[str, str, str]]:
    """State, pending reason and nodes of each job that squeue lists; none if squeue does not
    answer.
    """
    # Without --array it shows those of an array that wait in one line, as 11_[1-2].
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(jobs)}"]
    _, out, _ = answer(*command, "--format=%i|%T|%r|%N", patience=QUERY_TIMEOUT)
    rows = [line.split("|") for line in out.splitlines()]
    return {row[0]: (row[1], row[2], row[3]) for row in rows if len(row) == 4}


def log_of(info: Any) -> str:
    """The log of a submitted job; empty if it was cancelled before it had one."""
    log = str((info.aux or {}).get("slurm_logfile") or "")
    return log if is_file(log) else ""


def reason_of(message: str) -> str:
    """The plugin's message on a failed job in one line; sbatch's own words if sbatch refused the
    job.
    """
    if found := re.search(
        r"sbatch failed\. The error message was '(.*?)'\.?\s*\n", message, re.DOTALL
    ):
        return "sbatch refused the job: " + " ".join(found[1].split()).removeprefix(
            "sbatch: error: "
        )
    first = message.partition("For further error details")[0]
    return " ".join(first.split()).replace(" Reason: Unknown.", "")


def add_to_submissions(executor: Any) -> None:
    """Give the executor the resource `slurm_tmp`, sbatch's `--tmp`, which the plugin lacks; and
    each job a comment of its own, by which it is found if sbatch's answer is lost.
    """
    plugin = sys.modules[type(executor).__module__]
    plain = plugin.get_submit_command

    def with_more(job: Any, given: Mapping[str, Any], *arguments: Any, **options: Any) -> str:
        tmp = tmp_mb(job.resources)
        commented = {**given, "comment_str": f"{given['comment_str']}_{job.jobid}"}
        return plain(job, commented, *arguments, **options) + (f" --tmp={tmp}M" if tmp else "")

    plugin.get_submit_command = with_more  # type: ignore[attr-defined]


def start_one_snakemake(executor: Any) -> None:
    """Let the batch script start the Snakemake that runs the job.

    The plugin's starts a Snakemake whose only task is to start that one, in the batch step for a
    job with `mpi`, else with srun, and without Slurm's variables.
    """
    settings = executor.workflow.executor_settings
    if settings.array_jobs or settings.pass_command_as_script:
        return
    # Of the job's node, whatever --cores is for the rules that run here.
    type(executor).cores = "all"
    executor.additional_general_args = lambda: ""
    executor.get_job_exec_prefix = lambda _job: FORGET_VARIABLES
    plain, snakemake = executor.format_job_exec, f"{executor.get_python_executable()} -m snakemake"

    def format_job_exec(job: Any) -> str:
        command = plain(job)
        if "mpi" not in job.resources.keys():  # noqa: SIM118, it is no mapping
            sizes = (get_cpu_setting(job, False), get_gpu_setting(job), get_node_setting(job))
            srun = " ".join(["srun -n1 --cpu-bind=q", *filter(None, sizes)])
            command = command.replace(snakemake, f"{srun} {snakemake}", 1)
        # The plugin writes it between double quotes, and escapes only these in it.
        return re.sub(r"[\\$`]", r"\\\g<0>", command)

    executor.format_job_exec = format_job_exec


def tmp_mb(resources: Mapping[str, Any]) -> int:
    """MB of local disk that a job asks for on each node; 0: none.

    Args:
        resources: `slurm_tmp`, a size as for sbatch or `auto`, which follows `disk_mb`.

    Raises:
        Refusal: it is no size.
    """
    wanted = str(resources.get("slurm_tmp") or "")
    if wanted == "auto":
        return int(resources.get("disk_mb") or 0) + SPARE_MB
    found = TMP.fullmatch(wanted)
    if wanted and not found:
        raise Refusal(f"slurm_tmp: {shown(wanted)}; give a size such as 20G, or auto")
    return int(found[1]) * UNITS[found[2]] if found else 0


def submission(executor: Any, job: Any) -> tuple[str, ...]:
    """The sbatch options with which the executor will submit a job, without those for its files.

    Raises:
        Refusal: the plugin itself refuses the job's resources, or a signal would not arrive.
    """
    plugin = sys.modules[type(executor).__module__]
    try:
        plugin.validate_slurm_extra(job)
        parameters = {
            "run_uuid": "", "slurm_logfile": "", "comment_str": "", "workdir": "",
            "account": next(executor.get_account_arg(job)),
            "partition": executor.get_partition_arg(job),
        }  # fmt: skip
        call = plugin.get_submit_command(
            job, parameters, settings=executor.workflow.executor_settings
        ) + plugin.set_gres_string(job)
    except WorkflowError as error:
        raise Refusal(" ".join(str(error).split())) from None
    # --parsable, --job-name, --output, --export and --comment come first.
    options = tuple(shlex.split(call)[9:])
    if re.search(r"--signal[= ][BR]*B", " ".join(options)):
        raise Refusal(
            "slurm_extra: --signal=B: warns the batch script alone, and the job would end without "
            "having saved; write it without B:, such as --signal=USR1@120"
        )
    return options
