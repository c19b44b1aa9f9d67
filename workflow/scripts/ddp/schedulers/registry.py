"""The schedulers: every module and package of this folder that has an object SCHEDULER."""

import importlib
import pkgutil
from collections.abc import Mapping

from ddp import schedulers
from ddp.schedulers.base import Scheduler, Size

# The seam itself.
OTHERS = ("base", "registry")
LOCAL = "local"

SCHEDULERS: dict[str, Scheduler] = {
    scheduler.transport: scheduler
    for module in pkgutil.iter_modules(schedulers.__path__)
    if module.name not in OTHERS
    for scheduler in [importlib.import_module(f"ddp.schedulers.{module.name}").SCHEDULER]
}


def task_launchers() -> dict[str, Scheduler]:
    """The launchers in which the scheduler itself starts the ranks, by name."""
    return {s.task_launcher: s for s in SCHEDULERS.values() if s.task_launcher}


def active(environment: Mapping[str, str]) -> Scheduler:
    """The scheduler whose job a process with this environment belongs to; else `local`."""
    others = (s for name, s in SCHEDULERS.items() if name != LOCAL)
    return next((s for s in others if s.active(environment)), SCHEDULERS[LOCAL])


def of_executor(executor: str) -> Scheduler | None:
    """The scheduler that runs the jobs of a Snakemake executor; None if there is none."""
    return next((s for s in SCHEDULERS.values() if s.executor == executor), None)


def resources(size: Size) -> dict[str, int | str]:
    """A job's size as Snakemake resources, in the words of every scheduler.

    A dry run does not know which scheduler will run the job; each ignores the others' words.
    """
    return {name: value for s in SCHEDULERS.values() for name, value in s.resources(size).items()}
