"""What Slurm tells: the nodes of the job that we are in, and which of its commands can say how jobs are doing."""

import getpass
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from ddp.errors import Refusal

# sbatch's words for jobs that no change of the cluster's state makes acceptable.
NEVER_ACCEPTED = re.compile(r"nvalid|unrecognized|not permitted|ermission denied|policy|More processors requested")
# scontrol's words for a controller that is down, restarting or overloaded.
UNREACHABLE = re.compile(r"Unable to contact|onnection|timed out|Zero Bytes|try again", re.IGNORECASE)
# Seconds that a job which has just started waits for the controller.
PATIENCE = 300


@dataclass(frozen=True)
class Allocation:
    """A running job's nodes.

    Attributes:
        job: its id.
        hosts: names of the nodes, in Slurm's order, which is that of the tasks of a job step.
        addresses: where Slurm itself reaches them: a name or an IP address.
        end: when its time is up, in seconds since the epoch; None if never.
        restarts: how often Slurm has started it again.
    """

    job: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    end: float | None
    restarts: int


def allocation() -> Allocation:
    """The job that this process is part of, asked from Slurm: inside a Snakemake job, $SLURM_JOB_NODELIST is gone.

    Raises:
        Refusal: this is no Slurm job, or Slurm does not answer.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise Refusal("transport srun works inside a Slurm job; submit it with --profile profiles/slurm, or use transport local")
    own = shown_job(job, PATIENCE)
    listed = field(own, "NodeList")
    ends = re.search(r" EndTime=(\d\S+)", own)
    hosts = tuple(scontrol("show", "hostnames", listed).split())
    try:
        shown = scontrol("show", "node", listed, "--oneliner", patience=PATIENCE)
        nodes = {field(line, "NodeName"): line for line in shown.splitlines()}
        addresses = tuple(field(nodes[host], "NodeAddr") for host in hosts)
    except (Refusal, KeyError):
        # Some sites do not show nodes to users.
        addresses = hosts
    end = datetime.fromisoformat(ends[1]).timestamp() if ends else None
    return Allocation(int(job), hosts, addresses, end, int(field(own, "Restarts")))


def shown_job(job: object, patience: float = 0) -> str:
    # Of a job array, all jobs are shown, one a line.
    shown = scontrol("show", "job", str(job), "--oneliner", patience=patience).splitlines()
    return next((line for line in shown if line.startswith(f"JobId={job} ")), "")


def idle_nodes(environment: Mapping[str, str]) -> str | None:
    """A warning if this is a job on several nodes, of which a Snakemake that runs everything on this machine leaves all but one idle."""
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or ""
    if nodes.isdecimal() and int(nodes) > 1:
        return (
            f"this Slurm job has {nodes} nodes, and profiles/local uses only this one; "
            "leave the job and run `snakemake --profile profiles/slurm` on the login node, which submits jobs itself"
        )
    try:
        hosts = set(Path(environment["PBS_NODEFILE"]).read_text().split())
    except (KeyError, OSError):
        return None
    return (
        f"this PBS job has {len(hosts)} nodes, and profiles/local uses only this one; there is no profile for PBS yet"
        if len(hosts) > 1
        else None
    )


def queue_again(allocation: Allocation) -> str | None:
    """Have Slurm end this job, queue it again under the same id, and start it anew when its turn comes.

    Returns:
        Why it does not; None if it does, and ends what runs of the job.
    """
    try:
        # From a node that was cut off, and for which Slurm has put others in place, this would end what trains there.
        if int(field(shown_job(allocation.job), "Restarts")) != allocation.restarts:
            return "it has been started elsewhere meanwhile"
        scontrol("requeue", str(allocation.job))
    except Refusal as refusal:
        return str(refusal)
    return None


def only_the_job() -> None:
    """Forget what Slurm told a shell or a step that we were started in: srun would take it for options of the step that it makes.

    In a Snakemake job it is gone already. In an interactive one, a shell of one CPU would have all ranks share that CPU.
    """
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SRUN_", "SBATCH_"))]:
        if name not in ("SLURM_JOB_ID", "SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_TMPDIR"):
            del os.environ[name]


def status_command(wanted: str | None) -> tuple[str, str]:
    """The command by which Snakemake is to ask how its jobs are doing, and a line that says why.

    Where accounting is off, asking `sacct` waits for an answer for ever; without `sacct`, `squeue` forgets jobs that have ended.

    Args:
        wanted: `sacct` or `squeue`, as Snakemake would have it.

    Raises:
        Refusal: Slurm's controller does not answer.
    """
    config = scontrol("show", "config")
    if wanted != "squeue":
        try:
            done = subprocess.run(["sacct", "-X", "--noheader"], capture_output=True, text=True, timeout=20, check=False)
            if done.returncode == 0:
                return "sacct", "accounting works; the state of jobs is asked from sacct"
            reason = " ".join(done.stderr.split()) or f"sacct ended with status {done.returncode}"
        except FileNotFoundError:
            reason = "there is no sacct here"
        except subprocess.TimeoutExpired:
            reason = "sacct did not answer within 20 s"
    else:
        reason = "as the profile says"
    found = re.search(r"MinJobAge\s*=\s*(\d+)", config)
    forgets = f", which forgets a job {found[1]} s after its end" if found else ""
    return "squeue", f"{reason}; the state of jobs is asked from squeue{forgets}"


@dataclass(frozen=True)
class Partition:
    """The largest job that a partition can ever run.

    Attributes:
        nodes: number of its nodes, in whatever state.
        cpus, memory: of its largest node, memory in MB.
        minutes: its time limit; None if it has none.
    """

    name: str
    nodes: int
    cpus: int
    memory: int
    minutes: int | None


def partitions() -> dict[str, Partition]:
    """All partitions by name, as sinfo lists them; empty if it does not answer."""
    rows = [line.split("|") for line in said("sinfo", "--noheader", "--Node", "--format=%R|%c|%m|%l|%N")[0].splitlines()]
    found: dict[str, Partition] = {}
    for name, cpus, memory, limit, _node in (row for row in rows if len(row) == 5):
        so_far = found.get(name, Partition(name, 0, 0, 0, None))
        found[name] = Partition(name, so_far.nodes + 1, max(so_far.cpus, int(cpus)), max(so_far.memory, int(memory)), minutes(limit))
    return found


def minutes(limit: str) -> int | None:
    """Slurm's [days-]hours:minutes:seconds in minutes; None for `infinite` and anything else."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if not found:
        return None
    days, hours, mins, _seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + mins


