"""Images from a user's Python function."""

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from manynodes.base.errors import Refusal, one_line, shown
from manynodes.base.sources import member, run_file, user_error
from manynodes.data.user.declaration import UserData, is_class_name
from manynodes.data.user.pictures import GREY, Picture, Unreadable, prepared, recorded_warnings
from manynodes.data.user.writing import (
    MOST_CLASSES,
    SPLITS,
    ArrayFile,
    Remarks,
    finish,
    is_channels_first,
    pixels,
    progress,
    type_of,
)


def from_python(user_data: UserData, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """The arrays `{train,test}_{images,labels}.npy` in a folder.

    Args:
        tell: gets a line for what Pillow warns of, and if train and test have other ranges.

    Raises:
        Refusal: the function fails, or yields what cannot be used.
    """
    path = Path(user_data.path)
    module = run_file(path)
    load = member(module, user_data.function, path)
    files: dict[str, ArrayFile] = {}
    labels: dict[str, list[int]] = {}
    remarks = Remarks()
    with ExitStack() as stack:
        for split in SPLITS:
            labels[split] = []
            for number, (image, label) in enumerate(
                progress(user_images(load, split, path), f"importing {split}")
            ):
                where = f"dataset.python: {split} image {number}"
                with recorded_warnings() as texts:
                    array, level, _ = user_pixels(image, user_data, where)
                remarks.note(f"{split} image {number}", texts, level)
                if split not in files:
                    like: np.ndarray | ArrayFile = next(iter(files.values()), array)
                    name = f"{split}_images.npy"
                    files[split] = ArrayFile(folder / name, like.dtype, like.shape)
                    stack.callback(files[split].close)
                file = files[split]
                if array.shape != file.shape or array.dtype != file.dtype:
                    raise Refusal(
                        f"{where} is {array.dtype} {array.shape}, the first one is {file.dtype} "
                        f"{file.shape}; give all images one shape and type"
                    )
                file.append(array)
                labels[split].append(user_label(label, where))
            if not labels[split]:
                raise Refusal(
                    f"dataset.python: {user_data.function}({split!r}) of {path} yields no image"
                )
        remarks.tell(tell)
        classes = 1 + max(max(found) for found in labels.values())
        names = class_names(getattr(module, "CLASSES", None), path, classes)
        return finish(user_data, names, files, labels, tell)


def class_names(given: Any, path: Path, classes: int) -> tuple[str, ...]:
    """The names of the classes: those that the file gives, or numbers.

    Args:
        given: CLASSES of the file; None without.
        classes: one more than the largest label.

    Raises:
        Refusal: they are no names, or fewer than the labels.
    """
    if given is not None and not isinstance(given, list | tuple):
        raise Refusal(
            f"dataset.python: CLASSES of {path.name} is {shown(given)}; a list of the names of "
            "the classes is needed"
        )
    named = given if given is not None else range(min(classes, MOST_CLASSES + 1))
    names = tuple(unicodedata.normalize("NFC", str(name)) for name in named)
    if len(set(names)) < len(names):
        raise Refusal(f"dataset.python: CLASSES of {path.name} has a name twice")
    if len(names) < classes or len(names) > MOST_CLASSES:
        raise Refusal(
            f"dataset.python: the label {classes - 1:,} is out of range; "
            + (f"CLASSES has {len(names)} names" if given is not None else "it is too large")
        )
    for name in names:
        if not is_class_name(name):
            raise Refusal(f"dataset.python: {shown(name)} is not a name for a class")
    return names


def user_images(load: Callable[[str], Iterable[Any]], split: str, path: Path) -> Iterator[Any]:
    """What the function yields for a split, as pairs.

    Raises:
        Refusal: it fails, or yields something else.
    """
    try:
        for found in load(split):
            try:
                image, label = found
            except (TypeError, ValueError):
                raise Refusal(
                    f"dataset.python: {path.name} yields {one_line(repr(found), 40)}; "
                    "(image, label) is needed"
                ) from None
            yield image, label
    except Refusal:
        raise
    except SystemExit:
        raise Refusal(f"dataset.python: {path.name} ends Python; return instead") from None
    except Exception as error:
        raise Refusal(f"dataset.python: {user_error(error, path)}") from None


def user_pixels(image: Any, user_data: UserData, where: str) -> Picture:
    """An image with pixels as uint8 or float32 (h, w, c).

    Raises:
        Refusal: it is none.
    """
    if hasattr(image, "convert"):  # Pillow's
        grey = user_data.channels or (1 if image.mode in GREY else 3)
        try:
            return prepared(image, user_data.image_size, grey)
        except Unreadable as error:
            raise Refusal(f"{where}: {error}") from None
    array = as_array(image, f"{where} is no array")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.dtype.kind not in "uif" or 0 in array.shape:
        raise Refusal(
            f"{where} is {array.dtype} {array.shape}; numbers of height, width and channels are "
            "needed"
        )
    height, width, last = array.shape
    if is_channels_first(height, width, last):
        raise Refusal(
            f"{where} is {array.shape}, channels first; yield numpy.moveaxis(image, 0, -1)"
        )
    array = pixels(array, type_of(array.dtype), f"{where}: its pixels")
    wanted = (
        user_data.image_size or array.shape[:2],
        user_data.channels or array.shape[2],
    )
    if (array.shape[:2], array.shape[2]) != wanted:
        raise Refusal(
            f"{where} is {array.shape}; image_size and channels ask for {(*wanted[0], wanted[1])}; "
            "yield images of Pillow, which are resized, or arrays of this shape"
        )
    return Picture(array, None)


def as_array(value: Any, problem: str) -> np.ndarray:
    """A value of the user's as an array.

    Raises:
        Refusal: the problem, with numpy's or torch's words.
    """
    try:
        return np.asarray(value)
    except Exception as error:  # a ragged list; a tensor that needs its gradient, or on a GPU
        raise Refusal(f"{problem}: {one_line(str(error), 120)}") from None


def user_label(label: Any, where: str) -> int:
    found = as_array(label, f"{where} has no label")
    if found.size != 1 or found.dtype.kind not in "ui" or int(found.reshape(())) < 0:
        raise Refusal(f"{where} has the label {shown(label)}; a whole number from 0 is needed")
    return int(found.reshape(()))
