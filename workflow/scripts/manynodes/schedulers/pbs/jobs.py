"""The submitted jobs of one Snakemake command: qsub, one qstat for all of them, qdel; and the try
of each submission before the first job.
"""

import asyncio
import os
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manynodes.base.errors import Refusal, one_line
from manynodes.base.modules import FIND_MODULE
from manynodes.base.processes import ignore_interrupts
from manynodes.schedulers.base import TellState, Unanswered, Watch, jobs_to_submit
from manynodes.schedulers.pbs.commands import (
    FULL,
    JOB_ID,
    Full,
    error_of,
    run_pbs,
    shown_jobs,
)
from manynodes.schedulers.pbs.requests import options
from manynodes.schedulers.pbs.scheduler import AGAIN, FIRST, NOT_SAVED, SAVED
from manynodes.schedulers.pbs.states import State, state_of

# Everything about a job: its script, PBS's log, its exit status. Seen by all nodes.
FOLDER = Path(".snakemake/pbs")
# Seconds after which a job that PBS no longer knows has ended: a server that was restarted, or
# that keeps no history, and a network file system on which its status appears late.
FORGOTTEN = 90
# Job names of more characters are refused by older servers.
LONGEST_NAME = 15
# How often in a row a job is submitted again that has saved nothing new.
MOST_AGAIN = 3
# Polls in a row at which PBS must say that a job can never run: a server that has just started may
# not know its nodes yet.
NEVER = 2
# Of a job that has run and left no log.
UNREACHED = (
    "it did not reach its script: does a start file of your shell (~/.bash_profile) end it on the "
    "node?"
)
# Seconds to wait for a server that does not answer or takes no more jobs while a job is submitted,
# and in all while jobs are deleted.
PAUSE, DELETING = 10, 60


@dataclass
class Job:
    """A submitted job.

    Attributes:
        info: Snakemake's.
        base: path of its files without their suffixes: .sh, .log, .status, .again.
        options: of qsub.
        id: PBS's; another one after each new submission.
        first: the id before the first of these; empty if there was none.
        shown: what was last said of it.
        unknown_since: when PBS first did not know it.
        never: at how many polls in a row it could never run.
        again: how often in a row it was submitted again without having saved anything new.
        unanswered: whether it may have been submitted by a qsub that was not answered.
    """

    info: Any
    base: Path
    options: list[str]
    id: str = ""
    first: str = ""
    shown: str = ""
    unknown_since: float | None = None
    never: int = 0
    again: int = 0
    unanswered: bool = False

    def file(self, suffix: str) -> Path:
        return self.base.with_name(self.base.name + suffix)


