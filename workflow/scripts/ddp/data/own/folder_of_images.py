"""A folder of images, decoded on all cores."""

import multiprocessing
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddp.base.errors import Refusal, shown
from ddp.data.folder import label_type
from ddp.data.own.declaration import SUFFIXES, TEST_FOLDERS, Own, walk
from ddp.data.own.pictures import Unreadable, read_header, read_image
from ddp.data.own.writing import (
    MOST_CLASSES,
    SPLITS,
    ArrayFile,
    Imported,
    chosen_for_test,
    progress,
    refuse_empty_class,
    shared_images,
)

# Images per task of a worker.
TASK = 32
# Files that are named in a line.
MOST_NAMED = 3


@dataclass(frozen=True)
class Listing:
    """The images of a split, in the order of the file."""

    paths: list[Path]
    labels: list[int]


def from_folder(own: Own, folder: Path, tell: Callable[[str], None]) -> Imported:
    """The arrays `{train,test}_{images,labels}.npy` in a folder.

    Args:
        tell: gets a line for what is ignored.

    Raises:
        Refusal: the images cannot be used.
    """
    class_names, listings = list_images(own, tell)
    cpus = len(os.sched_getaffinity(0))
    with (
        ProcessPoolExecutor(cpus, multiprocessing.get_context("fork")) as pool,
        ExitStack() as stack,
    ):
        try:
            headers: dict[str, list[Any]] = {split: [] for split in SPLITS}
            if not (own.image_size and own.channels):
                headers = {
                    split: list(
                        progress(
                            pool.map(header_of, listing.paths, chunksize=TASK),
                            f"reading the headers of {split}",
                            len(listing.paths),
                        )
                    )
                    for split, listing in listings.items()
                }
            bad = {split: unreadable(found) for split, found in headers.items()}
            refuse_unreadable(own, listings, bad)
            size, channels = common_shape(own, listings, headers)
            files = {}
            for split, listing in listings.items():
                file = ArrayFile(folder / f"{split}_images.npy", np.uint8, (*size, channels))
                stack.callback(file.close)
                # The size at once, so that a full disk is found before the work.
                os.posix_fallocate(file.file.fileno(), 0, file.offset(len(listing.paths)))
                file.file.flush()
                tasks = [
                    (file.path, file.offset(start), listing.paths[start : start + TASK])
                    for start in range(0, len(listing.paths), TASK)
                ]
                bar = progress((), f"importing {split}", len(listing.paths))
                decode = partial(decode_into, own.image_size, file.shape)
                file.checksums = []
                for start, results in enumerate(pool.map(decode, tasks)):
                    for number, result in enumerate(results, start * TASK):
                        if isinstance(result, str):
                            bad[split][number] = result
                            result = 0
                        file.checksums.append(result)
                    bar.update(len(results))
                bar.close()
                files[split] = file
        except BrokenProcessPool:
            raise Refusal(
                f"dataset.folder: {own.path}: a process that decoded an image was killed; it ran "
                "out of memory, or an image crashed it; run the same command again with more memory"
            ) from None
        refuse_unreadable(own, listings, bad)
        images = {}
        for split, file in files.items():
            kept = np.setdiff1d(np.arange(len(file.checksums)), list(bad[split]))
            file.keep(kept)
            file.checksums = [file.checksums[row] for row in kept.tolist()]
            labels = np.asarray(listings[split].labels, label_type(len(class_names)))[kept]
            refuse_empty_class(labels, class_names, split, own)
            np.save(folder / f"{split}_labels.npy", labels)
            images[split] = len(kept)
        shared = shared_images(files["train"], files["test"])
    return Imported(
        class_names,
        (*size, channels),
        "uint8",
        images,
        tuple(
            str(listings[split].paths[number].relative_to(own.path))
            for split in SPLITS
            for number in sorted(bad[split])
        ),
        shared,
    )


def list_images(
    own: Own, tell: Callable[[str], None]
) -> tuple[tuple[str, ...], dict[str, Listing]]:
    """The classes, and the images of both splits.

    Raises:
        Refusal: a split or a class is missing, or empty.
    """
    root = Path(own.path)
    train = root / "train"
    test = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    ignored: list[str] = []
    if train.is_dir() or test:
        if not test:
            raise Refusal(
                f"dataset.folder: {root} has train/ but neither test/ nor val/; add one, or give a "
                "folder of classes and dataset.test_fraction"
            )
        if not train.is_dir():
            raise Refusal(f"dataset.folder: {root} has {test.name}/ but no train/; add it")
        if own.test_fraction is not None:
            raise Refusal(
                f"dataset.test_fraction: {root} has {test.name}/ already; leave test_fraction out"
            )
        names = class_folders(train)
        if unknown := sorted(set(class_folders(test)) - set(names)):
            raise Refusal(
                f"dataset.folder: {test}/{unknown[0]} is a class that {train} does not have"
            )
        found = {
            split: [images_below(place / name, ignored) for name in names]
            for split, place in (("train", train), ("test", test))
        }
    else:
        names = class_folders(root)
        if own.test_fraction is None:
            raise Refusal(
                f"dataset.folder: {root} has no train/ and test/; if its folders are classes, give "
                "dataset.test_fraction, such as 0.2"
            )
        found = {"train": [], "test": []}
        for number, name in enumerate(names):
            everything = images_below(root / name, ignored)
            if len(everything) < 2:
                raise Refusal(
                    f"dataset.folder: {root / name} has {len(everything)} images; a class needs "
                    "one for train and one for test"
                )
            chosen = set(chosen_for_test(len(everything), own, number).tolist())
            for split, wanted in (("train", False), ("test", True)):
                found[split].append(
                    [path for i, path in enumerate(everything) if (i in chosen) == wanted]
                )
    if ignored:
        names_of = ", ".join(ignored[:MOST_NAMED]) + (", …" if len(ignored) > MOST_NAMED else "")
        tell(f"{len(ignored):,} files are not named like images and were ignored: {names_of}")
    for split, classes in found.items():
        for name, paths in zip(names, classes, strict=True):
            if not paths:
                raise Refusal(
                    f"dataset.folder: the class {shown(name)} has no {split} images in {root}; add "
                    "some, or remove the class"
                )
    return tuple(names), {split: mixed(classes) for split, classes in found.items()}


