"""The files below a folder, through links, but not through those that lead up."""

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from manynodes.base.errors import Refusal

# Of a folder, the same under all of its names.
Identity = tuple[int, int]


def walk(
    path: Path,
    wanted: Callable[[str], bool],
    left_out: list[Path],
    closed: Collection[Path] = (),
    visited: set[Identity] | None = None,
) -> Iterator[tuple[Path, list[str]]]:
    """The folders below a path, with links, each with the names of its files; all sorted.

    Args:
        wanted: whether a file or folder of this name counts.
        left_out: gets the links that lead to a folder above them, which are not followed.
        closed: more folders to which no link may lead.
        visited: gets every folder, and none of them counts again; None: each name of one counts.

    Raises:
        Refusal: a folder cannot be read.
    """

    def below(folder: Path, above: frozenset[Identity]) -> Iterator[tuple[Path, list[str]]]:
        try:
            here = identity(folder)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Refusal(
                f"{error.filename}: {error.strerror}; change its mode, or move it away"
            ) from None
        if here in above or (visited is not None and here in visited):
            left_out.append(folder)
            return
        if visited is not None:
            visited.add(here)
        inside = [(entry.name, is_folder(entry)) for entry in entries if wanted(entry.name)]
        yield folder, [name for name, is_one in inside if not is_one]
        for inner in (folder / name for name, is_one in inside if is_one):
            more = ancestors(inner) if inner.is_symlink() else frozenset()
            yield from below(inner, above | {here} | more)

    above = ancestors(path) | {identity(other) for other in closed} - {identity(path)}
    return below(path, above)


def ancestors(path: Path) -> frozenset[Identity]:
    return frozenset(map(identity, path.resolve().parents))


def identity(path: Path) -> Identity:
    status = path.stat()
    return status.st_dev, status.st_ino


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
