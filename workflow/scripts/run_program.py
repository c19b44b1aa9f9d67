"""Run a user's program as one process of a run: stage what it reads, guard its state, stop it in
order, and leave no process behind.

The program starts in its results folder, or in --directory, with the variables of
manynodes/base/environment.py.
"""

import argparse
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from manynodes.base import atomic, failure
from manynodes.base.environment import Environment, add_to_report, refusals_reported
from manynodes.base.errors import STOPPED, Refusal, Stopped, told_in_one_line
from manynodes.base.failure import Failure, recorded
from manynodes.base.processes import adopt_orphans, how
from manynodes.base.reading import read_json
from manynodes.checkpointing.owner import Owner, acquire
from manynodes.data.files import read_files
from manynodes.data.folder import DataFolder
from manynodes.data.guard import Guard
from manynodes.data.staging import stage
from manynodes.experiment.command import filled
from manynodes.experiment.config import parse_option
from manynodes.programs.folders import Folders, empty, trace
from manynodes.programs.running import (
    end_like,
    environment_of,
    started,
    wait,
    without_folder,
)
from manynodes.ranks.stopping import Stopping, listen
from manynodes.reporting.sums import refuse_changed

MAKE = "snakemake --profile profiles/local --force"
# Seconds of a look at the inputs, in which no request to stop is passed on.
LOOK = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", required=True, metavar="JSON",
        help="the values of the run, with the words of its command")  # fmt: skip
    add("--settings", default="{}", metavar="JSON",
        help="values of parameters that do not change what it comes to")  # fmt: skip
    add("--data", type=Path, help="the shared data folder, with its manifest")
    add("--files", type=Path, help="the folder that collect.py has made")
    add("--directory", type=Path, help="where it starts; default: its results folder")
    add("--scratch", nargs="*", default=[],
        help="node-local folders to stage in; $NAME is expanded on the node")  # fmt: skip
    add("--output", type=Path, required=True, metavar="FOLDER", help="of this run")
    add("--evaluation", metavar="JSON",
        help="the words of a program that evaluates a finished training, instead")  # fmt: skip
    args = parser.parse_args()
    with told_in_one_line("run_program", MAKE):
        contract = Environment.read()
        # Before anything is started that a signal should reach.
        stop = listen(contract.stop_at)
        adopt_orphans()
        values = parse_option("--run", args.run) | parse_option("--settings", args.settings)
        words = checked(values.get("command"))
        if args.evaluation:
            words = checked(json.loads(args.evaluation))
        # `launch` records what a training ended with.
        alone = recorded(args.output, "evaluate", MAKE) if args.evaluation else nullcontext()
        with refusals_reported(), alone:
            status = run(words, values, contract, stop, args)
        if args.evaluation and status:
            line = f"the program {how(status)}"
            tell(line)
            failure.write(args.output, "evaluate", Failure(line))
    end_like(status)


def checked(words: Any) -> list[str]:
    """The words of a command.

    Raises:
        Refusal: they are not a list of texts.
    """
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return words
    raise Refusal('a command must be a list of texts, such as ["python", "train.py"]')


def run(
    words: list[str],
    values: dict[str, Any],
    contract: Environment,
    stop: Stopping,
    args: argparse.Namespace,
) -> int:
    """Run the program to its end; returns its status, as in subprocess.

    Raises:
        Stopped: it was asked to stop, and can be continued.
        Refusal: it cannot be started, another job has taken the run over, or its inputs have
            changed while it, or an attempt before, ran.
    """
    folders = Folders(args.output.resolve())
    rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    first = "RANK" not in os.environ or rank == 0
    with ExitStack() as stack:
        owner = None
        if first and not args.evaluation:
            name = contract.owner or f"process {os.getpid()} on {socket.gethostname()}"
            owner = stack.enter_context(acquire(folders.state, name, tell))
        if not args.evaluation and folders.spoiled.exists():
            raise Refusal(folders.spoiled.read_text(encoding="utf-8", errors="replace"))
        parameters, staged = ready_here(args, contract, folders, local_rank, values)
        inputs = copies_of(args, staged) if local_rank == 0 else []
        guards = [Guard(copy, copy.manifest["files"]) for copy in inputs]
        work = folders.evaluation if args.evaluation else folders.work
        if args.evaluation:
            # The numbers of an earlier program must not be taken for those of this one.
            empty(work)
            refuse_other_outputs(folders)
        work.mkdir(parents=True, exist_ok=True)
        places = Environment(
            device=contract.device,
            data=staged.get("data"),
            files=staged.get("files"),
            results=work,
            outputs=folders.outputs if args.evaluation else None,
            state=None if args.evaluation else folders.saved,
            parameters=parameters,
        )
        known = {"rank": rank, "local_rank": local_rank} | values | {
            "here": str(Path.cwd()),
            "python": sys.executable,
            **{name: getattr(places, name) for name in
               ("data", "files", "results", "outputs", "state")},
        }  # fmt: skip
        command = filled(words, {key: str(value) if isinstance(value, Path) else value
                                 for key, value in known.items()})  # fmt: skip
        before = trace(folders.saved)
        if owner:
            position = int.from_bytes(hashlib.sha256(repr(before).encode()).digest()[:3])
            owner.begin_at(position, before[0], f"with the same files in {folders.saved}")
        spoiled = None if args.evaluation else folders.spoiled
        watch = watcher(folders, before, owner, partial(refuse_touched_inputs, guards, spoiled))
        command, folder = without_folder(command)
        environment = environment_of(places, os.environ, folder)
        directory = args.directory.resolve() if args.directory else work
        with started(command, environment, directory) as process:
            status = wait(process, stop, watch)
        # The last second counts too.
        saved = trace(folders.saved) != before
        if saved and first:
            add_to_report(saved=str(folders.saved))
        refuse_touched_inputs(guards, spoiled)
        if status == 0:
            refuse_changed_inputs(inputs, spoiled)
        return judged(status, stop, saved, folders)


