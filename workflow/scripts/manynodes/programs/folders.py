"""The folders of a run of the user's program, and whose state lies in them."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from manynodes.base import atomic
from manynodes.base.errors import OF_A_LINE, SHORTENED, Refusal, reason, shortened, shown
from manynodes.base.provenance import in_utc, now
from manynodes.base.reading import is_file, parse_form, read_bytes
from manynodes.checkpointing import incidents, replaced
from manynodes.checkpointing.owner import job_of, look
from manynodes.experiment.command import apart

MOST_BYTES = 10_000_000  # of the description of a state
# What the Python of a program is and has, and the repository that the program lies in.
ENVIRONMENT, REPOSITORY = "environment.json", "repository.json"
# At the end of the name of a folder in which `launched.save` is writing a file.
UNFINISHED = ".unfinished"
MOST_CHANGES = 60  # characters of what differs between two requests
LEAST = 10  # characters of a value by which it may still be known


class Folders:
    """The folder of a run, and what lies in it.

    Attributes:
        run: results/<experiment>/<run>.
        work: where the program starts and writes: LAUNCH_RESULTS.
        outputs: the declared outputs of a finished training.
        evaluation: where the program that evaluates starts and writes.
        evaluated_by: SHA-256 of that program when it began and when it had ended, a line each.
        state: of the owner; Snakemake does not know it, so it survives a failure.
        saved: what the program needs to continue: LAUNCH_STATE.
        request: what was asked for when the state began, and its attempts.
        finished: there if Snakemake has seen the end of the training that the state belongs to.
        metrics: the rows that `supervise` collects from what the program writes in its own way.
        expressions: by which those rows were found, if they are lines of a log; else the key
            `metrics`.
        ended: there if all processes of the program have ended with 0; what follows can be
            repeated.
        printed: what the first process has printed in each start, in files in the order of the
            starts.
        starts: a file for each start of the program, see `note_start`.
        earlier: results folders of attempts from which nothing could continue, see `set_aside`.
        snapshots: the patterns of the attempt.
        spoiled: there if the inputs changed while the program ran; says which.
        started: where the first process of each node tells the others that all is ready.
        emptied, removed: the folders and files that are of one training alone. The request is
            replaced.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.work = run / "work"
        self.outputs = run / "outputs"
        self.evaluation = run / "evaluation"
        self.evaluated_by = self.evaluation / "evaluated_by.txt"
        self.state = run / "state"
        self.saved = self.state / "saved"
        self.request = self.state / "request.json"
        self.finished = self.state / "finished"
        self.metrics = self.state / "metrics.csv"
        self.expressions = self.state / "expressions.json"
        self.ended = self.state / "ended"
        self.printed = self.state / "printed"
        self.starts = self.state / "starts"
        self.earlier = self.state / "earlier"
        self.snapshots = self.state / "snapshots.json"
        self.spoiled = self.state / "spoiled"
        self.started = self.state / "started"
        self.emptied = (
            *(self.work, self.saved, self.evaluation),
            *(self.printed, self.starts, self.started),
        )
        self.removed = (self.finished, self.ended, self.spoiled, self.metrics, self.expressions)

    @property
    def has_files(self) -> bool:
        """Whether an attempt has left anything; without, it counts as never begun, unless it ended
        with 0: its results may be what it has printed, or lie elsewhere.
        """
        return any(True for folder in (self.saved, self.work) for _ in files_in(folder))

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended, and the files that it has left have not been taken yet; of
        one that has left none, `attempt.has_ended` knows.
        """
        return self.ended.exists() and not self.finished.exists() and self.has_files


def refuse_links(run: Path, evaluates: bool = False) -> None:
    """Refuse a run with a link in place of one of its folders, also those of the built-in trainer:
    no folder of ours is one, and what it leads to would be emptied or overwritten.

    Args:
        evaluates: only its evaluation is made.

    Raises:
        Refusal: there is one.
    """
    folders = Folders(run)
    states = (folders.state, folders.state / "checkpoints", folders.earlier)
    of_training = (*states, *folders.emptied, *(run / name for name in replaced.FOLDERS))
    for folder in (folders.evaluation,) if evaluates else of_training:
        if folder.is_symlink():
            raise Refusal(f"{folder} is a link, which may lead to anybody's files; remove the link")


def refuse_foreign(run: Path, known: Callable[[], bool]) -> None:
    """Refuse to remove anything in a folder that a link in place of the run's leads to.

    Args:
        known: whether what lies there is known to be this run's.

    Raises:
        Refusal: it is not.
    """
    removed = (*replaced.FILES, *replaced.FOLDERS, "work", "evaluation", "state")
    # Snakemake makes the folders of a job's outputs before it.
    left = (each for name in removed for each in ((run / name), *(run / name).rglob("*")))
    if run.is_symlink() and any(each.is_file() for each in left) and not known():
        raise Refusal(
            f"{run} is a link to files that are not known as this run's; remove the link, or empty "
            "the folder that it leads to"
        )


def has_request(folders: Folders) -> bool:
    """Whether there is a state of ours; of which run, `prepare` looks at."""
    with suppress(Refusal):
        return bool(read_request(folders))
    return False


def prepare(
    folders: Folders,
    run: Mapping[str, Any],
    request: Mapping[str, Any],
    resume: str,
    attempt: Mapping[str, Any],
    token: str = "",
    alone: bool = False,
) -> bool:
    """Make the folders ready for an attempt: as they were left, or empty.

    Args:
        run: all values of the run.
        request: what decides the result.
        resume: `exact`, `anyway` or `fresh`.
        attempt: added to the list of attempts.
        token: of the launch that makes them ready, see `of_another_launch`.
        alone: as of `resuming`.

    Returns:
        Whether there is an earlier state.

    Raises:
        Refusal: the state there is one of another request, or it is not known of which; or a folder
            is a link, see `refuse_links` and `refuse_foreign`.
        OSError: the folders are not writable.
    """
    refuse_links(folders.run)
    refuse_foreign(folders.run, lambda: has_request(folders))
    before = request_before(folders, request, resume, alone)
    changed = before is not None and differences(before["request"], request) != ""
    if before and changed and resume == "exact":
        raise Refusal(of_another_request(folders, before["request"], request, alone))
    if changed:
        folders.ended.unlink(missing_ok=True)
    content = {"run": dict(run), "request": dict(request), "token": token}
    if before and folders.ended.exists():
        if not before["attempts"]:
            # It was damaged or not there, and is read when the results are published.
            atomic.write_json(folders.request, content | {"attempts": [dict(attempt)]})
        return True
    attempts = list(before["attempts"]) if before else []
    if before:
        if attempts and "ended" not in attempts[-1]:
            # An attempt that ended before its program began has touched nothing.
            attempts[-1] |= {"ended": max(last_touch(folders), attempts[-1]["started"])}
    else:
        over = resume == "fresh" or folders.finished.exists()
        for folder in (*folders.emptied, *[folders.earlier] * over):
            empty(folder)
        for file in folders.removed:
            file.unlink(missing_ok=True)
    empty(folders.started)
    for folder in (folders.work, folders.saved, folders.started):
        folder.mkdir(parents=True, exist_ok=True)
    if before:
        separate(folders)
    attempts.append(dict(attempt))
    atomic.write_json(folders.request, content | {"attempts": attempts})
    return before is not None


def resuming(how: str, alone: bool) -> str:
    """The option for what to do with a state.

    Args:
        alone: of `launch` by itself, and not of Snakemake.
    """
    return f"--resume {how}" if alone else f"--config resume={how}"


def of_another_request(
    folders: Folders, before: Mapping[str, Any], request: Mapping[str, Any], alone: bool
) -> str:
    """The line that refuses what lies there, of a request before; `alone` as of `resuming`."""
    where, choices = folders.state, "anyway or fresh"
    if not (trace(folders.saved).files or folders.ended.exists()):
        # Such as a log: only its author knows whether the program would continue from it.
        where, choices = folders.work, "fresh, or anyway to keep it"
    text = f" is of another run: ; undo that, or add {resuming(choices, alone)}"
    # As `one_line` shortens it, if it must.
    place = min(len(str(where)), SHORTENED)
    changed = differences(before, request, OF_A_LINE - len(text) - place)
    return str(where) + text.replace(": ;", f": {changed};")


def set_aside(folders: Folders) -> Path | None:
    """Move the results folder out of the way of a run that starts over. It is not removed: a
    pattern of `snapshots` may be wrong, and some of it may be worth keeping.

    Returns:
        Where it is now; None if it cannot be moved.
    """
    with suppress(OSError):
        folders.earlier.mkdir(parents=True, exist_ok=True)
        taken = [int(path.name) for path in folders.earlier.iterdir() if path.name.isdecimal()]
        return folders.work.rename(folders.earlier / f"{max(taken, default=0) + 1}")
    return None


def separate(folders: Folders) -> None:
    """Give the program's files copies of their own, if they share their bytes with outputs that are
    published: it may write to them where they are, and earlier results would have others.
    """
    if not (folders.outputs.exists() or replaced.has_kept(folders.run)):
        return
    copy = folders.state / "copy"
    # A published output may have been a link to a file that is saved.
    for place in (folders.work, folders.saved):
        for parent, _, names in os.walk(place):
            for path in (Path(parent, name) for name in names):
                status = path.lstat()
                if S_ISREG(status.st_mode) and status.st_nlink > 1:
                    # Of an attempt that was ended; it could also be a link.
                    copy.unlink(missing_ok=True)
                    shutil.copy2(path, copy)
                    atomic.fsync(copy)
                    copy.replace(path)


def is_run(folders: Folders, resume: str) -> bool:
    """Whether there is a run in the folder that a user has named.

    Raises:
        Refusal: something else is there, which an attempt would remove.
    """
    if folders.request.exists():
        return True
    # Nothing is removed if it is to be continued anyway.
    continued = resume == "anyway" and (trace(folders.saved).files or trace(folders.work).files)
    if not continued and (foreign := next(of_no_run(folders), None)):
        where = foreign.relative_to(folders.run)
        raise Refusal(
            f"--output {folders.run}: {where} there is of no run; give a folder of its own"
        )
    return False


def of_no_run(folders: Folders) -> Iterator[Path]:
    """What no run has left in a folder without a request, which is written before all but the
    record of the owner and the incidents.
    """
    for folder in (*folders.emptied, folders.outputs):
        if folder.parent == folders.run and folder.exists() and any(folder.iterdir()):
            yield folder
    for path in folders.state.rglob("*"):
        if path.is_symlink() or not (path.is_dir() or is_before_request(path, folders.state)):
            yield path


def is_before_request(path: Path, state: Path) -> bool:
    """Whether a file is the record of an owner, or has incidents."""
    record, noted = state / "owner.json", state / incidents.FILE
    # Of a start that was killed, or had no room.
    if path.name.endswith(atomic.TEMPORARY) or (
        path in (record, noted) and not path.stat().st_size
    ):
        return True
    if path == record:
        found = look(path)
        return bool(found and found.record.token)
    return path == noted and bool(incidents.read(state))


def request_before(
    folders: Folders, request: Mapping[str, Any], resume: str, alone: bool
) -> dict[str, Any] | None:
    """The request of the attempt whose state is there; None if none is to be continued.

    Args:
        alone: as of `resuming`.

    Raises:
        Refusal: it is not known of which the state is.
    """
    if resume == "fresh" or folders.finished.exists():
        return None
    # Of another request, nothing is there to protect.
    if not (folders.has_files or (folders.ended.exists() and is_of(folders, request))):
        return None
    try:
        return read_request(folders)
    except Refusal as refusal:
        if resume != "anyway":
            remedy = f"{resuming('anyway', alone)} continues, fresh starts over"
            raise Refusal(f"{refusal}; {remedy}") from None
        return {"request": request, "attempts": []}


def is_of(folders: Folders, request: Mapping[str, Any]) -> bool:
    """Whether the state there is known to be of this request."""
    with suppress(Refusal):
        return not differences(read_request(folders)["request"], request)
    return False


def begun_by(folders: Folders, name: str) -> bool:
    """Whether the state there is of a job, and may be continued."""
    with suppress(Refusal):
        by = str(read_request(folders)["attempts"][-1].get("by"))
        return job_of(by) == job_of(name) and not folders.spoiled.exists()
    return False


def of_another_launch(folders: Folders, token: str) -> dict[str, Any] | None:
    """The request of another launch that has made the run ready since the one with this token, for
    other values perhaps; None without one, or if that cannot be read now.
    """
    with suppress(Refusal):
        found = read_request(folders)
        return found if token and found.get("token") != token else None
    return None


def empty(folder: Path) -> None:
    """Remove a folder with its content.

    Raises:
        Refusal: something in it cannot be removed, and would be taken for new.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists() and trace(folder).files:
        raise Refusal(f"{folder} cannot be emptied; remove it, and run the same command again")