@dataclass
class Jobs(Watch):
    """The jobs that are not known to have ended.

    Attributes:
        request: form of the resource request, see `requests.options`.
        init: shell commands at the start of every job.
        tell_state, tell: as in `Scheduler.watch`.
    """

    request: str
    init: str
    tell: Callable[[str], None] = print
    tell_state: TellState = lambda _job, _id, _state, _waits: None

    def __post_init__(self) -> None:
        super().__init__()
        self.known: dict[int, Job] = {}
        self.lock = threading.Lock()
        self.silent_since: float | None = None
        self.limits: set[str] = set()
        self.cancelled = False

    def submit(self, info: Any, name: str, command: str) -> str | None:
        """Submit a Snakemake job; waits while PBS does not answer or takes no more jobs.

        Args:
            info: its external_jobid becomes PBS's id.
            command: that runs it, a line of shell.

        Returns:
            Why PBS refused it, in one line; None if it is in the queue.
        """
        try:
            FOLDER.mkdir(parents=True, exist_ok=True)
            # A new name each time: a network file system remembers for a while that a file of this
            # name was not there.
            token = secrets.token_hex(8)
            job = Job(info, FOLDER.absolute() / token, [
                "-N", job_name(f"{name[:9]}_{token}"), *options(info.job.resources, self.request),
                "-r", "y", "-j", "oe", "-W", "umask=077",
            ])  # fmt: skip
            job.file(".sh").write_text(script(command, self.init, job))
            while True:
                try:
                    # Ctrl-C waits for qsub's answer: a job whose number is not known would stay.
                    with ThreadPoolExecutor(1) as pool:
                        pool.submit(self.queue, job).result()
                    break
                except Unanswered as error:
                    self.silent(error)
                    time.sleep(PAUSE)
        except (Refusal, OSError) as error:
            self.failures[info.job] = one_line(str(error))
            return self.failures[info.job]
        return None

    def queue(self, job: Job) -> None:
        """Give a job to qsub.

        Raises:
            Refusal: in qsub's words.
            Full: a limit on jobs is reached.
            Unanswered: PBS does not answer.
        """
        # A server that did not answer may have taken it all the same; its name is its own.
        done = run_pbs("qselect", "-N", job.options[1]) if job.unanswered else None
        if done and done.returncode:
            raise Unanswered(error_of(done))
        job.unanswered = True
        if not (done and done.stdout.strip()):
            # The script on stdin: qsub understands no path with a blank. It writes its own log.
            first = f"export {FIRST}={job.first}\n" if job.first else ""
            shebang, _, rest = job.file(".sh").read_text().partition("\n")
            whole = f"{shebang}\n{first}{rest}"
            done = run_pbs("qsub", *job.options, "-o", "/dev/null", stdin=whole)
        # A site's own qsub may say more, or fail after it has submitted the job.
        ids = JOB_ID.findall(done.stdout)
        if done.returncode and not ids and FULL.search(done.stderr):
            job.unanswered = False
            raise Full(error_of(done))
        if done.returncode and not ids and run_pbs("qstat", "-B").returncode:
            raise Unanswered(error_of(done))
        if done.returncode or len(ids) != 1:
            if ids and not delete(ids):
                self.tell(undeleted(ids))
            why = (
                error_of(done) if done.returncode else f"no job id in {one_line(done.stdout, 60)!r}"
            )
            raise Refusal(f"PBS refused the job: {why}; asked with "
                          f"qsub {shlex.join(job.options[2:-6])}")  # fmt: skip
        with self.lock:
            (job.id,), job.unanswered = ids, False
            job.info.external_jobid = job.id
            job.unknown_since, job.never, job.shown = None, 0, ""
            self.known[id(job.info)] = job
            late = self.cancelled
        # Also for the next command, if this one is killed before its first query.
        self.tell_state(job.info.job, job.id, "is submitted", True)
        if late:
            self.cancel()

    async def ended(self, active: Sequence[Any]) -> dict[int, bool]:
        """The jobs that have ended, by the identity of their info, each with whether it was good;
        of the others, `failures` and `logs` tell more.

        Args:
            active: infos of the jobs to ask for; Snakemake hears of the others at the next call.
        """
        with self.lock:
            jobs = {id(info): self.known[id(info)] for info in active if id(info) in self.known}
        if not jobs:
            return {}
        try:
            shown = await asyncio.to_thread(shown_jobs, [job.id for job in jobs.values()])
        except (Unanswered, Refusal) as error:
            self.silent(error)
            return {}
        if self.silent_since is not None:
            seconds = time.monotonic() - self.silent_since
            self.tell(f"job states again, after {seconds:.0f} s")
            self.silent_since = None
        found = {}
        for key, job in jobs.items():
            state = known_state(job, shown[job.id]) if job.id in shown else unknown(job)
            if state.ended and not state.good and await asyncio.to_thread(self.again, job, state):
                continue
            self.show(job, state)
            if state.ended:
                found[key] = self.end(job, state)
                with self.lock:
                    self.known.pop(key, None)
        return found

    def silent(self, error: Exception) -> None:
        """Say once that PBS does not answer, or which limit on jobs is reached."""
        if isinstance(error, Full):
            line = f"{one_line(str(error))}; jobs are submitted when others have ended"
            if line not in self.limits:
                self.limits.add(line)
                self.tell(line)
        elif self.silent_since is None:
            self.silent_since = time.monotonic()
            self.tell(f"no job states ({one_line(str(error))}); jobs are not affected; asking "
                      "again until PBS answers")  # fmt: skip

    def again(self, job: Job, state: State) -> bool:
        """Submit a job again whose launch has asked for it, or whose node was lost.

        Returns:
            Whether it continues, now or at the next poll.
        """
        try:
            asked = job.file(AGAIN_SUFFIX).read_text()
        except OSError:
            asked = NOT_SAVED if state.node_lost else ""
        count = 0 if asked == SAVED else job.again + 1
        if not asked or count > MOST_AGAIN or self.cancelled:
            return False
        before = job.id
        job.first = job.first or before
        try:
            self.queue(job)
        except Unanswered as error:
            self.silent(error)
            return True
        except (Refusal, OSError) as error:
            self.tell(f"job {before} cannot be submitted again: {one_line(str(error))}")
            return False
        # Not removed: on a network file system, a new file of this name could stay unseen.
        # A full disk would end the following of all jobs.
        for suffix in (".status", AGAIN_SUFFIX):
            with suppress(OSError):
                job.file(suffix).write_text("")
        job.again = count
        self.tell(f"job {before} {state.line}; it continues as job {job.id}")
        return True

    def show(self, job: Job, state: State) -> None:
        if state.line != job.shown and not state.good:
            job.shown = state.line
            self.tell_state(job.info.job, job.id, state.line, state.waits)

    def end(self, job: Job, state: State) -> bool:
        """Keep what is known of a job that has ended; returns whether it was good."""
        log = job.file(".log")
        reason = one_line(f"PBS job {job.id} {state.line}")
        if state.good and log.exists():
            for suffix in (".sh", ".log", ".status", AGAIN_SUFFIX):
                with suppress(OSError):
                    job.file(suffix).unlink(missing_ok=True)
            return True
        self.failures[job.info.job] = reason
        if state.good:
            # For when its results are missing.
            self.tell(reason)
            return True
        if state.never:
            delete([job.id])
        # A job that never ran has no log.
        self.logs[job.info.job] = str(log) if log.exists() else ""
        return False

    def cancel(self) -> None:
        """Delete all jobs from PBS; also those that are being submitted."""
        ignore_interrupts()
        with self.lock:
            self.cancelled = True
            ids = [job.id for job in self.known.values()]
        deadline = time.monotonic() + DELETING
        while ids and not delete(ids):
            if time.monotonic() > deadline:
                self.tell(undeleted(ids))
                return
            time.sleep(1)