def sources_of(args: argparse.Namespace) -> dict[str, DataFolder]:
    """The shared data and files that are given, by the names of their variables."""
    read = {"data": (args.data, DataFolder.read), "files": (args.files, read_files)}
    return {name: reader(path) for name, (path, reader) in read.items() if path}


def copies_of(args: argparse.Namespace, staged: dict[str, Path]) -> list[DataFolder]:
    """Where the program reads them on this node."""
    return [source.at(staged[name]) for name, source in sources_of(args).items()]


def refuse_touched_inputs(guards: Iterable[Guard], spoiled: Path | None) -> None:
    """Check by their times that the node's copies are as before; others may write to its disk, and
    the program itself.

    Args:
        spoiled: of `Folders`, in a training.

    Raises:
        Refusal: a file has changed.
    """
    for guard in guards:
        if changed := guard.changed(LOOK):
            refuse_spoiled(changed, spoiled)


def refuse_changed_inputs(copies: Iterable[DataFolder], spoiled: Path | None) -> None:
    """The same by their content. A file that is gone has been read before."""
    for copy in copies:
        for file in copy.damaged_files():
            if (copy.path / file).is_file():
                refuse_spoiled(f"{copy.path / file} on {socket.gethostname()}", spoiled)


def refuse_spoiled(changed: str, spoiled: Path | None) -> NoReturn:
    line = f"{changed} changed while the program ran; "
    if spoiled is None:
        raise Refusal(f"{line}run the same command again, on a disk that nobody else writes to")
    line += "start over (resume=fresh), on a disk that nobody else writes to"
    # Whatever starts next, such as a rank's replacement, must not continue from what was saved.
    atomic.write_text(spoiled, line)
    raise Refusal(line)


def refuse_other_outputs(folders: Folders) -> None:
    """Refuse outputs that the training has not written.

    Raises:
        Refusal: run.json names others, or is damaged.
    """
    files = read_json(folders.run / "run.json", "program_run", "train the run again")["files"]
    refuse_changed(folders.run, files, [name for name in files if "/" in name])


def judged(status: int, stop: Stopping, saved: bool, folders: Folders) -> int:
    """The status of the program; Stopped if it can be continued.

    Raises:
        Stopped: it said so with its status; or it was asked to stop, and ended or saved something.
    """
    where = f"saved in {folders.saved}" if saved else "nothing new was saved"
    if status == STOPPED:
        add_to_report(stopped=stop.reason or f"exit status {STOPPED}")
        raise Stopped(f"stopped ({stop.reason or 'by itself'}); {where}")
    if stop.reason and (saved or status == 0):
        # A program that ends with 0 when it is told to end may not have finished its work.
        add_to_report(stopped=stop.reason)
        said = f"status {status}" if status >= 0 else f"signal {-status}"
        raise Stopped(f"stopped ({stop.reason}) with {said}; {where}")
    return status


def watcher(
    folders: Folders,
    before: tuple[int, int, int],
    owner: Owner | None,
    look: Callable[[], None],
) -> Callable[[], None]:
    """What is looked at while the program runs: on every rank its inputs, by `look`, and on rank 0
    whether the run is still ours, and whether the program has saved something.
    """
    told = owner is None
    next_look = time.monotonic()

    def watch() -> None:
        nonlocal told, next_look
        if owner:
            owner.check()
        # A folder with many files on a network file system takes a while.
        if time.monotonic() < next_look:
            return
        since = time.monotonic()
        look()
        if not told and trace(folders.saved) != before:
            add_to_report(saved=str(folders.saved))
            told = True
        next_look = time.monotonic() + 50 * (time.monotonic() - since)

    return watch


def ready_here(
    args: argparse.Namespace,
    contract: Environment,
    folders: Folders,
    local_rank: int,
    values: dict[str, Any],
) -> tuple[Path, dict[str, Path]]:
    """The file with the values, and where this node's data and files are.

    The first process of each node makes them, and tells the others: they would only read all of
    the data again, and what another node writes may be seen late.
    """
    # Unique to this start: a file of an earlier one must not be taken for it.
    start = hashlib.sha256((contract.secret or str(os.getpid())).encode()).hexdigest()[:16]
    message = folders.started / f"{contract.node_rank or 0}-{start}.json"
    parameters = message.with_suffix(".parameters.json")
    if local_rank == 0 or "LOCAL_RANK" not in os.environ:
        found = {}
        for name, source in sources_of(args).items():
            staged = stage(source, args.scratch, contract.job_scratch)
            if staged.status == "fallback":
                print(staged, flush=True)
            found[name] = staged.path
        message.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(parameters, json.dumps(values, indent=2) + "\n")
        atomic.write_text(message, json.dumps(found))
    else:
        while not message.exists():
            time.sleep(0.1)
        found = json.loads(message.read_text())
    return parameters, {name: Path(path).resolve() for name, path in found.items()}


def tell(text: str) -> None:
    print(f"run_program: {text}", flush=True)


if __name__ == "__main__":
    main()
