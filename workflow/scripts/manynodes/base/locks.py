"""A file lock that names its holder and has a time limit."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from manynodes.base.errors import Refusal, one_line

# Seconds of waiting before a message is printed, and before it is given up.
TELL = 5.0
GIVE_UP = 1800.0
POLL = 0.2
MOST = 300  # bytes of a holder's own words


class NotLocked(Refusal):
    """A lock cannot be had: another process holds it for too long, its file is another user's, or
    the file system has none.
    """


@contextmanager
def locked(path: Path, tell: Callable[[str], None], give_up: float | None = None) -> Iterator[None]:
    """Hold a lock on this machine, in a file with the holder's name.

    Args:
        tell: gets a line if it takes long.
        give_up: seconds; GIVE_UP if not given.

    Raises:
        NotLocked: it cannot be had.
        OSError: the file cannot be made.
    """
    # Not through a symbolic link, whose target would be overwritten. For this user alone: whoever
    # can open it can hold it.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except PermissionError:
        if path.exists():
            raise NotLocked(
                f"{path} is another user's; delete it, if nothing of theirs runs"
            ) from None
        raise
    try:
        acquire(descriptor, path, tell, GIVE_UP if give_up is None else give_up)
        since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        note(descriptor, holder)
        yield
        note(descriptor, "")
    finally:
        os.close(descriptor)


def acquire(descriptor: int, path: Path, tell: Callable[[str], None], give_up: float) -> None:
    begun = time.monotonic()
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise NotLocked(
                    f"{path}: this file system has no locks (flock: {error.strerror}); have it "
                    "mounted with them, or use a folder on another one"
                ) from None
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        waited = time.monotonic() - begun
        if waited > give_up:
            raise NotLocked(
                f"{path} is still held by {holder_of(descriptor)} after {give_up:.0f} s; end that "
                "process and try again"
            )
        if waited > TELL and not told:
            told = True
            tell(
                f"waiting for {path}, held by {holder_of(descriptor)}; giving up after "
                f"{give_up:.0f} s"
            )
        time.sleep(POLL)


def note(descriptor: int, holder: str) -> None:
    # The name is only for messages. If the disk is full, the code that needs the space reports it,
    # with the path.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)


def holder_of(descriptor: int) -> str:
    said = os.pread(descriptor, MOST, 0).decode(errors="replace")
    return one_line(said, MOST) or "somebody who did not say who it is"
