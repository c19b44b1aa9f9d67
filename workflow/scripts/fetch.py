"""Fetch a data set from one of its sources into .npy arrays and a manifest.

The bytes are the same from every source, because their SHA-256 is checked. The manifest is written
last, so an interrupted fetch never counts as complete.
"""

import argparse
import errno
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ddp.base import atomic
from ddp.base.errors import Refusal, one_line, os_error_line, told_in_one_line
from ddp.base.locks import locked
from ddp.data import sources
from ddp.data.datasets import ARRAYS, DATASETS
from ddp.data.folder import (
    MANIFEST,
    content_sha256,
    file_sha256,
    refuse_wrong_content,
    whole_sha256,
)

# Seconds to wait for another fetch of the same data: longer than any of its sources may take.
GIVE_UP = 3 * sources.MOST_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=DATASETS, required=True)
    parser.add_argument("--source", choices=("auto", *sources.READERS), default="auto")
    parser.add_argument("--archive", type=Path, help="path of the official archive")
    parser.add_argument("--url", help="address of a mirror of the official archive")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    with told_in_one_line("fetch"):
        args.output.mkdir(parents=True, exist_ok=True)
        with locked(args.output / ".lock", tell, GIVE_UP):
            # The leftovers of a killed fetch occupy space that this one needs.
            for leftover in args.output.glob(".fetch-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            atomic.remove_leftovers(args.output)
            refuse_full_disk(args.output, DATASETS[args.dataset].room)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=args.output) as work:
                source, arrays = first_working_source(args, Path(work))
                store(args.dataset, source, arrays, args.output)


def tell(line: str) -> None:
    print(f"fetch: {line}", file=sys.stderr, flush=True)


def refuse_full_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refusal(
            f"{folder}: {free / 1e6:,.0f} MB free, fetching needs {needed / 1e6:,.0f} MB; free "
            "some space there"
        )


def first_working_source(args: argparse.Namespace, work: Path) -> tuple[str, sources.Arrays]:
    """The first source that has the data set, and its checked arrays.

    Raises:
        Refusal: naming each source and its error.
        OSError: the disk is full.
    """
    spec = DATASETS[args.dataset]
    origin = sources.Origin(args.archive, args.url)
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
            arrays = sources.READERS[source](spec, origin, folder)
            refuse_wrong_content(args.dataset, arrays, source)
            return source, arrays
        except (Refusal, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                # The disk is full, so no other source is tried. A failed write does not name its
                # path.
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


def store(dataset: str, source: str, arrays: sources.Arrays, folder: Path) -> None:
    """Write each array atomically, and then the manifest."""
    (folder / MANIFEST).unlink(missing_ok=True)
    files: dict[str, dict[str, Any]] = {}
    for name in ARRAYS:
        path = folder / f"{name}.npy"
        with atomic.replacing(path) as temporary, temporary.open("wb") as file:
            # Not np.save, whose error on a full disk gives no cause: "n requested and m written".
            np.lib.format.write_array_header_1_0(
                file, np.lib.format.header_data_from_array_1_0(arrays[name])
            )
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
    print(
        f"fetch: {dataset} from {source}: "
        f"{sum(file['bytes'] for file in files.values()) / 1e6:,.1f} MB in {folder}"
    )


if __name__ == "__main__":
    main()