def delete(jobs: Sequence[str]) -> bool:
    """Delete jobs, some of which may have ended; returns whether PBS has answered."""
    try:
        run_pbs("qdel", *jobs)
        return run_pbs("qstat", "-B").returncode == 0
    except (Unanswered, Refusal):
        return False


def undeleted(jobs: Sequence[str]) -> str:
    return f"PBS does not answer; when it does: qdel {' '.join(jobs)}"


def follow(workflow: Any, tell_state: TellState, tell: Callable[[str], None]) -> Jobs:
    """Try the submissions of a Snakemake command and follow its jobs, see `Scheduler.watch`."""
    jobs: Jobs = workflow.scheduler._executor.jobs
    jobs.tell_state, jobs.tell = tell_state, tell
    tried: set[tuple[str, ...]] = set()
    for job in jobs_to_submit(workflow.dag, ("pbs_queue", "pbs_project")):
        wanted = tuple(options(job.resources, jobs.request))
        if wanted not in tried:
            tried.add(wanted)
            try_whole(wanted, tell)
    return jobs


def try_whole(wanted: tuple[str, ...], tell: Callable[[str], None]) -> None:
    """Try a submission to its end: after Ctrl-C meanwhile, the held job would stay for ever.

    Raises:
        Refusal: as `try_submission`, or Ctrl-C was pressed.
    """
    with ThreadPoolExecutor(1) as pool:
        tried = pool.submit(try_submission, wanted, tell)
        try:
            tried.result()
        except KeyboardInterrupt:
            ignore_interrupts()
            tried.result()
            raise Refusal("pbs: interrupted before the first job") from None


