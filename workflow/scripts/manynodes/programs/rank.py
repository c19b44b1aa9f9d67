"""One process of a run, around its program: the run's owner, this node's inputs, the state."""

import hashlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.environment import Environment
from manynodes.base.errors import STOPPED, Refusal, Stopped
from manynodes.base.processes import WARNINGS, process_name
from manynodes.base.reading import file_sha256, read_bytes, read_json
from manynodes.base.signing import signed, verified
from manynodes.checkpointing import incidents
from manynodes.checkpointing.owner import Owner, acquire
from manynodes.data.files import read_files
from manynodes.data.folder import DataFolder
from manynodes.data.guard import Guard
from manynodes.data.staging import stage
from manynodes.data.unpacking import unpacked_here
from manynodes.experiment.command import filled, names_in
from manynodes.experiment.environments import UserEnvironment
from manynodes.experiment.installed import changed_packages
from manynodes.experiment.interpreter import NoAnswer, is_python, look, needed
from manynodes.programs.folders import (
    ENVIRONMENT,
    UNFINISHED,
    Folders,
    Trace,
    empty,
    note_start,
    of_another_launch,
    read_request,
    trace,
    with_status,
)
from manynodes.programs.task import Task
from manynodes.programs.user_numbers import (
    LogRows,
    begin_rows,
    collected,
    in_log,
    metrics_of,
    newest_last,
)
from manynodes.programs.variables import environment_of, safely, without_folder
from manynodes.ranks.stopping import DEADLINE
from manynodes.reporting.metrics import write_metrics
from manynodes.reporting.sums import refuse_changed
from manynodes.schedulers.base import Command

DRIVER = Path("/proc/driver/nvidia/version")
OTHER_LAUNCH = "another command began {} at the same time; run one of them again"
# Seconds between two looks, and of a look at the inputs: no request to stop is noticed meanwhile.
EVERY, LOOK = 1, 0.5
# Parts of the key `environment`, of which the first that is given brings the Python.
KINDS = ("python", "conda", "uv", "container", "modules", "setup")
MOST_TOLD = 1_000_000  # bytes of the message to a node's other processes