def mixed(classes: list[list[Path]]) -> Listing:
    """The images of all classes in a fixed random order: neighbours in the file, which `order:
    blocks` reads together, are then of many classes.
    """
    paths = [path for paths in classes for path in paths]
    labels = [label for label, paths in enumerate(classes) for _ in paths]
    order = np.random.default_rng(0).permutation(len(paths)).tolist()
    return Listing([paths[number] for number in order], [labels[number] for number in order])


def class_folders(folder: Path) -> list[str]:
    """The names of the classes, sorted.

    Raises:
        Refusal: there is none, or a name cannot be shown.
    """
    names = sorted(
        entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."
    )
    if not names:
        raise Refusal(f"dataset.folder: {folder} has no folders; each class needs one")
    if len(names) > MOST_CLASSES:
        raise Refusal(f"dataset.folder: {folder} has {len(names):,} folders; are they classes?")
    for name in names:
        if not name.isprintable() or len(name) > 100:
            raise Refusal(f"dataset.folder: {shown(name)} is not a name for a class; rename it")
    return names


def images_below(folder: Path, ignored: list[str]) -> list[Path]:
    """The images in a folder and below, sorted; other files' names go to `ignored`."""
    found = []
    for place, names in walk(folder):
        for name in names:
            if name.lower().endswith(SUFFIXES):
                found.append(place / name)
            else:
                ignored.append(name)
    return found


def header_of(path: Path) -> tuple[tuple[int, int], bool] | str:
    try:
        return read_header(path)
    except Unreadable as error:
        return str(error)


def decode_into(
    size: tuple[int, int] | None, shape: tuple[int, ...], task: tuple[Path, int, list[Path]]
) -> list[int | str]:
    """Decode some images into their rows of a file.

    Args:
        shape: of a row.

    Returns:
        Each one's CRC-32, or why it is unreadable.
    """
    path, offset, images = task
    found: list[int | str] = []
    with path.open("rb+") as file:
        for image in images:
            try:
                pixels = read_image(image, size, shape[2])
                if pixels.shape != shape:
                    raise Unreadable("its size is not that of its header")
                content = pixels.data.cast("B")
                os.pwrite(file.fileno(), content, offset + len(found) * len(content))
                found.append(zlib.crc32(content))
            except Unreadable as error:
                found.append(str(error))
    return found


def unreadable(results: Sequence[object]) -> dict[int, str]:
    return {number: found for number, found in enumerate(results) if isinstance(found, str)}


def refuse_unreadable(
    own: Own, listings: dict[str, Listing], bad: dict[str, dict[int, str]]
) -> None:
    if own.skip_unreadable:
        return
    names = [
        f"{listings[split].paths[number].relative_to(own.path)} ({why})"
        for split, found in bad.items()
        for number, why in sorted(found.items())
    ]
    if names:
        more = ", …" if len(names) > MOST_NAMED else ""
        count = f"{len(names):,} images are" if len(names) > 1 else "1 image is"
        raise Refusal(
            f"{count} unreadable: {', '.join(names[:MOST_NAMED])}{more}; remove them, or set "
            "dataset.skip_unreadable: true"
        )


def common_shape(
    own: Own, listings: dict[str, Listing], headers: dict[str, list[Any]]
) -> tuple[tuple[int, int], int]:
    """Height and width, and channels, of all images.

    Raises:
        Refusal: they differ, and `image_size` is not given.
    """
    if own.image_size and own.channels:
        return own.image_size, own.channels
    readable = [
        (path, header)
        for split, listing in listings.items()
        for path, header in zip(listing.paths, headers[split], strict=True)
        if not isinstance(header, str)
    ]
    if not readable:
        raise Refusal(f"dataset.folder: {own.path} has no readable image")
    channels = own.channels or (1 if all(grey for _, (_, grey) in readable) else 3)
    if own.image_size:
        return own.image_size, channels
    (first, (size, _)), *others = readable
    for path, (other, _) in others:
        if other != size:
            raise Refusal(
                f"images have different sizes ({first.name}: {size[0]} x {size[1]}, {path.name}: "
                f"{other[0]} x {other[1]}); give dataset.image_size, such as 224"
            )
    return size, channels