def try_submission(wanted: tuple[str, ...], tell: Callable[[str], None]) -> None:
    """Submit a job of this size that is held, and delete it: qsub has no other test. While a limit
    on jobs is reached, there is none.

    Args:
        tell: prints one line.

    Raises:
        Refusal: PBS does not accept it, or does not answer.
    """
    try:
        done = run_pbs("qsub", "-h", "-N", "test", "-o", "/dev/null", "-j", "oe", *wanted,
                       stdin="true\n")  # fmt: skip
        ids = JOB_ID.findall(done.stdout)
        if ids:
            # -W force -x would also remove it from the history, for operators only.
            if not delete(ids):
                tell(undeleted(ids))
        elif done.returncode and FULL.search(done.stderr):
            # Submitted when there is room.
            return
        if done.returncode or not ids:
            why = error_of(done) if done.returncode else "qsub gives no job id"
            raise Refusal(f"pbs: {why}; asked with qsub {shlex.join(wanted)}")
    except Unanswered as error:
        raise Refusal(f"pbs: {error}; try again once qstat answers") from None


AGAIN_SUFFIX = ".again"


def job_name(name: str) -> str:
    """A name that PBS accepts: it begins with a letter and has no special characters."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return (plain if plain[:1].isalpha() else f"j{plain}")[:LONGEST_NAME]


def script(command: str, init: str, job: Job) -> str:
    """The job's script.

    PBS starts it in the home folder, with neither our environment nor our umask. It copies the log
    of a job only at its end, and under no path with a blank.
    """
    umask = os.umask(0)
    os.umask(umask)
    log, status = shlex.quote(str(job.file(".log"))), shlex.quote(str(job.file(".status")))
    enter = f"cd {shlex.quote(str(Path.cwd()))} || exit 1"
    return "\n".join([
        "#!/bin/bash",
        f"exec >>{log} 2>&1 </dev/null",
        f"umask {umask:03o}",
        enter,
        f"rm -f {status}",
        f"export {AGAIN}={shlex.quote(str(job.file(AGAIN_SUFFIX)))}",
        # PBS sends SIGTERM to all processes here, 10 s before SIGKILL. This shell waits for the
        # others: when it ends, PBS kills what is left.
        "trap : TERM",
        *prepared(init, status),
        # The user's lines may have changed both.
        "set +e",
        enter,
        command,
        "status=$?",
        f"echo $status >{status}",
        "exit $status",
        "",
    ])  # fmt: skip


def prepared(init: str, status: str) -> list[str]:
    """The lines of the user's `pbs-init`, of which none may fail.

    Args:
        status: the file for the job's status, quoted.
    """
    if not init.strip():
        return []
    told = 'echo "pbs-init: $BASH_COMMAND ended with status $status"'
    failed = f"{{ {told}; echo $status >{status}; exit $status; }}"
    # Not for a command within a file that it sources.
    here = "init_depth=${#BASH_SOURCE[@]}"
    above = '[ "${#BASH_SOURCE[@]}" -gt "$init_depth" ]'
    trap = shlex.quote(f"status=$?; {above} || {failed}")
    return [FIND_MODULE, here, f"trap {trap} ERR", init, "trap - ERR"]


def known_state(job: Job, shown: Mapping[str, str]) -> State:
    """The state of a job as PBS shows it."""
    job.unknown_since = None
    state = state_of(shown)
    job.never = job.never + 1 if state.never else 0
    # The first line of the script makes it.
    if state.ran and not job.file(".log").exists():
        return replace(state, line=f"{state.line}; {UNREACHED}")
    # Said once, it may be a server that does not know its nodes yet.
    return replace(state, ended=False) if 0 < job.never < NEVER else state


def unknown(job: Job) -> State:
    """The state of a job that PBS does not know: without history, a job that has ended."""
    now = time.monotonic()
    job.unknown_since = job.unknown_since or now
    try:
        status = int(job.file(".status").read_text())
        return State(f"ended with status {status}", ended=True, good=status == 0)
    except (OSError, ValueError):
        if now - job.unknown_since < FORGOTTEN:
            return State("is unknown to PBS")
        return State("is unknown to PBS and has left no exit status", ended=True)
