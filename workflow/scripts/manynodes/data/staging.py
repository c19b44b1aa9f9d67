"""One verified copy of a data folder on a node's scratch, for any number of processes."""

import errno
import json
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import Refusal, os_error_line
from manynodes.base.locks import NotLocked, locked
from manynodes.data.folder import MANIFEST, DataFolder

OVERFLOW_UID = 65534  # /proc/sys/kernel/overflowuid


@dataclass(frozen=True)
class Staged:
    """Where a node reads its data, and how they came there.

    Attributes:
        host: name of the node.
        path: folder to read.
        bytes: size of the data files.
        seconds: wall-clock time of copying and checking.
        status: `fresh` (copied now), `reused` (a valid copy existed) or `fallback` (the shared
            copy).
        reason: of a fallback; otherwise empty.
        of_job: the scratch belongs to the job, so nobody will reuse the copy.
    """

    host: str
    path: str
    bytes: int
    seconds: float
    status: str
    reason: str = ""
    of_job: bool = False

    def __str__(self) -> str:
        how = f"{self.status} {self.path}, {self.bytes / 1e6:,.1f} MB in {self.seconds:.2f} s"
        return f"stage: {self.host}: {how}" + (
            f"; warning: using the shared copy, because {self.reason}" if self.reason else ""
        )


def stage(
    source: DataFolder,
    scratch: Sequence[str],
    job_scratch: str | None = None,
    refuse: Callable[[Path], None] | None = None,
) -> Staged:
    """Make a verified copy of the data folder on the first usable scratch folder.

    Processes that ask at the same time share one copy: a lock lets one of them make it. A copy is
    valid only if each file has the SHA-256 of the source's manifest. Without a usable scratch
    folder the shared copy is used.

    Args:
        source: the shared data folder.
        scratch: folders to try in order; `$NAME` is an environment variable of this node, `~`
            the home folder.
        job_scratch: name of the variable with a scratch folder that belongs to this job alone.
        refuse: raises an OSError for a scratch folder that is of no use. With it, nobody reads the
            shared copy of a fallback, which is then not verified.

    Raises:
        Refusal: the shared copy does not match its manifest.
    """
    start = time.perf_counter()

    def report(path: Path, status: str, reason: str = "", of_job: bool = False) -> Staged:
        seconds = round(time.perf_counter() - start, 3)
        return Staged(
            socket.gethostname(), str(path), source.bytes, seconds, status, reason, of_job
        )

    reasons = []
    for entry in scratch:
        # Path.expanduser raises an error if there is no such user.
        folder = os.path.expandvars(os.path.expanduser(entry))  # noqa: PTH111
        if "$" in folder or not Path(folder).is_absolute():
            continue  # the variable is not set on this node, or empty
        name = re.match(r"\$\{?(\w+)", entry)
        of_job = name is not None and name[1] == job_scratch
        try:
            # Named for its content, so that two versions of a data set never share a folder.
            target = private_folder(Path(folder)) / f"{source.dataset}-{source.sha256[:12]}"
            if refuse:
                refuse(Path(folder))
            return report(target, copy_once(source, target), of_job=of_job)
        except NotLocked as problem:
            reasons.append(str(problem))
        except OSError as error:
            line = os_error_line(error)
            reasons.append(line if error.filename else f"{folder}: {line}")
    # $TMPDIR may be /tmp.
    reason = "; ".join(dict.fromkeys(reasons)) or "no scratch folder is set on this node"
    if refuse is None:
        refuse_damaged(source)
    return report(source.path, "fallback", reason)


def tell(line: str) -> None:
    print(f"stage: {line}", file=sys.stderr, flush=True)


def discard(staged: Staged) -> None:
    """Remove a copy that nobody will reuse; one process per node calls it."""
    if staged.of_job:
        shutil.rmtree(staged.path, ignore_errors=True)


