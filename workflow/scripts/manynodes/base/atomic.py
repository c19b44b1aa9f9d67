"""Atomic files: written completely or not at all."""

import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Suffix of our temporary files; no other file has it.
TEMPORARY = ".ddp-tmp"
# What a file system without hard links answers.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# A temporary file that nobody has written to for so many seconds has lost its writer, on whatever
# machine.
ABANDONED = 3600


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_through_a_link(path: str, flags: int) -> int:
    """Open a file; a link in results of somebody else's could lead to any file."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; move the file to `path` on success, remove it on failure.

    Raises:
        OSError: the folder is not writable, or the disk is full; `path` is unchanged.
    """
    with beside(path) as (temporary, content):
        yield content
        fsync(content)
        temporary.replace(path)
        fsync(path.parent)


def write_often(path: Path, text: str) -> None:
    """Replace a text file that is written again soon, without waiting for the disk.

    Raises:
        OSError: as `replacing`.
    """
    with beside(path) as (temporary, content):
        content.write_text(text)
        temporary.replace(path)


def create(path: Path, text: str) -> bool:
    """Write a text file unless it exists. If several processes try at once, one succeeds.

    Returns:
        Whether this process wrote it.

    Raises:
        OSError: as `replacing`.
    """
    with beside(path) as (temporary, content):
        content.write_text(text)
        try:
            # On network file systems too, a hard link is exclusive, and the file has its content at
            # once.
            os.link(temporary, path)
        except FileExistsError:
            # A network file system may answer so to a request that it had carried out.
            return temporary.stat().st_nlink == 2
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # For a moment the file is empty, and would be taken for nobody's.
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                return False
    return True


@contextmanager
def beside(path: Path) -> Iterator[tuple[Path, Path]]:
    """A new file beside `path`, removed at the end; an OSError names `path`.

    Returns:
        Its name, and a path that leads to it even if somebody puts a link of that name in its place
        before it is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{TEMPORARY}")
    try:
        # It could be a link that came with somebody else's results.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=not_through_a_link) as file:
            yield temporary, Path(f"/proc/self/fd/{file.fileno()}")
    except OSError as error:
        # A failed write does not name its path, which the user needs to know.
        error.filename = str(path)
        raise
    finally:
        # On a read-only file system, even removing a missing file fails and would hide the first
        # error.
        with suppress(OSError):
            temporary.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files whose writers were killed."""
    for leftover in folder.glob(f".*{TEMPORARY}"):
        name, _, pid = leftover.stem.rpartition(".")
        # Another process may remove it at the same time; one that stays does no harm.
        with suppress(OSError):
            status = leftover.lstat()
            # A process number means nothing on another machine, where a writer may still be
            # running; and a system may hide the processes of other users.
            here = name.endswith(f".{socket.gethostname()}") and status.st_uid == os.geteuid()
            gone = here and not Path("/proc", pid).exists()
            # The clock of a file server may be an hour behind; but the number of a writer here may
            # be another process's by now.
            patience = ABANDONED * (24 if here else 1)
            if gone or time.time() - status.st_mtime > patience:
                leftover.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        OSError: as `replacing`; for a full disk it says how much is needed and how much is free.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # The rest of a quota cannot be asked for, unlike the free space of a disk.
            free = (
                f", {megabytes(shutil.disk_usage(path.parent).free)} free"
                if error.errno == errno.ENOSPC
                else ""
            )
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: {megabytes(len(content))} needed{free}",
                str(path),
            ) from None
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; raises as `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, to be read by people too; raises as `write_bytes`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.3f} MB"
