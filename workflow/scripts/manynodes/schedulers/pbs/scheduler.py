"""PBS as a scheduler: the job's nodes, agents on them through pbs_tmrsh, and its resources."""

import calendar
import os
import pwd
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from manynodes.base.errors import Refusal
from manynodes.base.processes import job_seconds
from manynodes.schedulers.base import (
    Allocation,
    Size,
    TellState,
    Unanswered,
    Watch,
    asked_of,
    end_here,
    is_this_folder,
)
from manynodes.schedulers.pbs.commands import path_of, shown_job, shown_jobs
from manynodes.schedulers.remote.scheduler import AgentScheduler, is_here

# Variable with a file: if it exists after the job, the executor submits the job again.
AGAIN = "DDP_PBS_AGAIN"
# And with the job's first id, if this one was submitted again.
FIRST = "DDP_PBS_FIRST"
# States of a job that has ended, or is about to.
OVER = ("E", "F")
# What stands in the file.
SAVED, NOT_SAVED = "saved", "nothing saved"


class Pbs(AgentScheduler):
    transport = "pbs"
    description = "the nodes of this PBS job"
    executor = "pbs"
    job_variable = "PBS_JOBID"
    job_scratch = "TMPDIR"
    canceller = "qdel"
    ends_requeued = False

    def doubted(self, environment: Mapping[str, str]) -> bool:
        # Slurm's plugin spank_pbs gives its tasks a PBS_JOBID too, and no PBS_NODEFILE.
        return not Path(environment.get("PBS_NODEFILE", "")).is_file()

    def allocation(self, nodes: int) -> Allocation:
        job = os.environ.get("PBS_JOBID", "")
        if not job:
            raise Refusal(
                "transport pbs works inside a PBS job; start launch in one (qsub), or use "
                "--transport local"
            )
        with asked_of(self.job_variable):
            hosts = job_hosts(os.environ)
        here = socket.gethostname()
        # PBS may name it after another interface.
        if short(here) != short(hosts[0]) and not is_here(hosts[0]):
            raise Refusal(
                f"launch runs on {here}, not on {hosts[0]}, the first node of job {job}; start it "
                "there"
            )
        if len(hosts) != nodes:
            raise Refusal(
                f"nodes: the run wants {nodes}, job {job} has {len(hosts)}: {', '.join(hosts)}"
            )
        with asked_of(self.job_variable):
            shown = shown_job(job)
        runs = int(shown.get("run_count", 1))
        first = os.environ.get(FIRST, "")
        return Allocation(
            # A job of which PBS has lost the first node may still run there while PBS starts it
            # again elsewhere: the two must not be the same owner.
            owner=f"PBS job {f'{first}, now {job}' if first else job} run {runs}",
            hosts=hosts,
            addresses=("127.0.0.1",) if len(hosts) == 1 else hosts,
            number=int(re.sub(r"\D.*", "", job) or 0),
            end=end_of(shown, job_seconds(f"PBS_JOBID={job}")),
            job=job,
            inspect=f"qstat -x -f {job}",
            # The executor may have submitted it again.
            restarts=runs - 1 + bool(first),
        )

    def reach(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        # Unlike pbsdsh it takes a host's name, and its status is the command's. Unlike ssh, it
        # leaves the processes to PBS, which counts them and ends them with the job.
        return (path_of("pbs_tmrsh"), host, *command)

    def requeue(self, allocation: Allocation, saved: bool) -> str | None:
        # A user may not qrerun (measured, status 159). The executor submits the same job again.
        again = os.environ.get(AGAIN)
        if not again:
            return "PBS lets only operators requeue a running job"
        try:
            Path(again).write_text(SAVED if saved else NOT_SAVED)
        except OSError as error:
            return f"{again}: {error.strerror}"
        return None

    def resources(self, size: Size) -> dict[str, int | str]:
        return {
            "nodes": size.nodes,
            "cpus_per_task": size.cpus,
            "ngpus": size.gpus,
            "mem_mb": size.memory,
        }

    def idle_nodes(self, environment: Mapping[str, str]) -> str | None:
        try:
            hosts = job_hosts(environment)
        except Refusal:
            return None
        if len(hosts) < 2:
            return None
        return (
            f"this PBS job has {len(hosts)} nodes, and profiles/local uses only this one; leave "
            "the job and run `snakemake --profile profiles/pbs` on the login node, or use "
            "--config hosts=$PBS_NODEFILE"
        )

    def unended(self, jobs: Sequence[str]) -> dict[str, bool] | None:
        try:
            found = shown_jobs(jobs)
        except (Unanswered, Refusal):
            return None
        return {
            job: found[job].get("job_state") == "R"
            for job in jobs
            if job in found and found[job].get("job_state") not in OVER and is_ours(found[job])
        }

    def watch(self, workflow: Any, tell_state: TellState, tell: Callable[[str], None]) -> Watch:
        # Imported here: launch needs none of it.
        from manynodes.schedulers.pbs.jobs import follow

        return follow(workflow, tell_state, lambda line: tell(f"pbs: {line}"))


def is_ours(shown: Mapping[str, str]) -> bool:
    """Whether this user has submitted a job in this folder."""
    # A comma in a value is written as a backslash and a comma.
    found = re.search(r"\bPBS_O_WORKDIR=((?:\\.|[^,\\])*)", shown.get("Variable_List", ""))
    folder = re.sub(r"\\(.)", r"\1", found[1]) if found else ""
    user = shown.get("Job_Owner", "").partition("@")[0]
    with suppress(KeyError):  # nobody knows what this user is called
        if user != pwd.getpwuid(os.getuid()).pw_name:
            return False
    return is_this_folder(folder)


def job_hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes of the job in their order; PBS_NODEFILE names a node once per MPI process.

    Raises:
        Refusal: there is no such file.
    """
    path = environment.get("PBS_NODEFILE", "")
    try:
        hosts = tuple(dict.fromkeys(Path(path).read_text().split())) if path else ()
    except OSError:
        hosts = ()
    if not hosts:
        raise Refusal(f"PBS_NODEFILE: {path or 'not set'}; start launch inside the job")
    return hosts


def short(host: str) -> str:
    return host.partition(".")[0]


def end_of(shown: Mapping[str, str], running: float) -> float | None:
    """When the job's walltime is over, see `end_here`; None if it has no limit.

    Args:
        shown: attributes from a qstat that shows times in UTC.
    """
    walltime, start = shown.get("Resource_List.walltime"), shown.get("stime")
    if not walltime or not start:
        return None
    seconds = 0
    for part in walltime.split(":"):
        seconds = 60 * seconds + int(part)
    began = calendar.timegm(time.strptime(start))
    return end_here(began, began + seconds, running)
