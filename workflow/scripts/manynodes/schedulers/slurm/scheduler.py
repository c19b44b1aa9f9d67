"""Slurm as a scheduler: the job's nodes, one srun over all of them, requeue, and its errors."""

import json
import os
import re
import shlex
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from manynodes.base.errors import Refusal
from manynodes.base.processes import job_seconds, last_words, with_ancestors
from manynodes.schedulers.base import (
    Allocation,
    Cause,
    Command,
    Scheduler,
    Size,
    Step,
    TellState,
    Trouble,
    Watch,
    as_options,
    asked_of,
    end_here,
    is_this_folder,
    labelled,
)
from manynodes.schedulers.slurm.commands import ENDED, answer, field, scontrol, shown_job

# Seconds that a job which has just started waits for the controller.
PATIENCE = 300
# And one that is to be requeued; Slurm ends it 30 s (KillWait) after its time is up.
REQUEUING = 30
# What a step keeps of the variables that Slurm gave to the process that starts it.
# From the first srun knows the job; inside a job it takes none of the others for an option, and a
# program may ask for its place in a job array.
KEPT = re.compile(
    r"SLURM_(JOB_ID|CONF|CLUSTER_NAME|TMPDIR|JOB_NAME|RESTART_COUNT|(ARRAY|SUBMIT)_\w+)"
)


