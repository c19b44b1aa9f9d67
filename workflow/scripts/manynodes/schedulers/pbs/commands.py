"""Asking PBS through its own commands."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from manynodes.base.errors import Refusal
from manynodes.schedulers.base import Unanswered, until_answered

# Statuses of qstat with which it still tells what it knows: some jobs are unknown, or finished.
PARTIAL = (35, 153)
# Between the attributes of a job: a character that no attribute has.
SEPARATOR = "\x1f"
TIMEOUT = 60  # seconds for one answer
# Seconds that a job which has just started waits for the server.
PATIENCE = 300
# A job's id on a line of its own: `12.server`, `12[].server`.
JOB_ID = re.compile(r"^\d+(?:\[\])?\.[\w.-]+$", re.MULTILINE)
# What qsub says when a limit on the jobs of a user, group, project or queue is reached. Not of a
# limit on a resource: a single job may ask for more than that, and would never pass.
FULL = re.compile(r"Maximum number of jobs\b|'s per-(?:user|group|project) limit(?! on resource)")


class Full(Unanswered):
    """The server takes no more jobs until others have ended, in qsub's words."""


def path_of(name: str) -> str:
    """A command of PBS; sites often leave its folder off the PATH of their nodes."""
    if found := shutil.which(name):
        return found
    try:
        lines = Path(os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf")).read_text().splitlines()
    except OSError:
        return name
    tree = dict(line.partition("=")[::2] for line in lines).get("PBS_EXEC", "/opt/pbs")
    return str(Path(tree.strip(), "bin", name))


def run_pbs(*command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of PBS.

    Raises:
        Refusal: it is not on PATH.
        Unanswered: it does not end, or cannot be started now.
    """
    try:
        return subprocess.run(
            [path_of(command[0]), *command[1:]],
            input=stdin, env=os.environ | ({"TZ": "UTC"} if command[0] == "qstat" else {}),
            capture_output=True, text=True,
            # Ctrl-C in a terminal must not end qsub after the server has taken the job.
            start_new_session=True,
            errors="replace", timeout=TIMEOUT, check=False,
        )  # fmt: skip
    except (FileNotFoundError, PermissionError):
        raise Refusal(
            f"{command[0]}, PBS's own command, is not on PATH here; go to where it is, or use "
            "profiles/local"
        ) from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command[0]}: no answer within {TIMEOUT} s") from None
    except OSError as error:
        # Such as too many processes on the login node; the jobs run elsewhere.
        raise Unanswered(f"{command[0]}: {error.strerror}") from None


def shown_jobs(jobs: Sequence[str]) -> dict[str, dict[str, str]]:
    """The jobs that PBS knows, with their attributes; finished ones only if it keeps a history.

    One query for all jobs. Without a history, `qstat -x` shows no jobs at all (measured): then a
    second one for those that have not ended.

    Raises:
        Unanswered: the server did not answer.
        Refusal: there is no qstat here.
    """
    found = qstat("-x", *jobs)
    missing = [job for job in jobs if job not in found]
    return found | qstat(*missing) if missing else found


def qstat(*arguments: str) -> dict[str, dict[str, str]]:
    # Not as JSON: of several jobs, qstat 23.06.06 shows only the first one in it (measured).
    done = run_pbs("qstat", "-f", "-F", "dsv", "-D", SEPARATOR, *arguments)
    if done.returncode not in (0, *PARTIAL):
        raise Unanswered(error_of(done))
    return parse_jobs(done.stdout)


def parse_jobs(text: str) -> dict[str, dict[str, str]]:
    """The attributes of each job in the output of `qstat -f -F dsv`, one job a line."""
    found: dict[str, dict[str, str]] = {}
    for record in re.split(r"^(?=Job Id: )", text, flags=re.MULTILINE):
        name, *fields = record.split(SEPARATOR)
        if name.startswith("Job Id: "):
            pairs = (field.partition("=") for field in fields)
            found[name.removeprefix("Job Id: ").strip()] = {
                key.strip(): value.strip() for key, _, value in pairs
            }
    return found


def shown_job(job: str) -> dict[str, str]:
    """One job.

    Raises:
        Refusal: PBS does not know it, or the server did not answer in time.
    """
    who, remedy = "pbs: the server", "try again once qstat answers"
    found = until_answered(partial(shown_jobs, [job]), PATIENCE, who, remedy)
    if job in found:
        return found[job]
    # A server that is not the default one adds its name to the id.
    for name, attributes in found.items():
        if name.partition(".")[0] == job.partition(".")[0]:
            return attributes
    raise Refusal(f"PBS does not know job {job}; has it ended?")


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The words of a PBS command that failed, in one line: `qsub: Unknown queue`."""
    said = " ".join(done.stderr.split())
    return said or f"{Path(done.args[0]).name} ended with status {done.returncode}"
