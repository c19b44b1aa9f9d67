"""Whether a node's copy of the data stays what it was, on a disk that others may write to."""

import math
import socket
import time
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path

from manynodes.data.folder import DataFolder


class Guard:
    """Looks at files of a copy that has been checked, or will be before they are used.

    Whoever writes to a file changes its times, so that a look costs no reading; only a file with
    other times is read again. Not every file system notes what is written through a mapping
    (tmpfs does not), nor does a disk that fails: hash what decides the result at the end too.

    Args:
        names: of its files.
    """

    def __init__(self, copy: DataFolder, names: Iterable[str]) -> None:
        self.copy = copy
        self.stamps = {name: stamp(copy.path / name) for name in names}
        self.names = cycle(self.stamps)

    def changed(self, seconds: float = math.inf) -> str:
        """A line that names a file with another content than its manifest says; empty if there is
        none. A file that is gone was read before, or is mapped.

        Args:
            seconds: after which the other files are left to the next look; many files on a network
                file system take long.
        """
        began = time.monotonic()
        for name in islice(self.names, len(self.stamps)):
            now = stamp(self.copy.path / name)
            if now not in (None, self.stamps[name]):
                if self.copy.damaged(name):
                    return f"{self.copy.path / name} on {socket.gethostname()}"
                self.stamps[name] = now
            if time.monotonic() - began > seconds:
                break
        return ""


def stamp(path: Path) -> tuple[int, int, int, int] | None:
    """What a write to a file changes; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
