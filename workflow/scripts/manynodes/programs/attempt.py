"""The beginning of an attempt at a run of the user's program."""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import OF_A_LINE, Refusal, one_line
from manynodes.base.provenance import git_state, now, repository_of
from manynodes.base.reading import MOST, read_bytes
from manynodes.checkpointing import incidents, replaced
from manynodes.checkpointing.owner import refuse_owned
from manynodes.data.files import read_files
from manynodes.data.folder import DataFolder
from manynodes.experiment.command import place_of, real_folder, words_sha256
from manynodes.experiment.environments import UserEnvironment
from manynodes.programs.folders import (
    REPOSITORY,
    Folders,
    begun_by,
    differences,
    is_of,
    prepare,
    read_request,
    resuming,
    set_aside,
    trace,
)
from manynodes.programs.rank import place_saved
from manynodes.programs.task import Task
from manynodes.programs.user_numbers import newest_last

# Where a run is computed, besides its geometry, does not decide its result.
SITE = ("device", "cpus_per_proc", "world_size")


def begin(
    task: Task,
    sources: str,
    resume: str,
    owner: str,
    tell: Callable[[str], None],
    requeued: bool = False,
) -> bool:
    """Make the folders of the run ready: as an interrupted attempt has left them, or empty.

    Args:
        task: its `values` are those that decide the result; its `token` is noted.
        sources: SHA-256 of the program; empty for `launch` alone, which finds it out.
        resume: `exact`, `anyway` or `fresh`, as in config/README.md.
        owner: who begins.
        tell: gets a line if there was an attempt before.
        requeued: its job has been started before: with `fresh` it continues its own state, or it
            would start over each time.

    Returns:
        Whether the program is to be started: if it has ended, only its results were refused.

    Raises:
        Refusal: the state there was made by other code, with other parameters or from other files.
    """
    request = request_of(task, sources)
    folders = Folders(task.output)
    attempt = {"by": owner, "host": socket.gethostname(), "started": now(), **git_state()}
    if resume == "fresh" and requeued and begun_by(folders, owner):
        resume = "exact"
    changed = changed_and_unsaved(folders, task, request) if resume == "exact" else ""
    if changed:
        # Hashing may have taken a while.
        refuse_owned(folders.state, owner, tell)
    aside = set_aside(folders) if changed else None
    if aside:
        line = "and nothing is saved, or named in snapshots; the files from before are in"
        tell(one_line(f"starts over: {changed}, {line} {aside}", OF_A_LINE))
    over = bool(aside) or resume == "fresh" or folders.finished.exists()
    if over:
        incidents.forget(folders.state)
    # Another command may have put them back since Snakemake removed them for this job.
    replaced.set_aside(task.output)
    alone = not sources
    if prepare(folders, task.values, request, resume, attempt, task.token, alone):
        if folders.ended.exists():
            fresh = f"with {resuming('fresh', alone)} it starts over"
            tell(f"the program has ended before; only its results are checked again; {fresh}")
            return False
        place = place_saved(folders, task)
        nothing = f"nothing is saved in {folders.saved}, or named in snapshots"
        tell(f"starts again, with {place} as it was left" if place else f"starts again; {nothing}")
    note_patterns(folders, task, over)
    note_repository(folders, task, tell)
    return True


def has_ended(task: Task, sources: str) -> bool:
    """Whether the program has ended before, so that `begin` does not start it; one that has left no
    files, for the same request alone.

    Args:
        task, sources: as of `begin`.
    """
    folders = Folders(task.output)
    if folders.has_files or folders.finished.exists() or not folders.ended.exists():
        return folders.has_ended
    return is_of(folders, request_of(task, sources))


def request_of(task: Task, sources: str) -> dict[str, Any]:
    """What decides the result of a run.

    Args:
        task, sources: as of `begin`.
    """
    by_hand = {"command": list(task.command)}
    request = {key: value for key, value in (by_hand | dict(task.values)).items()
               if key not in SITE}  # fmt: skip
    request["sources_sha256"] = sources or files_sha256(task, only_code=False)
    request["directory"] = task.directory
    request["data_sha256"] = DataFolder.read(task.data).sha256 if task.data else None
    request["files_sha256"] = read_files(task.files).sha256 if task.files else None
    return request


def note_repository(folders: Folders, task: Task, tell: Callable[[str], None]) -> None:
    """Keep what git says of the program's repository, and tell what it does not say."""
    folder = folder_of(task.command, task.directory, task.reads.get("installed"))
    repository = repository_of(folder) if folder else {}
    if reason := repository.get("unknown"):
        what = "its changes are" if repository["commit"] else "its commit is"
        line = f"warning: the repository {repository['path']}: {what} not recorded: {reason}"
        tell(one_line(line, OF_A_LINE))
    atomic.write_json(folders.state / REPOSITORY, {"repository": repository})


def changed_and_unsaved(folders: Folders, task: Task, request: Mapping[str, Any]) -> str:
    """What has changed since an attempt from which no training can continue, although it has left
    files: a program that names its snapshots has no others. Empty if there is none such; of one
    that has ended, the results are there.
    """
    if (
        not task.reads.get("snapshots")
        or place_saved(folders, task)
        or not trace(folders.work).files
        or any(file.exists() for file in (folders.ended, folders.finished))
    ):
        return ""
    # The program may have written some under their earlier names.
    earlier = patterns_before(folders)
    if not earlier or any(newest_last(folders.work, each) for each in earlier):
        return ""
    with suppress(Refusal):
        return differences(read_request(folders)["request"], request)
    # `prepare` says that it cannot be read.
    return ""


def note_patterns(folders: Folders, task: Task, over: bool) -> None:
    """Keep the patterns of snapshots of this attempt, with the earlier ones unless the run starts
    over: what was saved under another name is still there.
    """
    earlier = [] if over else patterns_before(folders)
    patterns = dict.fromkeys([*earlier, *task.reads.get("snapshots", ())])
    atomic.write_json(folders.snapshots, list(patterns))


def patterns_before(folders: Folders) -> list[str]:
    """The patterns of snapshots of the attempts before; none if that is not known."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_bytes(folders.snapshots, MOST))
        if isinstance(found, list) and all(isinstance(each, str) for each in found):
            return found
    return []


def files_sha256(task: Task, only_code: bool) -> str:
    """SHA-256 of the program's files as they are now, see `words_sha256`."""
    other_python = not UserEnvironment.of(task.environment).is_ours
    installed = task.reads.get("installed")
    return words_sha256(task.command, other_python, task.directory, only_code, installed)


def folder_of(
    words: Sequence[str], directory: str | None, installed: Sequence[str] | None = None
) -> Path | None:
    """The folder of the first Python file or `folder:module` in a command, or of the installed
    module that it starts; otherwise the one in which it is to start, if that is not the run's own.

    Args:
        installed: as of `words_sha256`.
    """
    for word in words:
        folder, colon, _ = place_of(word, directory).partition(":")
        if folder and colon and Path(folder).is_dir():
            return Path(folder)
        if folder.endswith(".py") and Path(folder).is_file():
            return Path(folder).parent
    return Path(installed[0]).parent if installed else real_folder(directory)
