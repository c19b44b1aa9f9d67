"""Temporary folders that do not outlive their process for long: what a killed one leaves, the next one removes."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Seconds within which a new folder is locked.
YOUNG = 1
# In memory, so that a node's full /tmp takes nothing from it.
MEMORY = Path("/dev/shm")


def parent_folder() -> Path:
    """Where the temporary folders lie: in memory where there is some, or else in TMPDIR."""
    return MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder that only this user can enter, removed at the end; a lock on it tells others that its process lives."""
    sweep(prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent_folder()))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield path
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)
        sweep(prefix)


def sweep(prefix: str) -> None:
    """Remove this user's folders of that prefix whose process is gone."""
    for path in parent_folder().glob(f"{prefix}*"):
        with suppress(OSError):
            status = path.lstat()
            # A younger one may not be locked yet.
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < YOUNG:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
