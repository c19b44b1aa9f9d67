"""Asking Slurm through its own commands."""

import errno
import os
import re
import signal
import subprocess
from functools import partial

from manynodes.base.errors import Refusal
from manynodes.schedulers.base import Unanswered, until_answered

# scontrol's words for a controller that is down, restarting or overloaded.
UNREACHABLE = re.compile(
    r"Unable to contact|onnection|timed out|Zero Bytes|try again|Unexpected message|standby|"
    r"authentication error|endpoint|temporarily unavailable|no answer within",
    re.IGNORECASE,
)
# Why a command cannot be started, later neither; a node may have too many processes for now.
FOR_GOOD = (errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR)
# What scancel and squeue say of a job that has ended.
ENDED = re.compile(r"already|nvalid job id")


def scontrol(*arguments: str, patience: float = 0) -> str:
    """What scontrol prints.

    Args:
        patience: seconds to retry while the controller cannot be reached.

    Raises:
        Refusal: scontrol is missing or fails, or the controller did not answer in time.
    """
    who, remedy = "slurm: the controller", "try again once sinfo does"
    return until_answered(partial(ask_scontrol, *arguments), patience, who, remedy)


def ask_scontrol(*arguments: str) -> str:
    """What scontrol prints.

    Raises:
        Refusal: it is missing, or fails.
        Unanswered: the controller does not answer, or scontrol cannot be started now.
    """
    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            # An hour of local time may come twice.
            env=os.environ | {"TZ": "UTC"}, capture_output=True, text=True, errors="replace",
            # Slurm sends SIGTERM to every process of a job that it requeues, `scontrol requeue`
            # among them.
            preexec_fn=partial(signal.signal, signal.SIGTERM, signal.SIG_IGN),
            timeout=60, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise Refusal(
            "scontrol, Slurm's own command, is not on PATH here; "
            "go to where it is, or use profiles/local"
        ) from None
    except OSError as failed:
        if failed.errno in FOR_GOOD:
            raise Refusal(f"scontrol: {failed.strerror}") from None
        raise Unanswered(f"scontrol: {failed.strerror}") from None
    except subprocess.TimeoutExpired:
        error = "Unable to contact slurm controller: no answer within 60 s"
    else:
        if not done.returncode:
            return done.stdout
        error = " ".join(done.stderr.split())
    if UNREACHABLE.search(error):
        raise Unanswered(f"Slurm's controller does not answer ({error})")
    raise Refusal(f"scontrol {' '.join(arguments)}: {error}")


def shown_job(job: str, patience: float = 0) -> str:
    """A job as scontrol shows it, on one line.

    Raises:
        Refusal: as `scontrol`.
    """
    # For a job array, scontrol shows all of its jobs, one a line.
    lines = scontrol("show", "job", job, "--oneliner", patience=patience).splitlines()
    return next((line for line in lines if line.startswith(f"JobId={job} ")), "")


def field(line: str, name: str) -> str:
    """A field of what scontrol shows on one line.

    Raises:
        Refusal: it has no such field.
    """
    # A job's BatchHost and ReqNodeList are other fields than its NodeList.
    found = re.search(rf"(?:^|\s){name}=(\S+)", line)
    if not found:
        raise Refusal(f"scontrol shows no {name}; is the job still running?")
    return found[1]


def answer(*command: str, patience: float = 30) -> tuple[int | None, str, str]:
    """The exit status of a command of Slurm's, and what it writes to stdout and stderr; None,
    nothing and why, if it is missing or gives no answer in so many seconds.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return None, "", f"no answer within {patience} s"
    except OSError as error:
        return None, "", str(error.strerror)
    return done.returncode, done.stdout, done.stderr
