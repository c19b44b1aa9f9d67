"""One verified copy of a data folder on a node's scratch, however many processes ask for it."""

import errno
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp.data_folder import MANIFEST, damaged_files, read_manifest
from ddp.errors import Refusal, os_error_line
from ddp.locks import LockHeld, locked

# Sites set this to a folder that they make for a job and remove after it.
JOBS_OWN = "$SLURM_TMPDIR"
OVERFLOW_UID = 65534  # /proc/sys/kernel/overflowuid


@dataclass(frozen=True)
class Staged:
    """What a node reads from, and how it came there.

    Attributes:
        host: name of the node.
        path: folder to read.
        bytes: size of the data files there.
        seconds: wall-clock time it took to have them there, checked.
        status: `fresh` (copied now), `reused` (a valid copy was there) or `fallback` (the shared copy is read).
        reason: why it is a fallback; empty otherwise.
        own: it is in a scratch that is the job's own, so that nobody will reuse it.
    """

    host: str
    path: str
    bytes: int
    seconds: float
    status: str
    reason: str = ""
    own: bool = False

    def __str__(self) -> str:
        how = f"{self.status} {self.path}, {self.bytes / 1e6:,.1f} MB in {self.seconds:.2f} s"
        return f"stage: {self.host}: {how}" + (f"; warning: the shared copy is read, because {self.reason}" if self.reason else "")


def stage(source: Path, scratch: Sequence[str]) -> Staged:
    """Have a verified copy of the data folder on the first usable scratch; read the shared copy where there is none.

    Processes that ask at the same time share one copy: a lock lets one of them make it. A copy is taken for valid only if
    each file hashes to what the manifest of `source` says.

    Args:
        source: the shared data folder, with its manifest.
        scratch: folders to try in order; `$NAME` stands for an environment variable of this node, `~` for the home folder.

    Raises:
        Refusal: the shared copy has no manifest, or does not match it.
    """
    start = time.perf_counter()
    manifest = read_manifest(source)
    size = sum(file["bytes"] for file in manifest["files"].values())

    def report(path: Path, status: str, reason: str = "", own: bool = False) -> Staged:
        return Staged(socket.gethostname(), str(path), size, round(time.perf_counter() - start, 3), status, reason, own)

    reasons = []
    for entry in scratch:
        folder = os.path.expandvars(os.path.expanduser(entry))  # noqa: PTH111, Path.expanduser raises where there is no such user
        if "$" in folder or not Path(folder).is_absolute():
            continue  # the variable is not set on this node, or empty
        try:
            # Named for its content, so that two versions of a data set never share a folder.
            target = private_folder(Path(folder)) / f"{manifest['dataset']}-{manifest['sha256'][:12]}"
            return report(target, copy_once(source, manifest, size, target), own=entry.startswith(JOBS_OWN))
        except LockHeld as held:
            reasons.append(str(held))
        except OSError as error:
            reasons.append(os_error_line(error) if error.filename else f"{folder}: {os_error_line(error)}")
    reason = "; ".join(reasons) or "no scratch folder is set on this node"
    if damaged := damaged_files(source, manifest):
        raise Refusal(damaged_source(source, damaged))
    return report(source, "fallback", reason)


def tell(line: str) -> None:
    print(f"stage: {line}", file=sys.stderr, flush=True)


def discard(staged: Staged) -> None:
    """Remove a copy that nobody will reuse; for one process of a node, once all of them have read it."""
    if staged.own:
        shutil.rmtree(staged.path, ignore_errors=True)


def damaged_source(source: Path, damaged: Sequence[str]) -> str:
    manifest = source / MANIFEST
    return (
        f"{source}: {', '.join(damaged)} missing or changed since fetched; "
        f"fetch again: snakemake --profile profiles/local --force {manifest}"
    )


def private_folder(scratch: Path) -> Path:
    """This user's own folder on a scratch that others may write to.

    Raises:
        OSError: the scratch is missing or not writable, or the scratch or the folder belongs to somebody else, or lets everybody exchange
            what is in it.
    """
    if not scratch.is_dir():
        raise FileNotFoundError(2, "no such folder", str(scratch))
    around = scratch.stat()
    if around.st_uid not in (0, os.getuid()) and not (around.st_uid == OVERFLOW_UID and in_user_namespace()):
        raise PermissionError(1, "belongs to another user, who could exchange what is staged", str(scratch))
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        raise PermissionError(1, "everybody may rename what is in it; its administrator should set the sticky bit", str(scratch))
    folder = scratch / f"ddp-data-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(1, "belongs to somebody else, or others may write to it", str(folder))
    return folder


def in_user_namespace() -> bool:
    """Whether root's files are shown as somebody's who is not there, as in a container that was started without root."""
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]


def copy_once(source: Path, manifest: dict, size: int, target: Path) -> str:
    """Make the copy unless a valid one is there.

    Returns:
        `reused` or `fresh`.

    Raises:
        OSError: the scratch cannot hold it.
        Refusal: the source does not match its manifest.
    """
    # Checked before the lock, so that the processes of a node check a copy that is there side by side.
    if target.is_dir() and not damaged_files(target, manifest):
        return "reused"
    with locked(target.with_name(f"{target.name}.lock"), tell):
        if target.is_dir() and not damaged_files(target, manifest):
            return "reused"
        for leftover in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        if (free := shutil.disk_usage(target.parent).free) < size:
            raise OSError(28, f"{free / 1e6:,.0f} MB free, the data need {size / 1e6:,.0f} MB", str(target.parent))
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            for name, known in manifest["files"].items():
                # A link to a device, or a file of a terabyte, would be copied until nothing fits any more.
                if not (source / name).is_file() or (source / name).stat().st_size != known["bytes"]:
                    raise Refusal(damaged_source(source, [name]))
                shutil.copyfile(source / name, work / name)
            (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            if damaged_files(work, manifest):
                refuse_damaged_source(source, manifest)
                raise OSError(5, "what was written there does not read back", str(target.parent))
            work.rename(target)
        except FileNotFoundError:
            refuse_damaged_source(source, manifest)
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # copyfile blames what it read for what it could not write.
                error.filename = str(target.parent)
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return "fresh"


def refuse_damaged_source(source: Path, manifest: dict) -> None:
    if damaged := damaged_files(source, manifest):
        raise Refusal(damaged_source(source, damaged))
