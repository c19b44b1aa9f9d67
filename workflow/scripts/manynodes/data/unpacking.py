"""An environment that has been staged: an archive, unpacked beside its copy once for all processes
of a node, or the image of a container.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from manynodes.base.caches import is_noexec
from manynodes.base.errors import Refusal, os_error_line
from manynodes.base.locks import NotLocked, locked
from manynodes.data.folder import DataFolder
from manynodes.data.staging import Staged, is_private, stage

ARCHIVE = "environment.tar.zst"
BLOCK = 1 << 20  # bytes of it that are read or written in one call
NAMED = ".named.json"  # in it, last: a `Named`
# Beside what was unpacked: by which node, since which start of it, and how many files there are.
COMPLETE = ".complete"
STARTED = Path("/proc/sys/kernel/random/boot_id")
# In the working folder: an empty file for each archive that this user has packed there.
PACKED = Path(f".snakemake/packed-{os.getuid()}")


@dataclass(frozen=True)
class Named:
    """The texts of a packed folder that name it: first lines of scripts, conda's activation
    scripts, pkg-config's files. Libraries that name it, such as conda's OpenSSL, stay as they are.

    Attributes:
        prefixes: paths of the folder; none is the beginning of a later one.
        files: names in it.
    """

    prefixes: Sequence[str]
    files: list[str] = field(default_factory=list)

    def is_in(self, content: bytes) -> bool:
        """Whether it is a text that names the folder."""
        named = any(os.fsencode(prefix) in content for prefix in self.prefixes)
        return named and b"\0" not in content

    def rename(self, folder: Path, place: Path) -> None:
        """Let these texts, in a folder, name the place where it will be."""
        names = b"|".join(re.escape(os.fsencode(prefix)) for prefix in self.prefixes)
        # Not /envs/torch in /envs/torch-2, nor in /gpfs/envs/torch, but in -L/envs/torch/lib.
        pattern = re.compile(rb"(?:(?<![\w.}-])|(?<=-[A-Z])|(?<=-isystem))(?:%b)(?![\w.-])" % names)
        for name in self.files:
            path = folder / name
            mode = path.stat().st_mode
            path.chmod(mode | stat.S_IWUSR)
            path.write_bytes(pattern.sub(lambda _: os.fsencode(place), path.read_bytes()))
            path.chmod(mode)


def refuse_shared_notes() -> None:
    """Refuse to pack where `refuse_foreign` would not believe a note.

    Raises:
        Refusal: always then.
        OSError: nothing can be written here.
    """
    PACKED.mkdir(parents=True, exist_ok=True)
    PACKED.chmod(0o700)
    if not is_private(PACKED.lstat()):
        raise Refusal(
            f"{PACKED}: its file system shows another owner or mode than a folder was given; leave "
            "environment.stage out"
        )


def note_packed(source: DataFolder) -> None:
    """Note that this process has packed it.

    Raises:
        OSError: it cannot be written.
    """
    (PACKED / sha256_of(source)).touch()


def refuse_foreign(source: DataFolder) -> None:
    """Refuse an archive that this user has not packed here, such as one in the results of somebody
    else, or one that a member of the group has put there: its Python would run.

    Raises:
        Refusal: always then.
    """
    known = False
    with suppress(OSError):
        folder, note = PACKED.lstat(), (PACKED / sha256_of(source)).lstat()
        # Nobody else can have made it.
        known = is_private(folder) and note.st_uid == os.getuid()
    if not known:
        raise Refusal(
            f"{source.path} was not packed by you in this folder; pack it first: this command "
            f"--force {source.path}/manifest.json"
        )


def sha256_of(source: DataFolder) -> str:
    """SHA-256 of its manifest, which names the copy too."""
    return hashlib.sha256(json.dumps(source.manifest, sort_keys=True).encode()).hexdigest()


def unpacked_here(
    source: DataFolder,
    scratch: Sequence[str],
    job_scratch: str | None,
    tell: Callable[[str], None],
) -> tuple[Staged, Path | None]:
    """The archive as staged on this node, and the folder with its content; None if the node cannot
    have it: then a line says why, and the shared folder that was packed serves. Of an image, its
    copy.

    Args:
        source: the shared folder with the archive, or a link to the image, and a manifest.
        scratch, job_scratch: as for `staging.stage`.

    Raises:
        Refusal: the archive does not match its manifest, or is somebody else's.
    """
    refuse_foreign(source)
    (file,) = source.manifest["files"]
    staged = stage(source, scratch, job_scratch, partial(refuse_unsafe, executes=file == ARCHIVE))
    if staged.status == "fallback":
        reason = staged.reason
    elif file != ARCHIVE:
        return staged, Path(staged.path, file)
    else:
        try:
            return staged, unpacked(source.at(Path(staged.path)), tell)
        except NotLocked as problem:
            reason = str(problem)
        except OSError as error:
            reason = os_error_line(error)
    tell(f"warning: using the shared environment, because {reason}")
    shared = replace(staged, path=str(source.path), of_job=False)
    return replace(shared, status="fallback", reason=reason), None


def refuse_unsafe(scratch: Path, executes: bool) -> None:
    """Refuse a scratch folder of which no environment can be used.

    Args:
        executes: programs will be started from it.

    Raises:
        OSError: always then.
    """
    for folder in (scratch, *scratch.resolve().parents):
        if folder.stat().st_mode & (stat.S_IWGRP | stat.S_ISVTX) == stat.S_IWGRP:
            # Of data, every copy is hashed; of an environment, each file when it is imported is
            # not.
            raise PermissionError(
                1, "its group may replace files in it; it has no sticky bit", str(folder)
            )
    if executes and is_noexec(scratch):
        raise PermissionError(1, "mounted noexec", str(scratch))


def unpacked(copy: DataFolder, tell: Callable[[str], None]) -> Path:
    """The folder with the content of a verified archive; unpacked now, or before.

    Args:
        copy: on a folder that only this user can write to, see `staging.stage`.
        tell: gets a line if another process unpacks it.

    Raises:
        Refusal: it is no archive.
        OSError: there is no space for it.
    """
    # Few programs have an environment that is staged, and a site may not have installed it.
    import zstandard

    target = copy.path.with_name(f"{copy.path.name}-unpacked")
    if is_whole(target):
        return target
    started = STARTED.read_text().strip()
    with locked(target.with_name(f"{target.name}.lock"), tell):
        if is_whole(target):
            return target
        for leftover in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if is_of_earlier_start(target):
            # Nobody runs from it, and there may be no room for both.
            shutil.rmtree(target, ignore_errors=True)
        work, aside = (
            Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)) for _ in range(2)
        )
        try:
            with (
                (copy.path / ARCHIVE).open("rb") as file,
                zstandard.ZstdDecompressor().stream_reader(file) as content,
                tarfile.open(fileobj=content, mode="r|", bufsize=BLOCK) as archive,
            ):
                # Ours, see `refuse_foreign`. Links of a venv lead out of it, to the Python that it
                # was made from.
                archive.extraction_filter = lambda member, _: member
                archive.extractall(work)
            Named(**json.loads((work / NAMED).read_bytes())).rename(work, target)
            line = f"{socket.gethostname()} {started} {files_in(work) + 1}"
            (work / COMPLETE).write_text(line)
            # Another job may run from what is there, and finds this in its place.
            with suppress(FileNotFoundError):
                target.rename(aside)
            work.rename(target)
        except OSError as error:
            # A full disk's error names no file, or the member.
            error.filename = str(target.parent)
            raise
        except (tarfile.TarError, zstandard.ZstdError) as error:
            raise Refusal(f"{copy.path / ARCHIVE}: {error}; delete it and try again") from None
        finally:
            for folder in (work, aside):
                shutil.rmtree(folder, ignore_errors=True)
    return target


def is_whole(target: Path) -> bool:
    """Whether an unpacked archive has all of its files: a site may remove those of an old date, as
    an archive's are.
    """
    files = about(target)[2]
    return bool(files) and not is_of_earlier_start(target) and int(files) <= files_in(target)


def is_of_earlier_start(target: Path) -> bool:
    """Whether this node has been started since it was unpacked: it may have lost its power before
    the files were on its disk, and they be empty. Of a folder that nodes share, nothing is known.
    """
    node, started, _ = about(target)
    return node == socket.gethostname() and started != STARTED.read_text().strip()


def about(target: Path) -> tuple[str, str, str]:
    """What COMPLETE says: the node, its start, the number of files; empty if it is not there."""
    with suppress(FileNotFoundError):
        if known := re.fullmatch(r"(\S+) (\S+) (\d+)", (target / COMPLETE).read_text()):
            return known[1], known[2], known[3]
    return "", "", ""


def files_in(folder: Path) -> int:
    """The number of files and folders in a folder but for bytecode, which Python makes anew."""
    return sum(
        len(files) + len({*folders} - {"__pycache__"})
        for path, folders, files in os.walk(folder)
        if not path.endswith("__pycache__")
    )
