"""Arrays in .npz and .npy files, read in pieces."""

import difflib
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from manynodes.base.errors import Refusal, shown
from manynodes.base.reading import open_file
from manynodes.data.user.declaration import UserData
from manynodes.data.user.tables import CLOSE
from manynodes.data.user.writing import (
    MOST_CLASSES,
    SPLITS,
    ArrayFile,
    chosen_for_test,
    finish,
    is_channels_first,
    named,
    pixels,
    progress,
    type_of,
)

# Bytes of a piece.
CHUNK = 16_000_000
# The names that the four arrays may have, and those of a single split.
NAMES = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
)
ONE_SPLIT = (("images", "labels"), ("x", "y"))


class NpyRows:
    """The rows of an .npy file, or of a member of an .npz file."""

    def __init__(self, file: Any, name: str, size: int) -> None:
        self.file, self.name = file, name
        try:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            self.shape, fortran, self.dtype = read(file)
        except Exception as error:
            # For a header that is no Python, numpy raises anything from TokenError to MemoryError.
            raise Refusal(f"dataset.arrays: {name} is not an array: {error}") from None
        if not all(type(edge) is int and edge >= 0 for edge in self.shape):
            raise Refusal(f"dataset.arrays: {name} is not an array: its shape is {self.shape}")
        if self.dtype.kind not in "uif":
            raise Refusal(f"dataset.arrays: {name} has values of type {self.dtype}, not numbers")
        if fortran and len(self.shape) > 1:
            raise Refusal(
                f"dataset.arrays: {name} is in Fortran order; save numpy.ascontiguousarray of it"
            )

        if math.prod(self.shape) * self.dtype.itemsize > size:
            raise Refusal(f"dataset.arrays: {name} is shorter than its header says")

    def chunks(self) -> Iterator[np.ndarray]:
        row = self.dtype.itemsize * int(np.prod(self.shape[1:]))
        left = self.shape[0]
        while left:
            some = min(left, max(1, CHUNK // max(1, row)))
            try:
                content = self.file.read(some * row)
            except Exception as error:
                # zipfile raises anything from zlib.error to NotImplementedError.
                raise Refusal(f"dataset.arrays: {self.name} is damaged: {error}") from None
            if len(content) < some * row:
                raise Refusal(f"dataset.arrays: {self.name} is shorter than its header says")
            yield np.frombuffer(content, self.dtype).reshape(some, *self.shape[1:])
            left -= some


def from_arrays(user_data: UserData, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """The arrays `{train,test}_{images,labels}.npy` in a folder.

    Args:
        tell: gets a line for arrays that are not used, and if train and test have other ranges.

    Raises:
        Refusal: the arrays cannot be used.
    """
    with ExitStack() as stack:
        splits = open_arrays(user_data, stack, tell)
        labels = {split: read_labels(rows, split) for split, (_, rows) in splits.items()}
        classes = 1 + max(int(found.max(initial=0)) for found in labels.values())
        in_test = split_by_class(labels["all"], user_data, classes) if "all" in splits else None
        shape, kind = shape_and_type({split: rows for split, (rows, _) in splits.items()})
        files = {split: ArrayFile(folder / f"{split}_images.npy", kind, shape) for split in SPLITS}
        for file in files.values():
            stack.callback(file.close)
        kept: dict[str, list[int]] = {split: [] for split in SPLITS}
        for split, (rows, _) in splits.items():
            if len(labels[split]) != rows.shape[0]:
                which = "" if split == "all" else f"{split} has "
                raise Refusal(
                    f"dataset.arrays: {which}{rows.shape[0]:,} images but {len(labels[split]):,} "
                    "labels; save one label per image"
                )
            where = f"dataset.arrays: the images {rows.name}"
            images = chain.from_iterable(
                pixels(chunk, kind, where).reshape(len(chunk), *shape) for chunk in rows.chunks()
            )
            for number, image in enumerate(progress(images, f"importing {split}", rows.shape[0])):
                target = split if in_test is None else SPLITS[int(in_test[number])]
                files[target].append(image)
                kept[target].append(labels[split][number])
        return finish(user_data, list(map(str, range(classes))), files, kept, tell)


def shape_and_type(splits: Mapping[str, NpyRows]) -> tuple[tuple[int, int, int], str]:
    """The shape (h, w, c) of all images, and the type in which they are kept.

    Raises:
        Refusal: those of the splits differ.
    """
    shapes = {split: image_shape(rows, split) for split, rows in splits.items()}
    if len(set(shapes.values())) > 1:
        one, other = shapes.values()
        raise Refusal(f"dataset.arrays: train images are {one}, test images are {other}")
    types = {split: rows.dtype for split, rows in splits.items()}
    if len({type_of(dtype) for dtype in types.values()}) > 1:
        # Their ranges would differ too: 0 to 1 and 0 to 255.
        raise Refusal(
            f"dataset.arrays: train images are {types['train']}, test images are "
            f"{types['test']}; save both with the same type"
        )
    return next(iter(shapes.values())), type_of(next(iter(types.values())))


def open_arrays(
    user_data: UserData, stack: ExitStack, tell: Callable[[str], None]
) -> dict[str, tuple[NpyRows, NpyRows]]:
    """Images and labels by split; `all` if they are not split yet.

    Args:
        tell: gets a line for arrays that are not used.

    Raises:
        Refusal: arrays are missing, or test_fraction is missing or too much.
    """
    path = Path(user_data.path)
    found = members_of(user_data, stack)
    whole = [names for names in (*NAMES, *ONE_SPLIT) if set(names) <= set(found)]
    if len(whole) > 1:
        raise Refusal(
            f"dataset.arrays: {path} has {' and '.join(names[0] for names in whole)}; keep those "
            "that are meant"
        )
    if not whole:
        raise Refusal(
            f"dataset.arrays: {path} has {', '.join(found) or 'no arrays'}; it needs "
            f"{', '.join(NAMES[0])}; or images, labels and test_fraction"
        )
    has_test = whole[0] in NAMES
    if has_test and user_data.test_fraction is not None:
        raise Refusal(
            f"dataset.test_fraction: {path} has test images already; leave test_fraction out"
        )
    if not has_test and user_data.test_fraction is None:
        raise Refusal(
            f"dataset.arrays: {path} has one split; give dataset.test_fraction, such as 0.2"
        )
    tell_unused(path, sorted({*found} - {*whole[0]}), tell)
    images, labels, *of_test = (found[name]() for name in whole[0])
    if not has_test:
        return {"all": (images, labels)}
    test_images, test_labels = of_test
    return {"train": (images, labels), "test": (test_images, test_labels)}


def members_of(user_data: UserData, stack: ExitStack) -> dict[str, Callable[[], NpyRows]]:
    """What opens each array that there is, by name.

    Raises:
        Refusal: the file is none with arrays.
    """
    path = Path(user_data.path)
    if path.is_dir():
        return {file.stem: partial(open_npy, file, stack) for file in sorted(path.glob("*.npy"))}
    if path.suffix == ".npz":
        try:
            archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(open_file(path))))
        except Exception as error:
            raise Refusal(f"dataset.arrays: {path} is not an .npz file: {error}") from None
        members = [name for name in archive.namelist() if name.endswith(".npy")]
        if twice := next((name for name in members if members.count(name) > 1), None):
            raise Refusal(f"dataset.arrays: {path} has {twice} twice; keep one")
        return {
            name.removesuffix(".npy"): partial(open_member, archive, name, stack)
            for name in members
        }
    if path.suffix == ".npy":
        if user_data.labels is None:
            raise Refusal(
                f"dataset.arrays: {path} has only images; give dataset.labels, an .npy file too"
            )
        return {
            "images": partial(open_npy, path, stack),
            "labels": partial(open_npy, Path(user_data.labels), stack),
        }
    raise Refusal(f"dataset.arrays: {path} is neither .npz nor .npy, nor a folder of .npy")


def tell_unused(path: Path, names: Sequence[str], tell: Callable[[str], None]) -> None:
    """Tell which arrays are not used.

    Raises:
        Refusal: one seems to say which images belong together, or how much they count: without its
            groups, images of one patient are in both splits.
    """
    for name in names:
        # Not a weight for each class, or names of feature groups.
        what = name.casefold().removeprefix("train_").removeprefix("test_").removesuffix("s")
        if (
            what.startswith("group")
            or what.endswith("group")
            or what.endswith("sample_weight")
            or difflib.get_close_matches(what, ("group", "weight"), 1, CLOSE)
        ):
            raise Refusal(
                f"dataset.arrays: {path} has {shown(name)}, which arrays cannot have; give a "
                "dataset.folder with a table, which has group and weight, or remove it"
            )
    if names:
        tell(f"warning: not used: the arrays {named(names)} in {path}")


def open_npy(path: Path, stack: ExitStack) -> NpyRows:
    try:
        return NpyRows(stack.enter_context(open_file(path)), path.name, path.stat().st_size)
    except OSError as error:
        raise Refusal(f"dataset.arrays: {path}: {error.strerror}") from None


def open_member(archive: zipfile.ZipFile, name: str, stack: ExitStack) -> NpyRows:
    try:
        file = stack.enter_context(archive.open(name))
    except Exception as error:
        raise Refusal(f"dataset.arrays: {name} is damaged: {error}") from None
    return NpyRows(file, name, archive.getinfo(name).file_size)


def read_labels(rows: NpyRows, split: str) -> np.ndarray:
    """The labels of a split, int64 (n,).

    Raises:
        Refusal: they are not whole numbers from 0 to below MOST_CLASSES.
    """
    if rows.dtype.kind not in "ui" or int(np.prod(rows.shape)) != (rows.shape or (0,))[0]:
        raise Refusal(
            f"dataset.arrays: the labels {rows.name} are {rows.dtype} {rows.shape}; one whole "
            "number per image is needed"
        )
    found = [np.zeros(0, np.int64)]
    for chunk in rows.chunks():
        # Before they have another type: the largest of 64 bits would be -1 there, or 0.
        least, most = int(chunk.min()), int(chunk.max())
        if least < 0:
            raise Refusal(
                f"dataset.arrays: the {split} labels have {least}; labels are 0 to the number of "
                "classes - 1"
            )
        if most >= MOST_CLASSES:
            raise Refusal(
                f"dataset.arrays: the label {most:,} is too large; labels are 0 to the number of "
                "classes - 1"
            )
        found.append(chunk.reshape(-1).astype(np.int64))
    return np.concatenate(found)


def split_by_class(labels: np.ndarray, user_data: UserData, classes: int) -> np.ndarray:
    """Whether each image is a test image, bool (n,)."""
    test = np.zeros(len(labels), np.bool_)
    for number in range(classes):
        members = np.flatnonzero(labels == number)
        if len(members) < 2:
            raise Refusal(
                f"dataset.arrays: the class {number} has {len(members)} images; a class needs one "
                "for train and one for test"
            )
        test[members[chosen_for_test(len(members), user_data, number)]] = True
    return test


def image_shape(rows: NpyRows, split: str) -> tuple[int, int, int]:
    """(h, w, c) of the images in an array (n, h, w) or (n, h, w, c).

    Raises:
        Refusal: it has another form.
    """
    shape = rows.shape
    if len(shape) not in (3, 4) or 0 in shape:
        raise Refusal(
            f"dataset.arrays: the {split} images {rows.name} are {shape}; images, height, width "
            "and channels are needed"
        )
    _, height, width, *rest = shape
    channels = rest[0] if rest else 1
    if is_channels_first(height, width, channels):
        raise Refusal(
            f"dataset.arrays: the {split} images {rows.name} are {shape}, channels first; save "
            "numpy.moveaxis(images, 1, -1)"
        )
    return height, width, channels