@dataclass
class Rank:
    """A process that is ready for its program.

    Attributes:
        command: starts the program.
        task: what it was given.
        folders: of the run.
        owner: of the run, on rank 0; None on the others, and in an evaluation.
        guards: of this node's copies of the inputs, on the node's first process.
        before: `saved_now`, before the program began.
        report: for `launch`, see `environment.add_to_report`.
        rows: collects metrics from the lines of rank 0's program; None if it writes a table.
        begun: request.json when this process owned the run; None without an owner.
    """

    command: Command
    task: Task
    folders: Folders
    owner: Owner | None
    guards: Sequence[Guard]
    before: Trace
    report: dict[str, Any]
    rows: LogRows | None
    begun: Mapping[str, Any] | None
    next_look: float = 0.0
    next_long_look: float = 0.0

    def look(self) -> None:
        """Called all the time while the program runs.

        Raises:
            Refusal: another job has taken the run over, or an input has changed.
            OSError: the record of the owner cannot be read.
        """
        now = time.monotonic()
        if now < self.next_look:
            return
        self.next_look = now + EVERY
        if self.owner:
            self.owner.check()
        # A folder with many files on a network file system takes a while.
        if now < self.next_long_look:
            return
        self.refuse_touched_inputs()
        self.refuse_other_launch()
        self.collect()
        if self.owner and "saved" not in self.report:
            self.note_saved()
        since = time.monotonic()
        self.next_long_look = since + 50 * (since - now)

    def collect(self) -> None:
        """Put the program's own rows where `watch` and the results look for them."""
        given = self.task.reads.get("metrics")
        # A table may be half written now; at the end it is read once more.
        with suppress(Refusal, OSError):
            if self.rows:
                self.rows.write()
            elif self.owner and given:
                write_metrics(self.folders.metrics, metrics_of(self.folders.run, given))

    def note_saved(self) -> bool:
        """Whether the program has saved something; `launch` is told."""
        saved = saved_now(self.folders, self.task) != self.before
        self.report.pop("saved", None)
        if saved and self.owner and (place := place_saved(self.folders, self.task)):
            self.report["saved"] = str(place)
        return saved

    def end(self, status: int, stopped: str | None) -> None:
        """Judge how the program has ended.

        Args:
            status: as in subprocess.
            stopped: why it was asked to stop; None if it was not.

        Raises:
            Stopped: it can be continued. It said so with its status; or it was asked to stop, and
                ended or saved something.
            Refusal: its inputs have changed meanwhile.
        """
        if self.rows and status == 0:
            self.rows.end()
        self.collect()
        saved = self.note_saved()
        self.refuse_touched_inputs()
        self.refuse_other_launch()
        if status == 0:
            self.refuse_changed_inputs()
        place = place_saved(self.folders, self.task)
        where = f"saved in {place}" if saved and place else "nothing new was saved"
        said = f"status {status}" if status >= 0 else f"signal {-status}"
        if status in (-signal.SIGTERM, -signal.SIGKILL):
            said = signal.Signals(-status).name
        if status == STOPPED:
            self.report["stopped"] = stopped or f"exit status {STOPPED}"
            raise Stopped(f"stopped ({stopped or 'by itself'}); {where}")
        if stopped and (saved or status == 0):
            # A program that ends with 0 when it is told to end may not have finished its work.
            self.report["stopped"] = stopped
            if status == -signal.SIGKILL:
                self.report["killed"] = True
            raise Stopped(f"stopped ({stopped}) with {said}; {where}")
        if stopped == DEADLINE:
            # Another rank may be saving now.
            self.report["late"] = f"its time was nearly up, and it ended with {said}; {where}"

    def refuse_other_launch(self) -> None:
        """Refuse to go on if another launch has made the folders ready, before this one owned the
        run: for other values, or empty, so that what is in them now is of neither.
        """
        if not (self.owner and self.begun):
            return
        now = of_another_launch(self.folders, self.task.token)
        if now is None:
            return
        self.owner.check()
        emptied = len(now["attempts"]) <= len(self.begun["attempts"])
        if emptied:
            line = "two commands have begun it at once; start over (--config resume=fresh, launch "
            atomic.write_text(self.folders.spoiled, f"{self.folders.run}: {line}alone: --resume)")
        if emptied or now["request"] != self.begun["request"]:
            raise Refusal(OTHER_LAUNCH.format(self.folders.run))

    def refuse_touched_inputs(self) -> None:
        """Check by their times that the node's copies are as before; others may write to its disk,
        and the program itself.

        Raises:
            Refusal: a file has changed.
        """
        for guard in self.guards:
            if changed := guard.changed(LOOK):
                self.refuse_spoiled(changed)

    def refuse_changed_inputs(self) -> None:
        """The same by their content. A file that is gone has been read before."""
        for guard in self.guards:
            for file in guard.copy.damaged_files():
                if (path := guard.copy.path / file).is_file():
                    self.refuse_spoiled(f"{path} on {socket.gethostname()}")

    def refuse_spoiled(self, changed: str) -> None:
        line = f"{changed} changed while the program ran; "
        disk = "on a disk that nobody else writes to"
        if self.task.evaluates:
            raise Refusal(f"{line}run the same command again, {disk}")
        line += f"start over (--config resume=fresh, launch alone: --resume fresh), {disk}"
        # Whatever starts next, such as a rank's replacement, must not continue from what was saved.
        atomic.write_text(self.folders.spoiled, line)
        raise Refusal(line)


