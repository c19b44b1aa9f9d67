"""Temporary folders; if their process was killed, the next one removes them."""

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

# Nobody else's folders have such a name; and only these are removed.
OURS = "manynodes-"
RANDOM = re.compile(r"[a-z0-9_]{8}")  # what mkdtemp adds
# Of copies of a user's Python files.
SOURCES = "sources-"
# Those that this process holds.
HELD: set[Path] = set()
# Seconds in which a new folder gets its lock, and then its name; its process may be suspended in
# between.
YOUNG = 60
# In memory: this works with a full /tmp. A container's may be small, or full.
MEMORY = Path("/dev/shm")
ENOUGH = 16_000_000  # bytes


def parent_folder() -> Path:
    """Where temporary folders are made: in memory if there is room and code may be executed there,
    otherwise in TMPDIR.
    """
    with suppress(OSError):
        noexec = os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
        if (
            not noexec
            and os.access(MEMORY, os.W_OK | os.X_OK)
            and (shutil.disk_usage(MEMORY).free > ENOUGH)
        ):
            return MEMORY
    return Path(tempfile.gettempdir())


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder that only this user can enter, removed at the end. A lock shows that its
    process lives.
    """
    sweep(prefix)
    new = Path(tempfile.mkdtemp(prefix=f".{OURS}{prefix}", dir=parent_folder()))
    path = new.with_name(new.name[1:])
    descriptor = os.open(new, os.O_RDONLY)
    HELD.add(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # It has its name only with its lock: one without is nobody's, however young it is.
        new.rename(path)
        yield path
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)
        HELD.discard(path)
        sweep(prefix)


def exit_at_once(status: int) -> NoReturn:
    """End this process without Python's own end, which may wait for others, and leave no temporary
    folder. From any thread.
    """
    try:
        for path in list(HELD):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os._exit(status)


def file_without_a_name() -> IO[str]:
    """A file in memory, which works with a full /tmp, and of which a killed process leaves nothing.
    Conda's Python is built for systems that have none; then one that is removed already.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("manynodes"), "r", errors="replace")
    return tempfile.TemporaryFile("w+", dir=parent_folder(), errors="replace")


def sweep(prefix: str) -> None:
    """Remove this user's folders of `temporary_folder` with this prefix whose process has ended."""
    folder, whole = parent_folder(), f"{OURS}{prefix}"
    for path in (*folder.glob(f"{whole}*"), *folder.glob(f".{whole}*")):
        with suppress(OSError):
            if not RANDOM.fullmatch(path.name.removeprefix(".").removeprefix(whole)):
                continue
            status = path.lstat()
            young = path.name[0] == "." and time.time() - status.st_mtime < YOUNG
            # Below a folder with setgid it has that too.
            private = status.st_mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO) == stat.S_IRWXU
            if status.st_uid != os.getuid() or young or not private:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def content_of(file: IO[str]) -> str:
    """What another process has written to a file of `file_without_a_name`."""
    number = file.fileno()
    return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")
