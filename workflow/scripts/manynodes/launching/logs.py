"""The logs of a launch: of all of its processes in one file, and of each in its own."""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Self

from manynodes.base import atomic
from manynodes.base.atomic import not_through_a_link
from manynodes.base.errors import Refusal
from manynodes.schedulers.base import Allocation

# The logs of a launch, and in the folder of a run those of the rules; the logs of a start before
# the last one; and in a folder that has its name from a job, the command whose logs are there.
LOGS = re.compile(r"((rank|node)=\d+|launcher)\.log(\.old)?")
LOGS_OF_RULES = re.compile(r"(train|preflight)\.log(\.old)?")
START = re.compile(r"start=\d+")
COMMAND = ".command={}"
# Characters of a log; its older half then gives way to new lines.
MOST_LOGGED = 100_000_000


class Log:
    """A text file that keeps the last MOST_LOGGED characters at most, the older ones in a file
    beside it with the suffix `.old`: a flood of output does not fill the disk. Without a path, what
    is written to it goes nowhere. As a context, a full disk does not fail at its end.
    """

    def __init__(self, path: Path | None, mode: str = "a") -> None:
        self.path, self.size = path or Path(os.devnull), 0
        self.file = opened(self.path, mode)
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(OSError):
            self.file.close()

    def write(self, text: str) -> int:
        with self.lock:
            if self.size + len(text) > MOST_LOGGED // 2 and self.path.is_file():
                self.path.replace(self.path.with_name(f"{self.path.name}.old"))
                # Until there is room for a new file, what follows is added to the old one.
                new = opened(self.path, "w")
                old, self.file, self.size = self.file, new, 0
                old.close()
            self.size += len(text)
            return self.file.write(text)

    def flush(self) -> None:
        with self.lock:
            self.file.flush()


def opened(path: Path, mode: str) -> IO[str]:
    """A log; of somebody who may write to its folder, a link there could lead to any file. A path
    in a message may be no UTF-8.
    """
    return open(path, mode, encoding="utf-8", errors="backslashreplace", opener=not_through_a_link)


@contextmanager
def log_of(log: Path | None, rank_logs: Path | None) -> Iterator[Log]:
    """The log of the whole launch. With --rank-logs it lies there, and --log is a link to it.

    Snakemake deletes the log of a rule before it runs the rule, even if another job is running
    it: then only the link is gone, and it is made again at the end.
    """
    if not log:
        with Log(None) as file:
            yield file
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = rank_logs / log.name if rank_logs else log
    # Of an earlier launch, which had --rank-logs.
    if kept.is_symlink() and kept.readlink().name == kept.name:
        kept.unlink()
    with Log(kept) as file:
        try:
            link(log, kept)
            yield file
        finally:
            with suppress(OSError):
                link(log, kept)


def link(path: Path, target: Path) -> None:
    """Make the path a relative link to the target, unless it is the target. A file that is there
    goes on in the target.
    """
    if path == target:
        # Also if it is gone: it would become a link to itself.
        return
    with suppress(FileNotFoundError):
        if path.samefile(target):
            return
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as file, target.open("ab") as log:
            shutil.copyfileobj(file, log)
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def refuse_no_log(path: Path) -> None:
    """Refuse what is no file, and would give way to a link to the log.

    Raises:
        Refusal: it is a device, a folder, or a link that no launch has made, such as /dev/stdout.
    """
    if not (path.readlink().name == path.name if path.is_symlink() else is_new(path)):
        raise Refusal(f"--log {path} is no file; give the name of a file, or leave it out")


def is_new(path: Path) -> bool:
    """Whether there is nothing that a log could not go on in: a device, a folder."""
    return path.is_file() or not path.exists()


def folder_of_job(job: Allocation, command: Sequence[str]) -> Path:
    """A new folder for the logs of a launch of this job; if the job was started again, that of the
    same command's last start. The job may have other launches, also at the same time.
    """
    name = f"launch-{job.job or job.number}"
    folders = (Path(f"{name}.{number}" if number else name) for number in count())
    return next(folder for folder in folders if taken(folder, job.restarts, json.dumps(command)))


def taken(folder: Path, start: int, command: str) -> bool:
    """Take a folder that is new, or that the command had in an earlier start of the job."""
    # Only one launch of a start can make it.
    mine = folder / COMMAND.format(start)
    with suppress(FileExistsError):
        folder.mkdir()
        atomic.write_text(mine, command)
        return True
    with suppress(OSError):
        earlier = [path.read_text() for path in folder.glob(COMMAND.format("*"))]
        return command in earlier and atomic.create(mine, command)
    return False


def remove_logs(folder: Path, log: Path | None, of_run: bool, begun: bool = False) -> None:
    """Remove what an earlier launch has left in the folder of its logs, and nothing else, such as
    what an editor keeps beside a log that is open in it.

    Args:
        of_run: whether the folder is a run's, and not one that a user has chosen.
        begun: whether this launch is already writing the log of that name.

    Raises:
        Refusal: there is something else in a folder of a user's choice.
    """
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return
    ours = [path for path in paths if is_log(path, log, of_run)]
    if not of_run and (others := set(paths) - set(ours)):
        raise Refusal(
            f"--rank-logs {folder}: {min(others).name} there is no log of a launch; give a folder "
            "of its own, whose logs the next launch replaces"
        )
    for path in ours:
        if begun and log and path.name == log.name:
            continue
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def put_aside(folder: Path, start: int) -> Path:
    """Move the logs of a start into a folder of their own, which is returned."""
    kept = folder / f"start={start}"
    with suppress(OSError):
        kept.mkdir(exist_ok=True)
        for path in [*folder.iterdir()]:
            if LOGS.fullmatch(path.name):
                path.rename(kept / path.name)
    return kept


def is_log(path: Path, log: Path | None, of_run: bool) -> bool:
    """Whether a path in the folder of a launch's logs is one of them, or has those of a start."""
    if path.is_symlink() or not path.is_dir():
        named = log and path.name in (log.name, f"{log.name}.old")
        of_rules = of_run and LOGS_OF_RULES.fullmatch(path.name)
        return bool(LOGS.fullmatch(path.name) or named or of_rules)
    inside = (each for each in path.iterdir() if not each.name.startswith("."))
    return bool(START.fullmatch(path.name)) and all(is_log(each, log, of_run) for each in inside)
