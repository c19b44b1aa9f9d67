"""What Slurm tells: the nodes of the job that we are in, and which of its commands can say how jobs are doing."""

import getpass
import os
import re
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from ddp.errors import Refusal

# How the Slurm plugin of Snakemake asks: by a command, with a logger; the states by job and the seconds it took, or twice None.
Query = Callable[[str, Any], Awaitable[tuple[dict[str, str] | None, float | None]]]


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
    own = shown_job(job)
    listed = field(own, "NodeList")
    ends = re.search(r" EndTime=(\d\S+)", own)
    hosts = tuple(scontrol("show", "hostnames", listed).split())
    try:
        nodes = {field(line, "NodeName"): line for line in scontrol("show", "node", listed, "--oneliner").splitlines()}
        addresses = tuple(field(nodes[host], "NodeAddr") for host in hosts)
    except (Refusal, KeyError):
        # Some sites do not show nodes to users.
        addresses = hosts
    end = datetime.fromisoformat(ends[1]).timestamp() if ends else None
    return Allocation(int(job), hosts, addresses, end, int(field(own, "Restarts")))


def shown_job(job: object) -> str:
    # Of a job array, all jobs are shown, one a line.
    shown = scontrol("show", "job", str(job), "--oneliner").splitlines()
    return next((line for line in shown if line.startswith(f"JobId={job} ")), "")


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


def asked_for(resources: Mapping[str, Any]) -> tuple[str, ...]:
    """A job's resources as options of sbatch: those that a site can find wrong."""
    options = {
        "slurm_partition": "partition",
        "slurm_account": "account",
        "qos": "qos",
        "constraint": "constraint",
        "nodes": "nodes",
        "cpus_per_task": "cpus-per-task",
        "mem_mb": "mem",
        "runtime": "time",
        "gres": "gres",
    }
    return tuple(f"--{option}={resources.get(name)}" for name, option in options.items() if resources.get(name))


def try_submission(options: Sequence[str]) -> str | None:
    """Have Slurm look at what a job will ask for, without submitting it.

    Snakemake does not show why a job of several rules could not be submitted, and waits for ever for one whose account is not the
    user's (both seen with version 2.8.0 of its plugin).

    Returns:
        What Slurm says against it that may pass, such as nodes out of service; None if nothing.

    Raises:
        Refusal: it will never be accepted.
    """
    account = next((option.removeprefix("--account=") for option in options if option.startswith("--account=")), "")
    # Asked only where one is given: without accounting the answer takes half a minute not to come.
    known = own_accounts() if account else []
    if known and not {name.lower() for name in re.split(r"[,\s]+", account)} <= {name.lower() for name in known}:
        raise Refusal(f"slurm_account: {account} is not yours; yours are {', '.join(sorted(set(known)))}")
    # Several accounts are the plugin's affair: it tries one after the other.
    single = [option for option in options if not re.match("--account=.*[, ]", option)]
    _, error = said("sbatch", "--test-only", *single, "--wrap=true")
    reason = " ".join(error.split()).removeprefix("allocation failure: ")
    if "nvalid" in reason:
        raise Refusal(f"sbatch would not take a job with {' '.join(options)}: {reason}")
    return None if " to start at " in reason or not reason else f"of a job with {' '.join(options)} sbatch says: {reason}"


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


def with_plain_states(query: Query) -> Query:
    """The Slurm plugin's query for the state of jobs, with words that it knows what to make of.

    sacct says `CANCELLED by 1000` of a job that somebody cancelled, and goes on to say `PREEMPTED` of one that had to make way, or
    `NODE_FAIL` of one whose node died, that is not queued again. The plugin takes none of them for an end, and Snakemake waits for such a
    job for ever (the first measured, the others read, in version 2.8.0). At `NODE_FAIL` it also keeps all later jobs off what sacct names
    as the node, which is all the nodes that the job had, or `None assigned` if it is queued again already: then no job can be submitted any
    more (measured; https://github.com/snakemake/snakemake-executor-plugin-slurm/issues/485). Slurm itself gives nobody a dead node.
    """
    ended: Counter[str] = Counter()

    def plainly(job: str, state: str) -> str:
        word = state.split()[0]
        ended[job] = ended[job] + 1 if word in ("PREEMPTED", "NODE_FAIL") else 0
        # One that is queued again says so within seconds.
        if ended[job] >= 3:
            return "CANCELLED"
        return "PENDING" if word == "NODE_FAIL" else word

    async def plain(command: str, logger: Any) -> tuple[dict[str, str] | None, float | None]:
        states, seconds = await query(command, logger)
        return states and {job: plainly(job, state) for job, state in states.items() if state}, seconds

    return plain


def field(line: str, name: str) -> str:
    """A field of what scontrol shows on one line; a job's BatchHost and ReqNodeList are other fields than its NodeList."""
    found = re.search(rf"(?:^|\s){name}=(\S+)", line)
    if not found:
        raise Refusal(f"scontrol shows no {name}; is the job still running?")
    return found[1]


def scontrol(*arguments: str) -> str:
    try:
        # A user may have times shown in another form.
        done = subprocess.run(["scontrol", *arguments], env=os.environ | {"SLURM_TIME_FORMAT": "standard"},
                              capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    except FileNotFoundError:
        raise Refusal("scontrol, Slurm's own command, is not on PATH here; go to where it is, or use profiles/local") from None
    except subprocess.TimeoutExpired:
        raise Refusal("Slurm's controller does not answer; try again once sinfo does") from None
    if done.returncode:
        raise Refusal(f"scontrol {' '.join(arguments)}: {' '.join(done.stderr.split())}")
    return done.stdout
