"""Repairs of Snakemake's Slurm plugin, made from outside, and a line for each change of a job's state.

Read and tested with version 2.8.0 of snakemake-executor-plugin-slurm. Each repair names the upstream issue, where there is one.
"""

import asyncio
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from snakemake_interface_common.exceptions import WorkflowError

from ddp.errors import Refusal

TESTED = "2.8.0"
# Seconds that a status query may take; sacct was seen to wait for ever on a slurmdbd that had stopped.
QUERY_TIMEOUT = 60
# Seconds for which squeue no longer lists a job, after which the job has ended and is forgotten; for which a job stays PREEMPTED or
# NODE_FAIL, after which Slurm does not requeue it (a requeued job says so within seconds); and for which the processes of a job that has
# ended are waited for.
LASTING = 60

Status = tuple[dict[str, str], float]


def check_version(tell: Callable[[str], None]) -> None:
    """Say in one line that the plugin is not the tested one."""
    found = metadata.version("snakemake-executor-plugin-slurm")
    if found != TESTED:
        tell(f"snakemake-executor-plugin-slurm is version {found}; this workflow was tested with {TESTED}")


class Follower:
    """Follows an executor's jobs from submission to end, through outages of Slurm's daemons.

    Attributes:
        jobs: submitted and not known to have ended, by Slurm's id.
        failures: why jobs failed, by the job; in Slurm's or sbatch's words.
        logs: of failed jobs, what Slurm wrote of them.

    Args:
        describe: names a Snakemake job in a few words, and its log.
        tell: prints one line.
    """

    def __init__(self, describe: Callable[[Any], str], tell: Callable[[str], None]) -> None:
        self.describe, self.tell = describe, tell
        self.jobs: dict[str, Any] = {}
        self.failures: dict[Any, str] = {}
        self.logs: dict[Any, str] = {}
        self.shown: dict[str, str] = {}
        self.silent_since: float | None = None
        self.unqueued: dict[str, float] = {}
        self.listed: set[str] = set()
        self.unlisted: dict[str, float] = {}
        self.ending: dict[str, float] = {}

    def attach(self, executor: Any) -> None:
        """Follow the jobs of a Slurm executor from now on."""
        plugin = sys.modules[type(executor).__module__]
        plugin.query_job_status = self.query  # type: ignore[attr-defined]
        submitted, succeeded, failed = executor.report_job_submission, executor.report_job_success, executor.report_job_error
        cancel = executor.cancel_jobs

        def on_submission(info: Any, *arguments: Any, **options: Any) -> None:
            self.jobs[info.external_jobid] = info
            submitted(info, *arguments, **options)

        def on_success(info: Any) -> None:
            self.jobs.pop(info.external_jobid, None)
            succeeded(info)

        def on_error(info: Any, msg: str | None = None, **options: Any) -> None:
            self.jobs.pop(info.external_jobid, None)
            self.failures[info.job] = reason_of(msg or "")
            self.logs[info.job] = str((info.aux or {}).get("slurm_logfile") or "")
            failed(info, msg=msg, **options)

        def on_cancel(_known: list[Any]) -> None:
            # The executor's base class takes the active jobs out of its list while it asks for their states: Ctrl-C at that
            # moment cancelled nothing (measured).
            cancel(list(self.jobs.values()))

        # The plugin lets its intervals grow by 10 s up to 180 s whatever --seconds-between-status-checks says.
        longest = executor.workflow.remote_execution_settings.seconds_between_status_checks

        async def sleep() -> None:
            await asyncio.sleep(min(executor.next_seconds_between_status_checks, longest))

        executor.report_job_submission, executor.report_job_success = on_submission, on_success
        executor.report_job_error, executor.cancel_jobs = on_error, on_cancel
        executor.sleep = sleep

    async def query(self, command: str, _logger: Any) -> Status:
        """The states of the jobs, in words that the plugin knows; empty while Slurm does not answer.

        The plugin asks five times within a second, and then forgets all its jobs for good, neither to check nor to cancel them
        (measured; https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/207 and /331). Given no states, it asks again
        at its next poll.
        """
        start = time.time()
        states, error = await asyncio.to_thread(ask, command)
        tool = command.split()[0]
        if states is None:
            if self.silent_since is None:
                self.silent_since = start
                self.tell(f"{tool} gives no job states ({error}); jobs are not affected; asking again until it does")
            return {}, time.time() - start
        if self.silent_since is not None:
            self.tell(f"{tool} gives job states again, after {time.time() - self.silent_since:.0f} s")
            self.silent_since = None
        plain = {job: self.plain(job, state) for job, state in states.items() if state}
        if tool == "squeue":
            plain |= dict.fromkeys(self.forgotten(set(plain)), "UNKNOWN")
        queued = await asyncio.to_thread(details, list(self.jobs))
        self.show(plain, queued)
        return {job: self.settled(job, word, queued) for job, word in plain.items()}, time.time() - start

    def plain(self, job: str, state: str) -> str:
        """A job's state in a word that ends the plugin's waiting where the job has ended.

        sacct says `CANCELLED by 1000` of a cancelled job, and keeps saying `PREEMPTED` or `NODE_FAIL` of one that is not requeued. The
        plugin takes none of them for an end and waits for ever (the first measured, the others read). At `NODE_FAIL` it also excludes
        what sacct names as the node from all later jobs: all nodes of the job, or `None assigned`, with which nothing can be
        submitted any more (measured; https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/485). Slurm itself gives
        nobody a dead node.
        """
        word = state.split()[0]
        if lasts(self.unqueued, job, word in ("PREEMPTED", "NODE_FAIL")):
            return "CANCELLED"
        return "PENDING" if word == "NODE_FAIL" else word

    def settled(self, job: str, word: str, queued: Mapping[str, tuple[str, str, str]]) -> str:
        """A job's state, `COMPLETING` as long as processes of a job that did not complete may still run.

        Slurm calls a job cancelled at once, and ends its processes after that. The plugin's next step is to show the rule's log, which
        then lacked its last line, the reason (measured).
        """
        ending = word not in ("COMPLETED", "PENDING", "RUNNING") and queued.get(job, ("",))[0] == "COMPLETING"
        # Asked in any case: it forgets a job that goes on.
        long = lasts(self.ending, job, ending)
        return word if long or not ending else "COMPLETING"

    def forgotten(self, listed: set[str]) -> list[str]:
        """Jobs that squeue has listed and lists no longer: it forgets a job MinJobAge after its end, perhaps during an outage.

        The plugin takes the state UNKNOWN for an end, and Snakemake then looks for the job's output.
        """
        self.listed |= listed & set(self.jobs)
        return [job for job in sorted(self.listed & set(self.jobs)) if lasts(self.unlisted, job, job not in listed)]

    def show(self, states: Mapping[str, str], details: Mapping[str, tuple[str, str, str]]) -> None:
        """Print a line for each job whose state, pending reason or nodes have changed."""
        for number, info in list(self.jobs.items()):
            state, reason, nodes = details.get(number, (states.get(number, ""), "", ""))
            if state in ("", "COMPLETED", "COMPLETING"):
                continue
            line = state + (f" ({reason})" if state == "PENDING" and reason not in ("", "None") else "") + (f" on {nodes}" if nodes else "")
            # Without squeue's answer the nodes are not known: no change by itself.
            if number not in details and self.shown.get(number, "").startswith(state):
                continue
            if self.shown.get(number) != line:
                self.shown[number] = line
                self.tell(f"job {number}, {self.describe(info.job)}: {line}")


