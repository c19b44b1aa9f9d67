"""What Slurm tells: the nodes of the job that we are in, and which of its commands can say how jobs are doing."""

import os
import re
import subprocess
from dataclasses import dataclass

from ddp.errors import Refusal


@dataclass(frozen=True)
class Allocation:
    """A running job's nodes.

    Attributes:
        job: its id.
        hosts: names of the nodes, in Slurm's order, which is that of the tasks of a job step.
        addresses: where Slurm itself reaches them: a name or an IP address.
    """

    job: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]


def allocation() -> Allocation:
    """The job that this process is part of, asked from Slurm: inside a Snakemake job, $SLURM_JOB_NODELIST is gone.

    Raises:
        Refusal: this is no Slurm job, or Slurm does not answer.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise Refusal("transport srun works inside a Slurm job; submit it with --profile profiles/slurm, or use transport local")
    listed = field(scontrol("show", "job", job, "--oneliner"), "NodeList")
    hosts = tuple(scontrol("show", "hostnames", listed).split())
    shown = scontrol("show", "node", listed, "--oneliner").splitlines()
    address = {field(line, "NodeName"): field(line, "NodeAddr") for line in shown}
    return Allocation(int(job), hosts, tuple(address[host] for host in hosts))


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
    age = field(config.replace(" = ", "="), "MinJobAge")
    return "squeue", f"{reason}; the state of jobs is asked from squeue, which forgets a job {age} s after its end"


def field(line: str, name: str) -> str:
    """A field of what scontrol shows on one line; a job's BatchHost and ReqNodeList are other fields than its NodeList."""
    found = re.search(rf"(?:^|\s){name}=(\S+)", line)
    if not found:
        raise Refusal(f"scontrol shows no {name}; is the job still running?")
    return found[1]


def scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise Refusal("scontrol, Slurm's own command, is not on PATH on this node; transport srun needs it") from None
    except subprocess.TimeoutExpired:
        raise Refusal("Slurm's controller does not answer; try again once sinfo does") from None
    if done.returncode:
        raise Refusal(f"scontrol {' '.join(arguments)}: {' '.join(done.stderr.split())}")
    return done.stdout