def read_request(folders: Folders) -> dict[str, Any]:
    """The request of the state that is there.

    Raises:
        Refusal: it is not there, or damaged.
    """
    try:
        found = parse_form(read_bytes(folders.request, MOST_BYTES), "request")
        for attempt in found["attempts"]:
            for key in ("started", "ended"):
                datetime.fromisoformat(attempt.get(key, now()))
    except (OSError, ValueError) as error:
        raise Refusal(f"{folders.request} cannot be read ({reason(error)})") from None
    return found


def note_start(folders: Folders) -> None:
    """Note that the program starts now, possibly again in the same attempt."""
    folders.starts.mkdir(parents=True, exist_ok=True)
    number = max((int(path.name) for path in noted_in(folders)), default=0) + 1
    atomic.write_text(folders.starts / f"{number:06}", f"{time.time()}\n")


def noted_in(folders: Folders) -> list[Path]:
    """The files of `note_start`; one that is half written has another name."""
    with suppress(OSError):
        return sorted(path for path in folders.starts.iterdir() if path.name.isdigit())
    return []


def starts_of(folders: Folders) -> list[tuple[float, float]]:
    """When each start of the program was, in seconds since the epoch: by the clock of its first
    process, and by that of the file server.
    """
    noted = []
    with suppress(OSError, ValueError):
        for path in noted_in(folders):
            noted.append((float(path.read_text()), path.stat().st_mtime))
    return noted


