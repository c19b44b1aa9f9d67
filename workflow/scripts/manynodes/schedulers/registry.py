"""The schedulers: every module and package of this folder that has an object SCHEDULER."""

import importlib
import pkgutil
import re
from collections.abc import Mapping, MutableMapping, Sequence

from manynodes import schedulers
from manynodes.schedulers.base import Scheduler, Size

LOCAL = "local"
SCHEDULERS: dict[str, Scheduler] = {
    module.SCHEDULER.transport: module.SCHEDULER
    for found in pkgutil.iter_modules(schedulers.__path__, f"{schedulers.__name__}.")
    if hasattr(module := importlib.import_module(found.name), "SCHEDULER")
}


def task_launchers() -> dict[str, Scheduler]:
    """The launchers in which the scheduler itself starts the ranks, by name."""
    return {s.task_launcher: s for s in SCHEDULERS.values() if s.task_launcher}


def active(environment: Mapping[str, str]) -> Scheduler:
    """The scheduler whose job a process with this environment belongs to; else `local`.

    A job may also have the variables of another scheduler, from the shell that submitted it.
    """
    others = (s for name, s in SCHEDULERS.items() if name != LOCAL and s.active(environment))
    return min(others, key=lambda s: s.doubted(environment), default=SCHEDULERS[LOCAL])


def of_executor(executor: str) -> Scheduler | None:
    """The scheduler that runs the jobs of a Snakemake executor; None if there is none."""
    return next((s for s in SCHEDULERS.values() if s.executor == executor), None)


def on_hosts(hosts: Sequence[str]) -> Scheduler:
    """The scheduler for hosts that the user names."""
    return next(s for s in SCHEDULERS.values() if s.takes_hosts).on(hosts)


def forget_query_settings(environment: MutableMapping[str, str]) -> None:
    """Remove what the user has set of what the schedulers' commands show."""
    for name in [*environment]:
        if any(re.fullmatch(s.query_settings, name) for s in SCHEDULERS.values()):
            del environment[name]


def resources(size: Size) -> dict[str, int | str]:
    """A job's size as Snakemake resources, in the words of every scheduler.

    A dry run does not know which scheduler will run the job; each ignores the others' words.
    """
    every = {name: value for s in SCHEDULERS.values() for name, value in s.resources(size).items()}
    # Snakemake's own name; a site decides whether it asks for local disk.
    return every | {"disk_mb": size.scratch}