def lasts(since: dict[str, float], job: str, holds: bool) -> bool:
    """Note whether something holds of a job now; returns whether it has held for LASTING seconds, at least twice in a row."""
    if not holds:
        since.pop(job, None)
        return False
    known = job in since
    return time.monotonic() - since.setdefault(job, time.monotonic()) >= LASTING and known


def ask(command: str) -> tuple[dict[str, str] | None, str]:
    """Run a status query: the states by job, or None and the reason in one line."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=QUERY_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {QUERY_TIMEOUT} s"
    except OSError as error:
        return None, str(error.strerror)
    if done.returncode:
        return None, " ".join(done.stderr.split())[:150] or f"status {done.returncode}"
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) > 1}, ""


def details(jobs: list[str]) -> dict[str, tuple[str, str, str]]:
    """State, pending reason and nodes of each job that squeue still lists; none if squeue does not answer."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i|%T|%r|%N"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return {row[0]: (row[1], row[2], row[3]) for row in rows if len(row) == 4}


def reason_of(message: str) -> str:
    """What the plugin says of a failed job, in one line: sbatch's own words where it refused the job."""
    if found := re.search(r"sbatch failed\. The error message was '(.*?)'\.?\s*\n", message, re.DOTALL):
        return "sbatch refused the job: " + " ".join(found[1].split()).removeprefix("sbatch: error: ")
    first = message.partition("For further error details")[0]
    return " ".join(first.split()).replace(" Reason: Unknown.", "")


def submission(executor: Any, job: Any) -> tuple[str, ...]:
    """The options of sbatch with which the executor will submit a job, less those that name its files.

    Raises:
        Refusal: the plugin itself refuses the job's resources.
    """
    plugin = sys.modules[type(executor).__module__]
    try:
        plugin.validate_slurm_extra(job)
        parameters = {
            "run_uuid": "", "slurm_logfile": "", "comment_str": "", "workdir": "",
            "account": next(executor.get_account_arg(job)),
            "partition": executor.get_partition_arg(job),
        }  # fmt: skip
        call = plugin.get_submit_command(job, parameters, settings=executor.workflow.executor_settings) + plugin.set_gres_string(job)
    except WorkflowError as error:
        raise Refusal(" ".join(str(error).split())) from None
    # --parsable, --job-name, --output, --export and --comment come first.
    return tuple(shlex.split(call)[9:])
