"""The jobs of a command in a scheduler's queue, and those that a killed command has left there."""

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import Refusal
from manynodes.base.reading import MOST, parse_form, read_bytes
from manynodes.experiment.config import Experiment
from manynodes.reporting import progress
from manynodes.reporting.results import shortened
from manynodes.schedulers import registry
from manynodes.schedulers.base import parts
from session import tell
from session.refusals import NO_JOBS

# Jobs in a line that cancels them.
MOST_SHOWN = 20


class Queue:
    """The jobs of the runs of an experiment, as `watch` is told of them.

    Args:
        workflow: Snakemake's, which does not know its executor yet.
        results: folder of the experiment.
    """

    def __init__(self, workflow: Any, experiment: Experiment, results: Path) -> None:
        self.workflow, self.experiment, self.results = workflow, experiment, results
        self.states: dict[str, dict[str, str | bool]] = {}
        self.over: set[str] = set()
        self.lock = threading.Lock()

    @property
    def executor(self) -> str:
        return str(self.workflow.executor_plugin.name)

    def refuse_left(self, names: Iterable[str]) -> None:
        """Refuse these runs while jobs of them are in the queue that a command which was killed has
        left: they would begin beside those of this command, and delete their results. Those of
        other runs stay noted, unless they are known to be over.

        Raises:
            Refusal: with the command that cancels the jobs.
        """
        known = progress.read_quietly(self.results / progress.JOBS, "jobs")
        # Not what a command would take for an option.
        every = {entry["job"]: name for name, entry in known.items()
                 if entry["job"][:1].isalnum()}  # fmt: skip
        planned = {*names}
        runs = {job: name for job, name in every.items() if name in planned}
        scheduler, unended = registry.of_executor(self.executor), None
        # Without a lock they may be of a command that lives.
        if scheduler and every and self.workflow.execution_settings.lock:
            unended = scheduler.unended([*every])
        stay = every.keys() - runs if unended is None else unended
        self.over = {entry["job"] for entry in known.values()} - {*stay}
        left = None if unended is None else [job for job in unended if job in runs]
        if scheduler and unended and left:
            # Not in the refusal, which would be cut; but that of one that waits names its command.
            apart = len(left) > 1 or unended[left[0]]
            for start in range(0, len(left) if apart else 0, MOST_SHOWN):
                some = left[start : start + MOST_SHOWN]
                tell(f"to cancel them: {scheduler.canceller} {' '.join(some)}")
            raise Refusal(refusal_of([unended[job] for job in left], f"{left[0]} ({runs[left[0]]})",
                                  f"{scheduler.canceller} {left[0]}"))  # fmt: skip
        waited = [f"{job} ({name})" for job, name in runs.items() if known[name]["waits"]]
        if waited and left is None:
            tell(f"warning: when an earlier command was killed, these jobs waited: "
                 f"{shortened(waited)}; cancel them, if they still do")  # fmt: skip

    def tell_state(self, job: Any, number: str, state: str, waits: bool) -> None:
        """Print the new state of a job, and note it for `watch`."""
        # Called by several threads.
        with self.lock:
            tell(f"{self.executor}: job {number}, {self.describe(job)}: {state}")
            since = time.strftime("%H:%M:%S")
            for part in parts(job):
                self.states[part.wildcards.run] = {
                    "job": number, "state": state, "waits": waits, "since": since,
                }  # fmt: skip
            with suppress(OSError):
                self.write(self.others | self.states)

    @property
    def others(self) -> dict[str, Any]:
        """The jobs of other commands, which live or were killed, as they are noted now.

        Raises:
            OSError: that cannot be read.
        """
        try:
            noted = parse_form(read_bytes(self.results / progress.JOBS, MOST), "jobs")
        except (FileNotFoundError, ValueError):
            return {}
        return {name: entry for name, entry in noted.items()
                if name not in self.states and entry["job"] not in self.over}  # fmt: skip

    def write(self, jobs: Mapping[str, Any]) -> None:
        atomic.write_text(self.results / progress.JOBS, json.dumps(jobs) + "\n")

    def end(self) -> None:
        """Forget the jobs of this command."""
        if self.executor in NO_JOBS:
            return
        with suppress(OSError):
            if others := self.others:
                self.write(others)
            else:
                (self.results / progress.JOBS).unlink()
        self.states = {}

    def describe(self, job: Any) -> str:
        """A submitted job in a few words, with the log of its last rule."""
        inside = sorted(parts(job), key=lambda part: part.rule.name)
        rules, last = " and ".join(part.rule.name for part in inside), inside[-1]
        return f"{rules} of {self.experiment.name}/{last.wildcards.run}, log {last.log[0]}"


def refusal_of(running: Sequence[bool], first: str, cancel: str) -> str:
    """Why a command is refused while jobs of an earlier one are in the queue, and what to do.

    Args:
        running: whether it runs, of each of them.
        first: the number and the run of the first one.
        cancel: command that cancels that one.
    """
    again = "then run the same command again"
    if len(running) > 1:
        job = f"job {first} and {len(running) - 1:,} more of an earlier command"
        wait = f", {sum(running):,} running: wait for their results, or" if any(running) else ":"
        return f"{job} are still in the queue{wait} cancel them, {again}"
    job = f"job {first} of an earlier command"
    if any(running):
        return f"{job} is running: wait for its results, or cancel it, {again}"
    return f"{job} is still in the queue: {cancel}, {again}"
