"""Fetch a data set from one of its sources, or import the user's own, into .npy arrays and a
manifest.

The bytes of a built-in data set are the same from every source, because their SHA-256 is checked.
The manifest is written last, so an interrupted fetch never counts as complete.
"""

import argparse
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from manynodes.base import atomic
from manynodes.base.errors import Refusal, one_line, os_error_line, told_in_one_line
from manynodes.base.failure import recorded
from manynodes.base.locks import locked
from manynodes.data import sources
from manynodes.data.datasets import ARRAYS, DATASETS, EXTRA
from manynodes.data.files import known
from manynodes.data.folder import (
    MANIFEST,
    SOURCE,
    arrays_of,
    content_sha256,
    refuse_wrong_content,
    whole_sha256,
    write_array,
)
from manynodes.data.user import origins
from manynodes.data.user.declaration import UserData

# Seconds to wait for another fetch of the same data: longer than any of its sources may take.
GIVE_UP = 3 * sources.MOST_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True, help="name of the data set")
    parser.add_argument("--source", choices=("auto", *sources.READERS), default="auto")
    # Path.expanduser raises an error if there is no such user.
    parser.add_argument(
        "--archive",
        type=lambda path: Path(os.path.expanduser(path)),  # noqa: PTH111
        help="path of the official archive",
    )
    parser.add_argument("--url", help="address of a mirror of the official archive")
    parser.add_argument("--user-data", metavar="JSON", help="the user's own images, see data/user/")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    with told_in_one_line("fetch"), recorded(args.output, "fetch"):
        if not args.user_data and args.dataset not in DATASETS:
            raise Refusal(f"--dataset {args.dataset} is not one of {', '.join(DATASETS)}")
        args.output.mkdir(parents=True, exist_ok=True)
        with locked(args.output / ".lock", tell, GIVE_UP):
            # The leftovers of a killed fetch occupy space that this one needs.
            for leftover in args.output.glob(".fetch-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if not args.user_data:
                refuse_full_disk(args.output, DATASETS[args.dataset].room)
            with (
                tempfile.TemporaryDirectory(prefix=".fetch-", dir=args.output) as work,
                naming(args.output, Path(work)),
            ):
                if args.user_data:
                    user_data = UserData.from_json(args.user_data)
                    # Before the import: what changes during it is imported again.
                    fingerprint = user_data.fingerprint
                    publish(imported(user_data, Path(work)), Path(work), args.output)
                    atomic.write_text(args.output / SOURCE, fingerprint)
                else:
                    publish(fetched(args, Path(work)), Path(work), args.output)


@contextmanager
def naming(output: Path, work: Path) -> Iterator[None]:
    """Name the output in errors: a failed write names no path, or one in the temporary folder."""
    try:
        yield
    except OSError as error:
        if not error.filename or str(error.filename).startswith(str(work)):
            error.filename = str(output)
        raise


def tell(line: str) -> None:
    print(f"fetch: {line}", file=sys.stderr, flush=True)


def refuse_full_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(
            f"{folder}: {free / 1e6:,.1f} MB free, fetching needs {needed / 1e6:,.1f} MB; free "
            "some space there"
        )


def first_working_source(args: argparse.Namespace, work: Path) -> tuple[str, sources.Arrays]:
    """The first source that has the data set, and its checked arrays.

    Raises:
        Refusal: naming each source and its error; or the source that is asked for cannot have it.
        OSError: the disk is full.
    """
    spec = DATASETS[args.dataset]
    if args.source not in (options := ("auto", *spec.sources)):
        raise Refusal(
            f"--source: {args.dataset} is not available from {args.source}; use "
            f"{' or '.join(options)}"
        )
    if args.source == "archive" and args.archive is None:
        raise Refusal("--source archive needs --archive, the path of the official archive")
    candidates = spec.sources
    if args.source != "auto":
        candidates = (args.source,)
    elif args.archive is None:
        candidates = tuple(name for name in candidates if name != "archive")
    failures = []
    for source in candidates:
        folder = work / source
        folder.mkdir()
        try:
            arrays = sources.READERS[source](spec, args.archive, args.url, folder)
            refuse_wrong_content(args.dataset, arrays, source)
            return source, arrays
        except (Refusal, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                # No other source is tried.
                raise
            reason = os_error_line(error) if isinstance(error, OSError) else str(error)
            failures.append(f"{source}: {reason.removeprefix(f'{source}: ')}")
            if source != candidates[-1]:
                tell(one_line(f"{failures[-1]}; trying {candidates[candidates.index(source) + 1]}"))
            shutil.rmtree(folder)
    if len(failures) == 1:
        raise Refusal(failures[0])
    tell(one_line(failures[-1]))
    raise Refusal(
        f"{args.dataset} could not be fetched from {', '.join(candidates)} (see above); "
        "connect this machine, or set dataset.archive to the official archive"
    )


def fetched(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Write the arrays of a built-in data set; returns what its manifest says about them."""
    source, arrays = first_working_source(args, work)
    spec = DATASETS[args.dataset]
    for name in ARRAYS:
        write_array(work / f"{name}.npy", arrays[name])
    return {
        "dataset": args.dataset,
        "source": source,
        "classes": spec.classes,
        "class_names": list(spec.class_names),
        "image_shape": list(spec.image_shape),
        "dtype": "uint8",
        "images": {split: len(arrays[f"{split}_labels"]) for split in ("train", "test")},
        "settings": {},
        "skipped": [],
    }


def imported(user_data: UserData, work: Path) -> dict[str, Any]:
    """Write the arrays of the user's own images; returns what their manifest says about them.

    Raises:
        Refusal: they cannot be used.
    """
    # Imported here: Pillow and a pool of processes, which a built-in data set does not need.
    from manynodes.data.user.arrays import from_arrays
    from manynodes.data.user.folder_of_images import from_folder
    from manynodes.data.user.function import from_python

    of_kind = {"folder": from_folder, "arrays": from_arrays, "python": from_python}
    return of_kind[user_data.kind](user_data, work, lambda line: tell(one_line(line)))


def publish(about: dict[str, Any], work: Path, folder: Path) -> None:
    """Move the arrays to their folder, and write the manifest last."""
    (folder / MANIFEST).unlink(missing_ok=True)
    names = arrays_of(about["settings"])
    paths = {name: work / f"{name}.npy" for name in names}
    with ThreadPoolExecutor() as threads:
        # All at once: the images of the train split take most of the time.
        written = threads.map(atomic.fsync, paths.values())
        of_files = threads.map(known, paths.values())
        arrays = [np.load(path, mmap_mode="r") for path in paths.values()]
        of_arrays = threads.map(content_sha256, arrays)
        files = {path.name: each for path, each in zip(paths.values(), of_files, strict=True)}
        content = dict(zip(names, of_arrays, strict=True))
        list(written)
    for path in paths.values():
        path.replace(folder / path.name)
    # Of an earlier import.
    for left in (origins.FILE, *(f"{name}.npy" for name, _ in EXTRA.values() if name not in names)):
        (folder / left).unlink(missing_ok=True)
    if (work / origins.FILE).exists():
        atomic.fsync(work / origins.FILE)
        (work / origins.FILE).replace(folder / origins.FILE)
    manifest = about | {
        "sha256": whole_sha256(content, about["settings"]),
        "content_sha256": content,
        "files": files,
    }
    atomic.write_json(folder / MANIFEST, manifest)
    height, width, channels = about["image_shape"]
    images = " and ".join(f"{count:,} {split}" for split, count in about["images"].items())
    print(
        f"fetch: {about['dataset']} from {about['source']}: {images} images of {height} x {width} "
        f"x {channels} in {about['classes']:,} classes, "
        f"{sum(file['bytes'] for file in files.values()) / 1e6:,.1f} MB in {folder}"
    )


if __name__ == "__main__":
    main()
