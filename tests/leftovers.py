"""What tests start, and what may be left of it.

Every process that a test starts inherits MARK in its environment, with the process that runs the
tests and the test or fixture. So a process is found wherever it has gone: in another session,
with another parent, or on a node of a test cluster, whose processes the host sees too.
"""

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from manynodes.base import temporary
from manynodes.base.processes import STARTED, stat_of

MARK = "MANYNODES_TEST"
# Of the folders of one run of the tests, in the system's temporary folder.
FOLDERS = "manynodes-tests-"
# The namespace outside of all containers, in every Linux.
MACHINE = "4026531836"
# OpenPBS's qsub leaves a process for the next submission, which ends by itself after a minute.
STAYS = re.compile(rb"(/opt/pbs/bin/)?qsub\0")
# Where tests make control groups, which are named like their folders: in version 1, each controller
# has a place of its own.
CONTROL_GROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "cpu")
# Of the temporary folders that the programs make in memory.
IN_MEMORY = ("launch-", "sources-")
# Seconds in which what is ending may end. A rank without its launcher needs 40.
PATIENCE = 60


# Of a test: whether any part of it has failed.
FAILED = pytest.StashKey[bool]()


def owner(pid: int) -> str:
    """A process that runs tests: its number, which can come again, when it began, and in a
    container, which of them gave it this number.
    """
    of_container = "" if container() == MACHINE else f"-{container()}"
    return f"{pid}-{stat_of(pid)[STARTED]}{of_container}"


def container() -> str:
    """The number of this process's namespace of processes."""
    return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")


def is_over(name: str) -> bool:
    """Whether the process of this name, see `owner`, has ended. Of one in another container, which
    shares a folder with us or whose processes we see, nothing is known.
    """
    pid, _, rest = name.partition("-")
    if (rest.partition("-")[2] or MACHINE) != container():
        return False
    with suppress(OSError, ValueError):
        return owner(int(pid)) != name
    return True


def marked() -> dict[int, str]:
    """The marks of all processes that have one, by process number."""
    found, entry = {}, f"{MARK}=".encode()
    for folder in os.scandir("/proc"):
        if folder.name.isdigit():
            # A process may end while we look; that of another user is not ours.
            with suppress(OSError):
                environment = Path(folder.path, "environ").read_bytes()
                if (start := (b"\0" + environment).find(b"\0" + entry)) >= 0:
                    value = environment[start + len(entry) :].partition(b"\0")[0]
                    found[int(folder.name)] = value.decode(errors="replace")
    return found


def living(marks: Collection[str]) -> dict[int, str]:
    """The command lines of all other processes with one of these marks, by process number."""
    found = {}
    for pid, mark in marked().items():
        if mark in marks and pid != os.getpid():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if not STAYS.match(command):
                    found[pid] = command.replace(b"\0", b" ").decode(errors="replace")[:200]
    return found


def kill(wanted: Callable[[str], bool]) -> None:
    """Kill every process whose mark is wanted, until there is none."""
    while pids := [pid for pid, value in marked().items() if wanted(value) and pid != os.getpid()]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def sockets() -> set[tuple[object, ...]]:
    """The addresses at which this process listens, such as a server in a thread of the tests.

    By its own descriptors: /proc/net has all of the machine, in a table that takes 3 ms to read.
    """
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        # The folder's own is closed by now.
        with suppress(OSError):
            if link.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.getsockopt(
                        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                    ):
                        found.add(each.getsockname())
    return found


def in_memory(since: float) -> list[str]:
    """Temporary folders of the programs, younger than a moment, whose process has ended."""
    return [
        str(path)
        for prefix in IN_MEMORY
        for path in temporary.parent_folder().glob(f"{temporary.OURS}{prefix}*")
        if is_left(path, since)
    ]


def is_left(path: Path, since: float) -> bool:
    with suppress(OSError):
        status = path.lstat()
        # One that has no lock yet has it when we look again.
        return status.st_uid == os.getuid() and status.st_mtime >= since and not is_locked(path)
    return False


def is_locked(path: Path) -> bool:
    """Whether the process that made a temporary folder still holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def folder_of(name: str) -> Path:
    """The folder of one run of the tests."""
    return Path(tempfile.gettempdir(), f"{FOLDERS}{name}")


def sweep() -> None:
    """Remove what is left of runs of the tests that were killed."""
    kill(lambda value: is_over(value.partition(" ")[0]))
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        if is_over(folder.name.removeprefix(FOLDERS)):
            unmount_below(folder)
            shutil.rmtree(folder, ignore_errors=True)
    for controller in CONTROLLERS:
        for group in control_groups(controller).glob(f"{FOLDERS}*"):
            if is_over(group.name.removeprefix(FOLDERS)):
                # It may be another user's.
                with suppress(OSError):
                    group.rmdir()
    for prefix in IN_MEMORY:
        temporary.sweep(prefix)


def control_groups(controller: str) -> Path:
    of_version_1 = CONTROL_GROUPS / controller
    return of_version_1 if of_version_1.is_dir() else CONTROL_GROUPS


@contextmanager
def control_group(controller: str, limits: Mapping[str, object]) -> Iterator[list[str]]:
    """The command that enters a control group with these limits; without the right to make one, the
    test is skipped.

    Args:
        limits: by file; those that this version has are written.
    """
    group = control_groups(controller) / f"{FOLDERS}{owner(os.getpid())}"
    try:
        group.mkdir()
        there = [name for name in limits if (group / name).exists()]
        if not there:
            raise FileNotFoundError(f"{group} has none of {', '.join(limits)}")
        for name in there:
            (group / name).write_text(str(limits[name]))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"control groups need root: {error}")
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def unmount_below(folder: Path) -> None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        # Blanks are written as octal numbers.
        mounted = line.split()[1].encode().decode("unicode_escape")
        if Path(mounted).is_relative_to(folder):
            subprocess.run(["umount", "--lazy", mounted], check=False)


def after_grace(left: Callable[[], Collection[str]]) -> list[str]:
    """What is left once what is ending has had its time."""
    deadline = time.monotonic() + PATIENCE
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return list(found)