def differences(before: Mapping[str, Any], now: Mapping[str, Any], most: int = MOST_CHANGES) -> str:
    """What differs between two requests, in words; empty if nothing does.

    Args:
        most: characters; what has no room is counted.
    """
    # As JSON: 1 and true are not the same.
    keys = [
        key
        for key in dict.fromkeys([*now, *before])
        if json.dumps(before.get(key), sort_keys=True) != json.dumps(now.get(key), sort_keys=True)
    ]
    room = most - len(and_more(len(keys) - 1))
    parts = [difference(key, before.get(key), now.get(key), room) for key in keys]
    for number in range(len(parts), 0, -1):
        line = ", ".join(parts[:number]) + and_more(len(parts) - number)
        if len(line) <= most or number == 1:
            return line
    return ""


def difference(key: str, was: Any, is_now: Any, most: int) -> str:
    """That a value has changed, in so many characters if its name is no longer than usual."""
    if key.endswith("_sha256"):
        return f"the {key.removesuffix('_sha256')} changed"
    name = shortened(key, SHORTENED // 2)
    before, now = map(shown, apart(was, is_now))
    room = most - len(f"{name} was  and is ")
    if len(before) + len(now) > room:
        if room < 2 * LEAST:
            return f"{name} changed"
        # What the one leaves, the other has. The quotes of a text are its ends, which stay.
        limits = (max(room // 2, room - len(other)) for other in (now, before))
        before, now = map(shortened, (before, now), limits)
    return f"{name} was {before} and is {now}"


def and_more(number: int) -> str:
    return f" and {number} more" if number > 0 else ""


def last_touch(folders: Folders) -> str:
    """When the last owner of the run was last seen alive."""
    with suppress(OSError):
        touched = (folders.state / "owner.json").stat().st_mtime
        return in_utc(touched)
    return now()


class Trace(NamedTuple):
    """What is in a folder: the number of files, their bytes, and the time of the newest in ns."""

    files: int
    bytes: int
    newest: int


def trace(folder: Path, snapshots: Iterable[Path] = ()) -> Trace:
    """Changes when something in the folder is written, see `files_in`.

    Args:
        snapshots: more files, and folders with all that is in them.
    """
    count, size, newest = 0, 0, 0
    for _, status in with_status(folder, snapshots):
        count, size = count + 1, size + status.st_size
        newest = max(newest, status.st_mtime_ns)
    return Trace(count, size, newest)


def with_status(folder: Path, snapshots: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """The files that `trace` looks at."""
    for place in (folder, *snapshots):
        for file in [place] if is_file(place) else files_in(place):
            # A file may be replaced while we look.
            with suppress(OSError):
                yield file, file.lstat()


def files_in(folder: Path) -> Iterator[Path]:
    """The files in a folder and below it, and links to folders, into which nothing looks. Those
    that `launched.save` has not written to their end are left out.
    """
    for parent, inside, names in os.walk(folder):
        if not parent.endswith(UNFINISHED):
            yield from (Path(parent, name) for name in names)
            yield from (path for each in inside if (path := Path(parent, each)).is_symlink())
