"""Patches of Snakemake 9's scheduler, applied from outside."""

import sys
import threading
from collections.abc import Callable
from typing import Any

from snakemake.scheduling.job_scheduler import JobScheduler


def end_in_a_thread() -> None:
    """Let Snakemake handle SIGTERM in a thread of its own, and say what it does.

    Its handler takes a lock. If the main thread held that lock when the signal came, the handler
    waited for the frame below it, and the Snakemake of a cancelled job stayed for ever (measured: 4
    of 10 jobs on a loaded node).
    """
    handle = JobScheduler.exit_gracefully

    def exit_gracefully(scheduler: JobScheduler, *signal: Any) -> None:
        threading.Thread(target=tell_and_wait, args=(scheduler, *signal)).start()

    def tell_and_wait(scheduler: JobScheduler, *signal: Any) -> None:
        print(
            "SIGTERM: Snakemake starts no more jobs and waits for those that run; Ctrl-C in its "
            "terminal ends them too, and the same command resumes",
            file=sys.stderr,
            flush=True,
        )
        handle(scheduler, *signal)

    JobScheduler.exit_gracefully = exit_gracefully


def call_when_planned(check: Callable[[], None]) -> None:
    """Call a function when Snakemake knows which jobs it will run.

    It calls no handler of a workflow's if there are none, or in a dry run.
    """
    make = JobScheduler.__init__

    def init(scheduler: JobScheduler, *arguments: Any) -> None:
        check()
        make(scheduler, *arguments)

    JobScheduler.__init__ = init
