"""SHA-256 of the files of a result: what ties a number to the files that it came from."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from manynodes.base import atomic
from manynodes.base.errors import Refusal, reason
from manynodes.base.reading import MOST, file_sha256, read_bytes

# Of the tables, the figures and the page of an experiment, and of what they were made from.
FILE = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  ([^\n\0]+)")
REMAKE = "delete it and run the same command again"
# As many commands as runs would be needed.
EVALUATE = "run the same command again, or for all runs add --forcerun evaluate"
# Snakemake sees no reason to train again, so that `replace=true` would change nothing.
PUT_BACK = "put it back, or delete run.json there to train again"


def of_files(folder: Path, names: Iterable[str], most: int | None = None) -> dict[str, str]:
    """The SHA-256 of files of a folder, by their paths in it; raises as `file_sha256`."""
    return {name: file_sha256(folder / name, most) for name in names}


def refuse_changed(folder: Path, known: Mapping[str, str], names: Iterable[str]) -> None:
    """Refuse files that are not those of which run.json has the SHA-256.

    Args:
        folder: of the run.
        known: `files` of run.json.
        names: of the files to look at.

    Raises:
        Refusal: one is missing or another one, or run.json does not know it.
    """
    for name in names:
        try:
            # Weights and outputs of a program may have any size; a sparse file takes hours.
            large = name.endswith(".safetensors") or name.startswith("outputs/")
            found = file_sha256(folder / name, None if large else MOST)
        except OSError as error:
            raise Refusal(f"{folder / name} cannot be read ({reason(error)}); {PUT_BACK}") from None
        if found != known.get(name):
            raise Refusal(
                f"{folder / name} is not the file that the training has written (run.json, "
                f"files); {PUT_BACK}"
            )


def write(folder: Path, made: Iterable[Path], sources: Mapping[Path, str]) -> None:
    """Write SHA256SUMS, as `sha256sum` would in that folder.

    Args:
        made: tables, figures and page.
        sources: SHA-256 of the files that they were made from.
    """
    known = {path: file_sha256(path) for path in made} | dict(sources)
    lines = [f"{sha256}  {os.path.relpath(path, folder)}\n" for path, sha256 in known.items()]
    atomic.write_text(folder / FILE, "".join(lines))


def read(folder: Path) -> list[tuple[str, str]]:
    """The lines of SHA256SUMS: a file's path from the folder, and its SHA-256.

    Raises:
        Refusal: it is damaged.
        FileNotFoundError: there is none.
    """
    path = folder / FILE
    try:
        lines = read_bytes(path, MOST).decode().splitlines()
        named = [line for line in map(LINE.fullmatch, lines) if line]
        if not named or len(named) < len(lines):
            raise ValueError("a line is not of its form")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} is damaged ({reason(error)}); {REMAKE}") from None
    return [(line[2], line[1]) for line in named]


def changed(folder: Path) -> str | None:
    """The first file of SHA256SUMS that is missing or not the one that it names.

    Raises as `read`.
    """
    for name, sha256 in read(folder):
        try:
            if file_sha256(folder / name, 10 * MOST) != sha256:
                return name
        except OSError:
            return name
    return None
