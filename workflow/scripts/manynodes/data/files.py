"""The user's own files, in the form of a data folder: staged, verified and locked like one."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import Refusal
from manynodes.base.reading import file_sha256, read_json
from manynodes.data.folder import MANIFEST, DataFolder
from manynodes.data.walk import walk


def read_files(path: Path) -> DataFolder:
    """The folder that `collect` has made; its files are links to the user's.

    Raises:
        Refusal: there is no valid manifest.
    """
    manifest = path / MANIFEST
    try:
        found = read_json(manifest, "files", "run the same command again")
    except FileNotFoundError:
        raise Refusal(f"{manifest} is not there; run the same command again") from None
    for name in found["files"]:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise Refusal(f"{manifest} is damaged (a path); run the same command again")
    return DataFolder(path, found)


def collect(paths: Iterable[Path], folder: Path, name: str) -> DataFolder:
    """Hash the user's files and folders, and make links to them in the folder, which has no others.

    Args:
        paths: with different last names, under which they will be found.
        folder: of links and manifest.
        name: of the copies on scratch folders.

    Raises:
        Refusal: a path is missing, or is neither a file nor a folder.
        OSError: a file cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = {}
    links: dict[str, Path] = {}
    for path in paths:
        for inner, file in below(path):
            files[str(PurePosixPath(path.name, inner))] = known(file)
        links[path.name] = path.resolve()
    # The program may read this folder itself, and would find what is not given any more.
    for link in [each for each in folder.iterdir() if each.is_symlink()]:
        link.unlink()
    for linked, target in links.items():
        (folder / linked).symlink_to(target)
    return write_manifest(folder, files, name)


def refuse_link(folder: Path) -> None:
    """Refuse a link in place of a folder of results, which could lead to any other folder.

    Raises:
        Refusal: it is one.
    """
    if folder.is_symlink():
        raise Refusal(f"{folder} is a link; remove it")


def known(file: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"sha256": file_sha256(file), "bytes": file.stat().st_size}


def write_manifest(
    folder: Path, files: dict[str, dict[str, Any]], name: str, **more: int
) -> DataFolder:
    """Make a data folder of the files in it.

    Args:
        files: what is `known` of each, by its path in the folder.
        name: of the copies on scratch folders.
        more: `unpacked`, the bytes of what an archive holds.
    """
    sha256 = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    manifest = {"dataset": name, "sha256": sha256, "files": files, **more}
    atomic.write_json(folder / MANIFEST, manifest)
    return DataFolder(folder, manifest)


def fingerprint(paths: Iterable[Path]) -> str:
    """Changes if a file is added, removed or written, by names, sizes and times.

    Raises:
        Refusal: as `collect`.
    """
    found = hashlib.sha256()
    for path in paths:
        for inner, file in below(path):
            status = file.stat()
            entry = f"{path.name}/{inner}\0{status.st_size}\0{status.st_mtime_ns}\n"
            found.update(os.fsencode(entry))
    return found.hexdigest()


def below(path: Path) -> Iterator[tuple[str, Path]]:
    """The files in a folder, sorted, with their relative names; or the file itself.

    Raises:
        Refusal: it is missing, or contains something that is neither a file nor a folder.
    """
    if path.is_file():
        yield "", path
        return
    if not path.is_dir():
        wanted = "neither a file nor a folder" if path.exists() else "not there"
        raise Refusal(f"config: files: {path} is {wanted}; give the path of a file or folder")
    left_out: list[Path] = []
    empty = True
    for folder, names in walk(path, bool, left_out):
        for name in names:
            file, empty = folder / name, False
            if not file.is_file():
                raise Refusal(
                    f"config: files: {file} is not a file; remove it, or name the files one by one"
                )
            yield str(file.relative_to(path)), file
    if empty and not left_out:
        raise Refusal(f"config: files: {path} has no file; fill the folder, or leave it out")
    # What a loop leads to is among the files.
    outside = [link for link in left_out if not link.resolve().is_relative_to(path.resolve())]
    if outside:
        raise Refusal(f"config: files: {outside[0]} leads to a folder above {path}; remove it")
