"""Patches of Snakemake 9, applied from outside."""

import shlex
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from snakemake.exceptions import ResourceValidationError
from snakemake.executors import local
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake_interface_executor_plugins import utils  # type: ignore[import-untyped]


def end_in_a_thread() -> None:
    """Let Snakemake handle SIGTERM in a thread of its own, and say what it does.

    Its handler takes a lock. If the main thread held that lock when the signal came, the handler
    waited for the frame below it, and the Snakemake of a cancelled job stayed for ever (measured: 4
    of 10 jobs on a loaded node).
    """
    handle = JobScheduler.exit_gracefully

    def exit_gracefully(scheduler: JobScheduler, *given: Any) -> None:
        threading.Thread(target=tell_and_wait, args=(scheduler, *given)).start()

    def tell_and_wait(scheduler: JobScheduler, *given: Any) -> None:
        print(
            "SIGTERM: Snakemake starts no more jobs and waits for those that run; Ctrl-C in its "
            "terminal ends them too, and the same command resumes",
            file=sys.stderr,
            flush=True,
        )
        handle(scheduler, *given)

    JobScheduler.exit_gracefully = exit_gracefully


def cancel_once() -> None:
    """Let Snakemake, once Ctrl-C is pressed, wait for its jobs here whatever comes.

    A second Ctrl-C interrupted it there, and its hooks told nothing of the runs (measured).
    """
    cancel = local.Executor.cancel

    def cancel_and_wait(executor: local.Executor) -> None:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        cancel(executor)

    local.Executor.cancel = cancel_and_wait


def look_behind_ancient_files() -> None:
    """Let Snakemake look for the changes of every job.

    It skips the jobs below one that runs, since they will run too. Those that depend on it by
    `ancient` files only do not: their own changes went unnoticed until the next command. Here, one
    command with a new `stage` and another configuration staged, and showed the old results.
    Source: https://github.com/snakemake/snakemake/issues/4166
    """
    # Only here: it cannot be imported before the rest of Snakemake.
    from snakemake.dag import DAG

    update, walk = DAG.update_needrun, DAG.bfs
    updating = ContextVar("updating", default=False)

    async def update_needrun(dag: DAG, *arguments: Any, **options: Any) -> None:
        before = updating.set(True)
        try:
            await update(dag, *arguments, **options)
        finally:
            updating.reset(before)

    def bfs(dag: DAG, direction: Any, *jobs: Any, **options: Any) -> Iterator[Any]:
        if not updating.get() or direction is not dag.depending:
            yield from walk(dag, direction, *jobs, **options)
            return
        queue, seen = deque(jobs), set(jobs)
        while queue:
            job = queue.popleft()
            yield job
            for below, files in direction[job].items():
                if below not in seen and not all(file.is_ancient for file in files):
                    queue.append(below)
                    seen.add(below)

    DAG.update_needrun, DAG.bfs = update_needrun, bfs


def leave_the_locks_of_others() -> None:
    """Let Snakemake remove its own locks alone when it ends.

    It removes their whole folder. A command that had nothing to do took the locks of all others in
    this folder with it, and one run was submitted twice (measured with 9.27).
    """
    from snakemake.persistence.file import FilePersistence

    # What --unlock does.
    FilePersistence.cleanup_locks = FilePersistence._delete_locks

    def delete_locks(persistence: Any) -> None:
        for path in map(Path, persistence._lockfile.values()):
            path.unlink(missing_ok=True)
        persistence._lockfile.clear()

    FilePersistence._delete_locks = delete_locks


def quote_for_shells() -> None:
    """Let Snakemake quote the words of a job's command for a shell.

    It quotes them for Python: a folder with both quotation marks, or a value of `--config` with an
    apostrophe and a dollar sign, was another one in the job.
    """
    utils.repr = lambda value: shlex.quote(value) if isinstance(value, str) else repr(value)


def leave_names_alone(settings: Any) -> None:
    """Let a resource such as `slurm_partition: open` be this text.

    Snakemake takes a resource for an expression, and this one for Python's function: it ended with
    a traceback (measured).

    Args:
        settings: Snakemake's, of resources.
    """
    given = settings._parsed_default_resources, *settings._parsed_overwrite_resources.values()
    for resources in given:
        for name, resource in [*resources.items()]:
            if str(resource.raw or "").isidentifier() and not has_value(resource):
                resources[name] = resource.raw


def has_value(resource: Any) -> bool:
    """Whether a resource that is a name becomes a number or a text in a rule."""
    of_rule = {"input": (), "attempt": 1, "threads": 1, "rulename": "", "async_run": print}
    try:
        return not resource.evaluate({}, **of_rule).is_evaluable()
    except ResourceValidationError:
        return False
    except Exception:
        # Such as a text in place of a number: Snakemake tells it, with the rule.
        return True


def import_less_in_jobs(executor: Any, modules: Iterable[str]) -> None:
    """Let an executor's jobs start Snakemake through in_job.py, without modules."""
    plain, program = executor.get_python_executable, Path(__file__).with_name("in_job.py")
    words = shlex.join([str(program), ",".join(modules)])
    executor.get_python_executable = lambda: f"{plain()} {words}"


def force(files: Callable[[], Iterable[str]]) -> None:
    """Have Snakemake run those of its jobs that make these files. With --forcerun it would also
    take the files for targets.

    Args:
        files: called once Snakemake knows its own options.
    """
    # Snakemake's modules import each other; this one cannot be the first.
    from snakemake.dag import DAG

    make = DAG.__init__

    def init(dag: DAG, *arguments: Any, **named: Any) -> None:
        make(dag, *arguments, **named)
        dag.forcefiles.update(files())

    DAG.__init__ = init


def call_when_planned(check: Callable[[], None]) -> None:
    """Call a function when Snakemake knows which jobs it will run.

    It calls no handler of a workflow's if there are none, or in a dry run.
    """
    make = JobScheduler.__init__

    def init(scheduler: JobScheduler, *arguments: Any) -> None:
        check()
        make(scheduler, *arguments)

    JobScheduler.__init__ = init
