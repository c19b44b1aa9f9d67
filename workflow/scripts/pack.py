"""Pack the environment of a user's program into one archive, which each node reads in one go.

A Python with torch is tens of thousands of files: imported from a shared file system by many nodes
at once, they take minutes. The image of a container is one file as it is.
"""

import argparse
import hashlib
import io
import json
import os
import stat
import sys
import tarfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from manynodes.base import atomic
from manynodes.base.cpus import usable_cpus
from manynodes.base.errors import Refusal, told_in_one_line
from manynodes.base.failure import recorded
from manynodes.data.files import collect, read_files, refuse_link, write_manifest
from manynodes.data.unpacking import (
    ARCHIVE,
    BLOCK,
    NAMED,
    Named,
    note_packed,
    refuse_shared_notes,
)

# From a file system that takes 5 ms to open a file, 4.8 GB in 22,000 files took 131 s one after the
# other, and with these 19 (measured).
READERS = 16
AHEAD = 512  # files that they have read, at most
SMALL = 1_000_000  # bytes; larger ones are read when their turn comes
THREADS = min(usable_cpus(), 4)  # of a login node, which has others too


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prefix", type=Path, required=True, help="of a venv or of conda, or an image"
    )
    parser.add_argument("--name", required=True, help="of the copies on scratch folders")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER",
        help="for the archive and manifest.json")  # fmt: skip
    args = parser.parse_args()
    with told_in_one_line("pack"):
        # Before a record of a failure is written there.
        refuse_link(args.output)
    with told_in_one_line("pack"), recorded(args.output, "pack"):
        refuse_shared_notes()
        before = {ARCHIVE}
        with suppress(Refusal):
            named = read_files(args.output).manifest["files"]
            # Through a folder that is a link, a name could lead elsewhere.
            before |= {name for name in named if "/" not in name}
        if args.prefix.is_file():
            source = collect([args.prefix], args.output, args.name)
        else:
            path = args.output / ARCHIVE
            with (
                atomic.replacing(path) as temporary,
                private(temporary) as file,
                zstandard.ZstdCompressor(threads=THREADS).stream_writer(
                    cast(IO[bytes], written := Written(file)), closefd=False
                ) as packed,
                tarfile.open(
                    fileobj=packed, mode="w|", bufsize=BLOCK, format=tarfile.PAX_FORMAT
                ) as archive,
            ):
                add(archive, args.prefix)
            files, unpacked = {ARCHIVE: written.known}, archive.offset
            source = write_manifest(args.output, files, args.name, unpacked=unpacked)
        for name in before - {*source.manifest["files"]}:
            (args.output / name).unlink(missing_ok=True)
        note_packed(source)
        # Of another environment: what launches it is still the workflow's own.
        ours = args.prefix == Path(sys.prefix)
        rest = (
            "" if ours else f"; torchrun and the preflight, if used, import torch from {sys.prefix}"
        )
        print(f"pack: {args.prefix}, {source.bytes / 1e6:,.1f} MB{rest}")


class Written(io.RawIOBase):
    """A file that is written once, and what a manifest says of it: when it is read again by its
    name, a member of the group may have put another one there.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        written = self.file.write(data)
        self.bytes += written
        return written

    @property
    def known(self) -> dict[str, Any]:
        return {"sha256": self.sha256.hexdigest(), "bytes": self.bytes}


def private(path: Path) -> IO[bytes]:
    """A new file for this user alone: an environment may have files with passwords."""
    path.chmod(0o600)
    return path.open("wb")


def add(archive: tarfile.TarFile, given: Path) -> None:
    """Add a folder as `archive.add` does, but read small files ahead, several at a time; and last,
    which texts in it name the folder.
    """
    # A folder that is a link would be packed as a link alone.
    prefix = given.resolve()
    named = Named(tuple(sorted({str(given.absolute()), str(prefix)}, key=len, reverse=True)))
    waiting: deque[tuple[tarfile.TarInfo, Path, Future[bytes] | None]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        for path in below(prefix):
            with vanishing(path):
                # Not by the readers: of two links to one file, the first in the archive is the
                # file.
                info = archive.gettarinfo(
                    path, arcname=f"./{path.relative_to(prefix)}".removesuffix("/.")
                )
                if info:  # else a socket
                    # The copy of a folder that nobody may write to could not be removed.
                    info.mode |= stat.S_IRWXU * info.isdir()
                    small = info.isreg() and info.size <= SMALL
                    read = pool.submit(path.read_bytes) if small else None
                    waiting.append((info, path, read))
            if len(waiting) > AHEAD:
                put(archive, named, *waiting.popleft())
        while waiting:
            put(archive, named, *waiting.popleft())
    content = json.dumps(asdict(named)).encode()
    info = tarfile.TarInfo(f"./{NAMED}")
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def put(
    archive: tarfile.TarFile,
    named: Named,
    info: tarfile.TarInfo,
    path: Path,
    read: Future[bytes] | None,
) -> None:
    if not info.isreg():
        leads = Path(os.path.normpath(Path(info.name).parent / info.linkname))
        if info.issym() and ".." in leads.parts:
            # Out of the folder, which lies elsewhere on a node.
            info.linkname = os.path.normpath(path.parent / info.linkname)
        for prefix in named.prefixes:
            if info.issym() and Path(info.linkname).is_relative_to(prefix):
                inner = Path(info.linkname).relative_to(prefix)
                info.linkname = os.path.relpath(f"./{inner}", Path(info.name).parent)
        archive.addfile(info)
    elif read:
        with vanishing(path):
            content = read.result()
            info.size = len(content)
            if named.is_in(content):
                named.files.append(info.name)
            archive.addfile(info, io.BytesIO(content))
    else:
        with path.open("rb") as file:
            archive.addfile(info, file)


@contextmanager
def vanishing(path: Path) -> Iterator[None]:
    """Leave out a file of bytecode that is gone: Python makes them anew at any time."""
    try:
        yield
    except FileNotFoundError:
        if path.parent.name != "__pycache__":
            raise


def below(folder: Path) -> Iterator[Path]:
    """A folder and what is in it, each folder before its content; links are not followed."""
    yield folder
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from below(path)
        else:
            yield path


if __name__ == "__main__":
    main()
