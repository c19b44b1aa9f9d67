"""The files below a folder, through links, but not through those that lead up."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ddp.base.errors import Refusal

# Of a folder, the same under all of its names.
Identity = tuple[int, int]


def walk(
    path: Path, wanted: Callable[[str], bool], up: list[Path], *above: Path
) -> Iterator[tuple[Path, list[str]]]:
    """The folders below a path, with links, each with the names of its files; all sorted.

    Args:
        wanted: whether a file or folder of this name counts.
        up: gets the links that lead to a folder above them, which are not followed.
        above: more folders to which no link may lead.

    Raises:
        Refusal: a folder cannot be read.
    """
    return below(path, wanted, up, ancestors(path) | {identity(other) for other in above})


def below(
    path: Path, wanted: Callable[[str], bool], up: list[Path], above: frozenset[Identity]
) -> Iterator[tuple[Path, list[str]]]:
    try:
        here, entries = identity(path), sorted(os.scandir(path), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Refusal(
            f"{error.filename}: {error.strerror}; change its mode, or move it away"
        ) from None
    if here in above:
        up.append(path)
        return
    folders: list[Path] = []
    files: list[Path] = []
    for entry in entries:
        if wanted(entry.name):
            (folders if is_folder(entry) else files).append(path / entry.name)
    yield path, [file.name for file in files]
    for folder in folders:
        more = ancestors(folder) if folder.is_symlink() else frozenset()
        yield from below(folder, wanted, up, above | {here} | more)


def ancestors(path: Path) -> frozenset[Identity]:
    return frozenset(map(identity, path.resolve().parents))


def identity(path: Path) -> Identity:
    status = path.stat()
    return status.st_dev, status.st_ino


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