class Slurm(Scheduler):
    transport = "srun"
    description = "the nodes of this Slurm job"
    executor = "slurm"
    starter = "srun"
    job_variable = "SLURM_JOB_ID"
    task_launcher = "srun"
    job_scratch = "SLURM_TMPDIR"
    canceller = "scancel"
    query_settings = r"(SQUEUE|SACCT|SINFO|SCONTROL)_\w+|SLURM_TIME_FORMAT"
    # It imports pandas, for a report on all jobs of a command.
    unneeded_in_jobs = "snakemake_executor_plugin_slurm.efficiency_report"
    task_variables: Mapping[str, str] = {
        "RANK": "$SLURM_PROCID",
        "LOCAL_RANK": "$SLURM_LOCALID",
        "WORLD_SIZE": "$SLURM_NTASKS",
    }

    def allocation(self, nodes: int) -> Allocation:
        # Asked from Slurm: inside a Snakemake job, $SLURM_JOB_NODELIST is gone.
        job = os.environ.get("SLURM_JOB_ID", "")
        if not job.isdecimal():
            raise Refusal(
                "transport srun works inside a Slurm job; start launch in one (sbatch, salloc), or "
                "use --transport local"
            )
        refuse_tasks_of_srun()
        with asked_of(self.job_variable):
            shown = shown_job(job, PATIENCE)
            listed = field(shown, "NodeList")
        hosts = tuple(scontrol("show", "hostnames", listed).split())
        here = os.environ.get("SLURMD_NODENAME", socket.gethostname().partition(".")[0])
        if here != hosts[0]:
            raise Refusal(
                f"launch runs on {here}, not on {hosts[0]}, the first node of job {job}; "
                f"start it there: srun --jobid={job} --nodelist={hosts[0]} --nodes=1 --ntasks=1 "
                "--overlap --pty bash"
            )
        if len(hosts) != nodes:
            raise Refusal(
                f"nodes: the run wants {nodes}, job {job} has {len(hosts)}: {', '.join(hosts)}"
            )
        forget_step_options()
        name = name_of(job, shown)
        return Allocation(
            owner=f"Slurm job {job}",
            hosts=hosts,
            addresses=("127.0.0.1",) if len(hosts) == 1 else addresses_of(listed, hosts),
            number=int(job),
            end=end_of(shown, job_seconds(f"SLURM_JOB_ID={job}")),
            job=name,
            inspect=f"sacct -X -j {name}",
            restarts=int(field(shown, "Restarts")),
        )

    def commands(self, step: Step) -> list[Command]:
        plan = {
            node.node_rank: {
                "environment": node.environment | dict(step.private),
                "command": node.command,
            }
            for node in step.nodes
        }
        kind = "rank" if step.ranks else "node"
        return [
            Command(
                srun_command(step),
                stdin=json.dumps(plan),
                label=partial(labelled, kind),
                # srun ends the step on SIGTERM; a killed srun would leave the step running.
                end_signal=signal.SIGTERM,
            )
        ]

    def preview(self, step: Step) -> list[str]:
        return [shlex.join(srun_command(step)), *super().preview(step)]

    def explain(self, errors: Sequence[str]) -> Trouble | None:
        for text in errors:
            # slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-21T07:00 DUE TO TIME LIMIT
            # ***
            if found := re.search(r"ON (\S+) CANCELLED AT \S+ DUE TO (.*?) \*\*\*", text):
                return Trouble(f"Slurm ended it on {found[1]}: {found[2].lower()}", found[1])
        for text in errors:
            # srun: error: n2: tasks 2-3: Exited with exit code 1
            if found := re.match(r"srun: error: (\S+): tasks? (\d+)\S*: (.*)", text):
                host, task, ended = found.groups()
                lines = [line for line in errors if re.match(rf"\s*{task}: ", line)]
                last = last_words([line.partition(": ")[2] for line in lines], "")
                text = f"{host}: {ended}" + (f": {last[-1]}" if last else "")
                # srun: error: n2: task 1: Killed
                cause = Cause.RANK_KILLED if ended.startswith("Killed") else Cause.OTHER
                return Trouble(text, host, cause)
        # srun: error: Unable to create step for job 12: Requested nodes are busy
        others = [
            text.removeprefix("srun: error: ")
            for text in errors
            if text.startswith("srun: error: ")
        ]
        return Trouble(others[0]) if others else None

    def end(self, allocation: Allocation) -> float | None:
        job = str(allocation.number)
        return end_of(shown_job(job), job_seconds(f"SLURM_JOB_ID={job}"))

    def warn(self, allocation: Allocation) -> None:
        # As --signal=USR1 does: to all processes of the steps, and not to the batch script.
        status, _, said = answer("scancel", "--signal=USR1", allocation.job)
        if status != 0:
            raise Refusal(f"scancel: {said}")

    def requeue(self, allocation: Allocation, saved: bool) -> str | None:
        try:
            # Slurm may have replaced a node that was cut off: a requeue from the old node would
            # end the job that trains on the new one.
            shown = shown_job(str(allocation.number), REQUEUING)
            if int(field(shown, "Restarts")) != allocation.restarts:
                return "Slurm has restarted it on other nodes"
            scontrol("requeue", allocation.job, patience=REQUEUING)
        except Refusal as refusal:
            return str(refusal)
        return None

    def resources(self, size: Size) -> dict[str, int | str]:
        """Source: https://snakemake.github.io/snakemake-plugin-catalog/plugins/executor/slurm.html"""
        # The key `mpi` makes Snakemake run the rule in the batch step rather than inside a step of
        # one node. On one node the plugin refuses a name, but the empty one has the same effect.
        mpi = {"mpi": "srun" if size.nodes > 1 else ""} if size.launches else {}
        return {
            "nodes": size.nodes,
            "tasks": size.nodes,
            **mpi,
            "cpus_per_task": size.cpus,
            "gres": f"gpu:{size.gpus}" if size.gpus else "",
            # Otherwise the plugin asks for tasks per GPU.
            "tasks_per_gpu": 0,
            "mem_mb": size.memory,
        }

    def idle_nodes(self, environment: Mapping[str, str]) -> str | None:
        nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or ""
        if not nodes.isdecimal() or int(nodes) < 2:
            return None
        return (
            f"this Slurm job has {nodes} nodes, and profiles/local uses only this one; leave the "
            "job and run `snakemake --profile profiles/slurm` on the login node, which submits "
            "jobs itself"
        )

    def unended(self, jobs: Sequence[str]) -> dict[str, bool] | None:
        found = listed(jobs)
        others = [] if found is None else [job for job in jobs if job not in found]
        # The resource `clusters` may have sent these to another one.
        if others and "slurmdbd" in answer("scontrol", "show", "config")[1]:
            elsewhere = listed(others, "--clusters=all")
            # What the local one has said stands without the others.
            found = (found or {}) | (elsewhere or {}) or elsewhere
        return None if found is None else {job: found[job] for job in jobs if job in found}

    def watch(self, workflow: Any, tell_state: TellState, tell: Callable[[str], None]) -> Watch:
        # Imported here: launch needs none of it.
        from manynodes.schedulers.slurm.submission import follow

        return follow(workflow, tell_state, lambda line: tell(f"slurm: {line}"))


def name_of(job: str, shown: str) -> str:
    """The name by which scancel and scontrol take the job alone: one job of an array has the
    array's own number, with which they mean all of its jobs.
    """
    found = re.search(r"\bArrayJobId=(\d+) ArrayTaskId=(\d+)\s", shown)
    return f"{found[1]}_{found[2]}" if found else job