def refuse_damaged(source: DataFolder, damaged: Sequence[str] | None = None) -> None:
    """Refuse a shared copy of data, files or an environment that does not match its manifest.

    Args:
        damaged: names of its damaged files; all files are checked unless given.

    Raises:
        Refusal: naming them.
    """
    damaged = source.damaged_files() if damaged is None else damaged
    if damaged:
        made = "its manifest was made; make it again"
        if "classes" in source.manifest:
            made = "fetched; fetch the data again"
        problem = f"{source.path}: {', '.join(damaged)} missing or changed since {made}"
        raise Refusal(problem, make_again=source.path / MANIFEST)


def private_folder(scratch: Path) -> Path:
    """This user's own folder on a scratch that others may write to.

    Raises:
        OSError: the scratch is missing or not writable; or scratch or folder belong to another
            user, or let others replace their content.
    """
    if not scratch.is_dir():
        raise FileNotFoundError(2, "no such folder", str(scratch))
    around = scratch.stat()
    if around.st_uid not in (0, os.getuid()) and not (
        around.st_uid == OVERFLOW_UID and in_user_namespace()
    ):
        raise PermissionError(
            1, "belongs to another user, who could replace staged data", str(scratch)
        )
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        raise PermissionError(
            1,
            "everybody may rename files in it; ask its administrator for the sticky bit",
            str(scratch),
        )
    folder = scratch / f"ddp-data-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder.lstat()):
        raise PermissionError(1, "belongs to somebody else, or others may write to it", str(folder))
    return folder


def is_private(status: os.stat_result) -> bool:
    """Whether nobody but this user can put a file into a folder; never of a link, whose mode lets
    everybody write.
    """
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.getuid() and not others


def in_user_namespace() -> bool:
    """Whether root's files appear to belong to nobody, as in a container started without root."""
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]


def is_valid(copy: DataFolder, source: DataFolder) -> bool:
    """Whether a copy is that of the source. What is executable, and what the manifest says besides
    the files' sums, such as the names of the classes, makes no other version: that is put right
    here.
    """
    if not copy.path.is_dir() or copy.damaged_files():
        return False
    let_execute(source, copy.path)
    manifest, text = copy.path / MANIFEST, text_of(source.manifest)
    if not manifest.is_file() or manifest.read_bytes() != text:
        atomic.write_bytes(manifest, text)
    return True


def text_of(manifest: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(manifest, indent=2)}\n".encode()


def let_execute(source: DataFolder, copy: Path) -> None:
    """Make the files of a copy executable that are so in the source."""
    for name in source.manifest["files"]:
        # By its mode: on a scratch without execution nothing can be executed.
        is_executable = (copy / name).stat().st_mode & stat.S_IXUSR
        if not is_executable and os.access(source.path / name, os.X_OK):
            (copy / name).chmod(0o700)


def copy_once(source: DataFolder, target: Path) -> str:
    """Make the copy unless a valid one is there.

    Returns:
        `reused` or `fresh`.

    Raises:
        OSError: the scratch cannot hold it.
        Refusal: the source does not match its manifest.
    """
    copy = source.at(target)
    # Before the lock, so that the processes of a node check a copy in parallel.
    if is_valid(copy, source):
        return "reused"
    with locked(target.with_name(f"{target.name}.lock"), tell):
        if is_valid(copy, source):
            return "reused"
        for leftover in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        if (free := shutil.disk_usage(target.parent).free) < source.bytes:
            problem = f"{free / 1e6:,.1f} MB free, the data need {source.bytes / 1e6:,.1f} MB"
            raise OSError(errno.ENOSPC, problem, str(target.parent))
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            for name, known in source.manifest["files"].items():
                file = source.path / name
                # A link to a device, or a file of a terabyte, would fill the scratch.
                if not file.is_file() or file.stat().st_size != known["bytes"]:
                    refuse_damaged(source, [name])
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, work / name)
            let_execute(source, work)
            (work / MANIFEST).write_bytes(text_of(source.manifest))
            if source.at(work).damaged_files():
                refuse_damaged(source)
                raise OSError(errno.EIO, "the written copy reads back damaged", str(target.parent))
            work.rename(target)
        except FileNotFoundError:
            refuse_damaged(source)
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # copyfile names the file that it read instead of the one that it could not write.
                error.filename = str(target.parent)
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return "fresh"
