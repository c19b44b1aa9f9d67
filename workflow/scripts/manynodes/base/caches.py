"""Caches of compiled code, where nobody else can write.

torch keeps Python files and pickles in /tmp/torchinductor_<user>. Whoever makes this folder first
runs code as that user (tried on torch 2.14).
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from manynodes.base.temporary import temporary_folder

CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
}


@contextmanager
def private_caches(given: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Variables with the folders of the caches that `given` does not name: in the user's own cache,
    or, if others can write there or nothing can be executed there, in temporary ones.
    """
    try:
        home = given.get("HOME")
        cache = given.get("XDG_CACHE_HOME") or (home and Path(home, ".cache"))
        if not cache:
            raise FileNotFoundError("this user has no home")
        folder = private_folder(Path(cache, "manynodes"))
    except OSError:
        with temporary_folder("caches-") as folder:
            yield folders_in(folder, given)
    else:
        yield folders_in(folder, given)


def folders_in(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    return {name: str(folder / cache) for name, cache in CACHES.items() if not given.get(name)}


def private_folder(path: Path) -> Path:
    """Make a folder for this user only.

    Raises:
        OSError: it cannot be made, is mounted noexec, or others could replace it or write in it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = path.resolve()
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not this user's alone")
    if is_noexec(path):
        raise PermissionError(f"{path} is mounted noexec")
    for parent in path.parents:
        status = parent.stat()
        ours = status.st_uid in (0, os.geteuid())
        shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if not ours or shared:
            raise PermissionError(f"{parent} can be changed by others")
    return path


def is_noexec(path: Path) -> bool:
    """Whether no compiled code in this folder can be executed."""
    return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