@contextmanager
def ready(
    task: Task, contract: Environment, report: dict[str, Any], tell: Callable[[str], None]
) -> Iterator[Rank]:
    """Own the run, stage what it reads, and make the program's command.

    Args:
        report: of `Rank`.
        tell: prints a line.

    Raises:
        Refusal: it cannot be started: another job has the run, or its inputs had changed while an
            attempt before ran.
        OSError: a folder cannot be written.
    """
    folders, owner = Folders(task.output.resolve()), None
    # Without a launcher, the program runs once per node.
    rank = int(os.environ.get("RANK", contract.node_rank or 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    with ExitStack() as stack:
        if rank == 0 and not task.evaluates:
            name = contract.owner or process_name()
            owner = stack.enter_context(acquire(folders.state, name, tell))
            if of_another_launch(folders, task.token):
                raise Refusal(OTHER_LAUNCH.format(folders.run))
        if folders.spoiled.exists() and not task.evaluates:
            raise Refusal(folders.spoiled.read_text(encoding="utf-8", errors="replace"))
        message, parameters, staged = staged_here(task, contract, folders, local_rank, tell)
        places = places_of(task, folders, staged, parameters, contract.device)
        environment = UserEnvironment.of(task.environment)
        if "packed" in staged:
            environment = environment.at(staged["packed"])
        process = {"rank": rank, "local_rank": local_rank}
        command, variables, start = started(task, environment, places, process)
        before = saved_now(folders, task)
        # A scheduler sends a warning to all processes of a step; `supervise` hears it, and asks the
        # program to stop with SIGTERM.
        words = environment.started(safely(command, environment.interpreter, task.directory))
        program = Command(words, variables, directory=start, alone=True, ignored=WARNINGS)
        if local_rank == 0:
            apart = "rank" in names_in(" ".join(task.command))
            record = looked(environment, command, variables, start, rank == 0, apart)
            if rank == 0:
                keep_record(record, task, before.files > 0, tell)
            # Not before: without a module that it imports, the other processes' programs would fail
            # first, and their error would be told instead of the remedy.
            tell_staged(message, staged, contract.secret)
        if owner:
            begin(owner, folders, before)
        copies = [source.at(staged[name]) for name, source in sources_of(task).items()]
        yield Rank(
            command=program,
            task=task,
            folders=folders,
            owner=owner,
            guards=[Guard(copy, copy.manifest["files"]) for copy in copies if local_rank == 0],
            before=before,
            report=report,
            rows=rows_of(task, folders) if owner else None,
            begun=read_request(folders) if owner else None,
        )


def places_of(
    task: Task, folders: Folders, staged: Mapping[str, Path], parameters: Path, device: str | None
) -> Environment:
    """What the program finds where; its results folder is there, and in an evaluation empty.

    Args:
        staged, parameters: of `staged_here`.

    Raises:
        Refusal: as `empty` and `refuse_other_outputs`.
    """
    work = folders.evaluation if task.evaluates else folders.work
    if task.evaluates:
        refuse_other_outputs(folders)
        # The numbers of an earlier program must not be taken for those of this one.
        empty(work)
    work.mkdir(parents=True, exist_ok=True)
    return Environment(
        device=device,
        data=staged.get("data"),
        files=staged.get("files"),
        results=work,
        outputs=folders.outputs if task.evaluates else None,
        state=None if task.evaluates else folders.saved,
        parameters=parameters,
    )


def started(
    task: Task, environment: UserEnvironment, places: Environment, of_process: Mapping[str, int]
) -> tuple[list[str], dict[str, str], Path]:
    """The words that start the program in its environment, its variables, and where it starts.

    Args:
        places: what it finds where.
        of_process: its rank and local rank, by name.

    Raises:
        Refusal: there is nowhere to start.
    """
    folders = {name: getattr(places, name) for name in
               ("data", "files", "results", "outputs", "state")}  # fmt: skip
    known = {"here": Path.cwd(), "python": environment.interpreter, **folders}
    values = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in (dict(of_process) | dict(task.values) | known).items()
    }
    python = environment.interpreter
    command, folder = without_folder(filled(task.command, values), python)
    # Nothing is left of a parameter that is null.
    directory = filled([task.directory or "{results}"], values) or [values["results"]]
    start = Path(directory[0]).resolve()
    if not start.is_dir():
        raise Refusal(f"{start} is no folder; correct directory (launch alone: --directory)")
    variables = environment_of(places, environment.variables(os.environ), folder)
    # As a shell would have it.
    return command, variables | {"PWD": str(start)}, start


def keep_record(
    record: dict[str, Any], task: Task, continued: bool, tell: Callable[[str], None]
) -> None:
    """Keep what `looked` has found, and warn of modules that no hash covers.

    Args:
        continued: the program had saved something before.
    """
    folders, given = Folders(task.output.resolve()), task.environment or {}
    # Where it is staged, the node may not see it.
    with suppress(KeyError, OSError):
        record["lock_sha256"] = file_sha256(Path(given["uv"], "uv.lock"))
    if continued and not task.evaluates:
        note_other_packages(record, folders, tell)
    record["kind"] = next((part for part in KINDS if part in given), None)
    if record.pop("fuse", False) and "container" in given:
        tell(
            "warning: a process (squashfuse) shows the image, and scancel, a preemption and "
            "--signal end it too: the program may not be able to save; give options: [--unsquash]"
        )
    for name, place in record.pop("elsewhere", {}).items():
        what = "a change of it trains nothing again, unless files names it"
        tell(f"warning: the module {name} is {place}: {what}")
    folder = folders.evaluation if task.evaluates else folders.state
    atomic.write_json(folder / ENVIRONMENT, record)


def note_other_packages(
    record: Mapping[str, Any], folders: Folders, tell: Callable[[str], None]
) -> None:
    """Tell of packages that were other versions when the run, which continues now, was begun."""
    try:
        earlier = read_json(folders.state / ENVIRONMENT, "environment", "")
    except (OSError, Refusal):
        return
    if changed := changed_packages(earlier, record):
        line = f"continued with other packages: {changed}"
        tell(f"warning: {line}")
        incidents.add(folders.state, incidents.INEXACT, line)


def begin(owner: Owner, folders: Folders, before: Trace) -> None:
    """Note from which state the program starts, without files that were never finished.

    Raises:
        Refusal: as `Owner.begin_at`.
    """
    for unfinished in folders.saved.rglob(f"*{UNFINISHED}"):
        shutil.rmtree(unfinished, ignore_errors=True)
    position = int.from_bytes(hashlib.sha256(repr(tuple(before)).encode()).digest()[:3])
    owner.begin_at(position, before.files, f"with the same files in {folders.saved}")
    note_start(folders)


def rows_of(task: Task, folders: Folders) -> LogRows | None:
    """What collects rows from the program's output, if that is asked for; rows that another key
    `metrics` has left are removed.
    """
    given = task.reads.get("metrics")
    if in_log(given):
        return collected(folders, given)
    begin_rows(folders, given)
    return None


def place_saved(folders: Folders, task: Task) -> Path | None:
    """Where the program has saved what it continues from; None if it has not."""
    if found := snapshots_of(folders, task):
        return found[-1]
    return folders.saved if trace(folders.saved).files else None


def saved_now(folders: Folders, task: Task) -> Trace:
    """Changes when the program saves."""
    return trace(folders.saved, snapshots_of(folders, task))


def sizes_saved(folders: Folders, task: Task) -> frozenset[tuple[str, int]]:
    """Name and bytes of each file that the program continues from."""
    files = with_status(folders.saved, snapshots_of(folders, task))
    return frozenset((str(file), status.st_size) for file, status in files)


def snapshots_of(folders: Folders, task: Task) -> list[Path]:
    """The snapshots that are there, of each pattern the newest last."""
    patterns = task.reads.get("snapshots", ())
    return [path for each in patterns for path in newest_last(folders.work, each)]


def looked(
    environment: UserEnvironment,
    command: Sequence[str],
    variables: dict[str, str],
    start: Path,
    listed: bool,
    apart: bool = False,
) -> dict[str, Any]:
    """What is known of the program's Python on this node; little if its command starts none.

    Args:
        listed, apart: as of `look`.

    Raises:
        Refusal: it does not answer, or has not what the program imports.
    """
    found: dict[str, Any] = {"host": socket.gethostname(), "python": None, "distributions": {}}
    if listed:
        found["unasked"] = environment.unasked
    if environment.container and listed:
        found["image"] = environment.image
    with suppress(OSError):
        found["driver"] = DRIVER.read_text().splitlines()[0]
    # Another program may start it: `env`, `nice`.
    python = environment.interpreter
    at = command.index(python) if python in command else 0
    if is_python(command[at]):
        # What comes before it may change where it looks.
        imports, folder = ((), start) if at else needed(command[1:], start)
        words = command[at : at + 1]
        found |= look(environment, words, variables, imports, folder, listed, start, apart)
    elif not environment.is_ours:
        # A script of a shell's may start it. What comes from modules or an image may have none.
        with nullcontext() if environment.prefix else suppress(NoAnswer):
            found |= look(environment, [python], variables, (), start, listed, start, apart)
    return found


def sources_of(task: Task) -> dict[str, DataFolder]:
    """The shared data and files that are given, by the names of their variables."""
    found = {"data": DataFolder.read(task.data)} if task.data else {}
    return found | ({"files": read_files(task.files)} if task.files else {})


def refuse_other_outputs(folders: Folders) -> None:
    """Refuse outputs that the training has not written.

    Raises:
        Refusal: run.json names others, or is damaged.
    """
    # Only here: a program that trains starts without it.
    from manynodes.reporting.results import read_about

    files = read_about(folders.run / "run.json", "program_run")["files"]
    refuse_changed(folders.run, files, [name for name in files if "/" in name])


def staged_here(
    task: Task,
    contract: Environment,
    folders: Folders,
    local_rank: int,
    tell: Callable[[str], None],
) -> tuple[Path, Path, dict[str, Path]]:
    """The message for the node's other processes, the file with the values, and where this node's
    data and files are.

    The first process of each node makes them, and later writes the message, for which the others
    wait: they would only read all of the data again, and what another node writes may be seen late.
    """
    # Unique to this start: a file of an earlier one must not be taken for it.
    start = hashlib.sha256((contract.secret or str(os.getpid())).encode()).hexdigest()[:16]
    message = folders.started / f"{contract.node_rank or 0}-{start}.json"
    parameters = message.with_suffix(".parameters.json")
    if local_rank == 0:
        found = {}
        for name, source in sources_of(task).items():
            staged = stage(source, task.scratch, contract.job_scratch)
            if staged.status == "fallback":
                tell(str(staged))
            found[name] = staged.path
        if task.packed:
            source = read_files(task.packed)
            _, folder = unpacked_here(source, task.scratch, contract.job_scratch, tell)
            found |= {"packed": str(folder)} if folder else {}
        message.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(parameters, dict(task.values))
    else:
        while (told := told_staged(message, contract.secret)) is None:
            time.sleep(0.1)
        known = {name for name in ("data", "files", "packed") if getattr(task, name)}
        found = {name: place for name, place in told.items() if name in known}
    return message, parameters, {name: Path(path).resolve() for name, path in found.items()}


def tell_staged(message: Path, staged: Mapping[str, Path], secret: str | None) -> None:
    """Write the message of `staged_here`. It is signed, because the results folder may be a
    group's, and code runs from the places in it. Without a secret there is no other process.
    """
    if secret:
        content = json.dumps(staged, default=str).encode()
        atomic.write_bytes(message, signed(message.name, content, secret))


def told_staged(message: Path, secret: str | None) -> dict[str, str] | None:
    """What that message says; None if it is not there yet, or is not this job's."""
    with suppress(OSError, Refusal):
        content = verified(message.name, read_bytes(message, MOST_TOLD), secret)
        found: dict[str, str] = json.loads(content)
        return found
    return None