def refuse_too_large(resources: Mapping[str, Any], partition: Partition) -> None:
    """Refuse a job that the partition can never run: Slurm may accept it and leave it pending for ever.

    Raises:
        Refusal: naming the resource, what is asked for, and the limit.
    """
    limits = {
        "runtime": (partition.minutes, f"{{asked}} minutes are asked for, {partition.name} allows {{limit}}"),
        "nodes": (partition.nodes, f"{{asked}} nodes are asked for, {partition.name} has {{limit}}"),
        "cpus_per_task": (partition.cpus, f"{{asked}} CPUs a node are asked for, the largest node of {partition.name} has {{limit}}"),
        "mem_mb": (partition.memory, f"{{asked}} MB a node are asked for, the largest node of {partition.name} has {{limit}}"),
    }
    remedies = {
        "runtime": "stage and train are one job, their times are added: --set-resources train:runtime=…",
        "nodes": "set nodes in the configuration, or another slurm_partition",
        "cpus_per_task": "lower nproc_per_node or cpus_per_proc in the configuration",
        "mem_mb": "--set-resources train:mem_mb=… stage:mem_mb=…",
    }
    for name, (limit, text) in limits.items():
        asked = resources.get(name)
        if limit is not None and isinstance(asked, int) and asked > limit:
            raise Refusal(f"{name}: {text.format(asked=asked, limit=limit)}; {remedies[name]}")


def refuse_foreign_account(account: str) -> None:
    """Refuse an account that is not the user's: Snakemake waits for ever for a job with one (seen with plugin 2.8.0).

    Raises:
        Refusal: naming the user's accounts.
    """
    # Asked only where one is given: without slurmdbd, sacctmgr waits for its 30 s time-out.
    known = own_accounts() if account else []
    if known and not {name.lower() for name in re.split(r"[,\s]+", account)} <= {name.lower() for name in known}:
        raise Refusal(f"slurm_account: {account} is not yours; yours are {', '.join(sorted(set(known)))}")


def try_submission(options: Sequence[str]) -> str | None:
    """Have Slurm judge a submission without submitting it: Snakemake hides why a job of several rules was refused.

    Args:
        options: of sbatch.

    Returns:
        Slurm's objection, if it may pass, such as nodes out of service; None if there is none.

    Raises:
        Refusal: the job would never be accepted.
    """
    _, error = said("sbatch", "--test-only", *options, "--wrap=true")
    reason = " ".join(error.replace("sbatch: error:", " ").replace("sbatch:", " ").split()).removeprefix("allocation failure: ")
    if NEVER_ACCEPTED.search(reason):
        raise Refusal(f"sbatch would refuse a job with {' '.join(options)}: {reason}")
    return None if " to start at " in reason or not reason else f"sbatch says of a job with {' '.join(options)}: {reason}"


@cache
def own_accounts() -> list[str]:
    return said("sacctmgr", "--noheader", "-s", "list", "user", getpass.getuser(), "format=account%256")[0].split()


def said(*command: str) -> tuple[str, str]:
    """What a command of Slurm's writes to stdout and to stderr; nothing if it is not there or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return "", ""
    return done.stdout, done.stderr


def field(line: str, name: str) -> str:
    """A field of what scontrol shows on one line; a job's BatchHost and ReqNodeList are other fields than its NodeList."""
    found = re.search(rf"(?:^|\s){name}=(\S+)", line)
    if not found:
        raise Refusal(f"scontrol shows no {name}; is the job still running?")
    return found[1]


def scontrol(*arguments: str, patience: float = 0) -> str:
    """What scontrol prints.

    Args:
        patience: seconds to keep trying while the controller cannot be reached.

    Raises:
        Refusal: scontrol is missing or fails, or the controller did not answer in time.
    """
    deadline = time.monotonic() + patience
    told = False
    while True:
        try:
            # A user may have times shown in another form.
            done = subprocess.run(["scontrol", *arguments], env=os.environ | {"SLURM_TIME_FORMAT": "standard"},
                                  capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
            if not done.returncode:
                return done.stdout
            error = " ".join(done.stderr.split())
        except FileNotFoundError:
            raise Refusal("scontrol, Slurm's own command, is not on PATH here; go to where it is, or use profiles/local") from None
        except subprocess.TimeoutExpired:
            error = "Unable to contact slurm controller: no answer within 60 s"
        if not UNREACHABLE.search(error):
            raise Refusal(f"scontrol {' '.join(arguments)}: {error}")
        if time.monotonic() >= deadline:
            raise Refusal(f"Slurm's controller does not answer ({error}); try again once sinfo does")
        if not told:
            print(f"slurm: the controller does not answer; trying again for {patience:.0f} s", file=sys.stderr, flush=True)
            told = True
        time.sleep(5)
