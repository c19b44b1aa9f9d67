"""Temporary folders; if their process was killed, the next one removes them."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

# Of copies of a user's Python files.
SOURCES = "sources-"
# Those that this process holds.
HELD: set[Path] = set()
# Seconds in which a new folder gets its lock, and then its name.
YOUNG = 1
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
    new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent_folder()))
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
        return os.fdopen(os.memfd_create("manynodes"), "r")
    return tempfile.TemporaryFile("w+", dir=parent_folder())


def sweep(prefix: str) -> None:
    """Remove this user's folders with this prefix whose process has ended."""
    folder = parent_folder()
    for path in (*folder.glob(f"{prefix}*"), *folder.glob(f".{prefix}*")):
        with suppress(OSError):
            status = path.lstat()
            young = path.name[0] == "." and time.time() - status.st_mtime < YOUNG
            if status.st_uid != os.getuid() or young:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
