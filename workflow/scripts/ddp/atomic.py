"""Files that are whole or not there."""

import errno
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# What the name of a temporary file ends with; nobody else's does.
TEMPORARY = ".ddp-tmp"
# Seconds after which one that is not written to has lost its writer, on whatever machine that was.
ABANDONED = 3600


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's entries, outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success move it there, durably; on failure remove it.

    Raises:
        OSError: the folder is not writable, or the disk is full; `path` is then as it was.
    """
    with beside(path) as temporary:
        yield temporary
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)


def create(path: Path, text: str) -> bool:
    """Write a text file unless it is there; of all who try at once, one does. Returns whether it was written.

    Raises:
        OSError: as for `replacing`.
    """
    with beside(path) as temporary:
        temporary.write_text(text)
        try:
            # Of all that make files, a link is exclusive on network file systems too, and with the content in it.
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, removed in the end; an OSError names `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{TEMPORARY}")
    try:
        yield temporary
    except OSError as error:
        # A failed write does not say where it was: the path is half of what a user needs to know.
        error.filename = str(path)
        raise
    finally:
        # On a read-only file system even removing what is not there fails, and would hide what failed first.
        with suppress(OSError):
            temporary.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files in a folder whose writers were killed: SIGKILL lets nobody tidy up."""
    for leftover in folder.glob(f".*{TEMPORARY}"):
        name, _, pid = leftover.stem.rpartition(".")
        # The number of a process says nothing on another machine, and a writer there may be at work.
        gone = name.endswith(f".{socket.gethostname()}") and not Path("/proc", pid).exists()
        # Whoever else finds it removes it too, and one that stays does no harm.
        with suppress(OSError):
            if gone or time.time() - leftover.stat().st_mtime > ABANDONED:
                leftover.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or not there.

    Raises:
        OSError: as for `replacing`; on a full disk it says how much is needed and how much there is.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # A quota's rest cannot be asked for like a disk's.
            free = f", {megabytes(shutil.disk_usage(path.parent).free)} free" if error.errno == errno.ENOSPC else ""
            raise OSError(error.errno, f"{os.strerror(error.errno)}: {megabytes(len(content))} needed{free}", str(path)) from None
        raise


def write_text(path: Path, text: str) -> None:
    """The same for text."""
    write_bytes(path, text.encode())


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.3f} MB"