def refuse_tasks_of_srun() -> None:
    """Refuse to be one of several tasks, each of which would start the program.

    Raises:
        Refusal: srun has started this process several times.
    """
    given = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    number = os.environ.get("SLURM_PROCID", "0")
    tasks = int(given) if given.isdecimal() else 1
    # Of `srun --pty bash` only the first task has a terminal, and the others end. A batch script
    # has the variable if it was submitted in a step.
    shell = "SLURM_PTY_PORT" in os.environ and number == "0"
    if tasks > 1 and not (shell or step_here() in ("batch", "interactive")):
        raise Refusal(
            f"launch was started by srun as task {number} of {tasks}; start it once, without srun"
        )


def step_here() -> str:
    """The step of which this process is part, by the name that Slurm gives to what watches over it;
    empty if that is not seen here, as in a container.
    """
    with suppress(OSError):
        for pid in with_ancestors(os.getpid()):
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
            if found := re.match(rb"slurmstepd: \[\d+\.(\w+)", name):
                return found[1].decode()
    return ""


def listed(jobs: Sequence[str], *options: str) -> dict[str, bool] | None:
    """Those of our jobs that are in the queue, with whether they run; None if a controller does not
    answer.
    """
    asked = ["squeue", "--array", f"--jobs={','.join(jobs)}", "--format=%i|%T|%U|%Z", *options]
    status, out, said = answer(*asked)
    # A header distinguishes an answer without jobs from none, but for jobs that it has forgotten.
    failed = status and not all(map(ENDED.search, said.splitlines()))
    if failed or not (out or ENDED.search(said)):
        return None
    rows = [line.split("|", 3) for line in out.splitlines() if line.count("|") >= 3]
    return {
        number: state == "RUNNING"
        for number, state, user, folder in rows
        if state != "COMPLETING" and user == str(os.getuid()) and is_this_folder(folder)
    }


def end_of(shown: str, running: float) -> float | None:
    """When the job's time is up, see `end_here`; None if it has no limit.

    Args:
        shown: by scontrol, in UTC.
    """
    found = re.search(r"\bStartTime=(\d\S+) EndTime=(\d\S+)", shown)
    if not found:
        return None
    times = [datetime.fromisoformat(each).replace(tzinfo=UTC) for each in found.groups()]
    start, end = (each.timestamp() for each in times)
    return end_here(start, end, running)


def addresses_of(listed: str, hosts: Sequence[str]) -> tuple[str, ...]:
    try:
        shown = scontrol("show", "node", listed, "--oneliner", patience=PATIENCE)
        nodes = {field(line, "NodeName"): line for line in shown.splitlines()}
        return tuple(field(nodes[host], "NodeAddr") for host in hosts)
    except (Refusal, KeyError):
        # Some sites do not show nodes to users.
        return tuple(hosts)


def forget_step_options() -> None:
    """Remove the variables that srun would take for options of the new step.

    A Snakemake job has removed them already. In an interactive shell of one CPU, all ranks would
    share that CPU.
    """
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SRUN_", "SBATCH_"))]:
        if not KEPT.fullmatch(name):
            del os.environ[name]


def srun_command(step: Step) -> tuple[str, ...]:
    """One job step over all nodes of the job.

    Every option is given: inside a Snakemake job the variables are gone from which srun would
    take them, and since Slurm 22.05 it takes --cpus-per-task from nowhere else.
    """
    options: dict[str, object] = {
        "nodes": len(step.nodes),
        "ntasks": len(step.nodes) * step.tasks,
        "ntasks-per-node": step.tasks,
        "cpus-per-task": step.cpus,
        # Tasks in the order of the nodes: node ranks are the same in every attempt.
        "distribution": "block",
        "kill-on-bad-exit": 1,
        # Overrides a site's own value, which ends tasks some time after the first one is done.
        "wait": 0,
        "label": None,
        # Ranks find each other by themselves.
        "mpi": "none",
        # Fail after 60 s if another step holds the job's resources.
        "immediate": 60,
        # The batch shell of the job holds no step of its own, but an interactive one does.
        "overlap": None,
    }
    if step.gpus:
        options["gres"] = f"gpu:{step.gpus}"
    return (
        "srun",
        *as_options(options),
        *step.dispatch,
        "--node",
        "$SLURM_NODEID",
    )
