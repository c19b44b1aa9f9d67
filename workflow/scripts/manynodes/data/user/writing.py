"""The arrays of an import, written in bounded memory."""

import hashlib
import io
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from manynodes.base.errors import Refusal, shown
from manynodes.data.folder import label_type, write_array
from manynodes.data.user.declaration import UserData

SPLITS = ("train", "test")
# The report holds the whole confusion matrix.
MOST_CLASSES = 1000
# Between the largest pixels of both splits; 0 to 1 and 0 to 255 are 255 apart.
MOST_SCALE = 10
# Files that are named in a line.
MOST_NAMED = 3


class ArrayFile:
    """An .npy file that grows by rows, or is written in any order.

    Attributes:
        checksums: CRC-32 of each row's bytes.
        fingerprints: of photographs, see `similar`.
        most: the largest size of a number in images of arrays and of a function.
    """

    def __init__(self, path: Path, dtype: Any, shape: Sequence[int]) -> None:
        self.path, self.dtype, self.shape = path, np.dtype(dtype), tuple(shape)
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.shape))
        self.rows = 0
        self.file: BinaryIO = path.open("wb+")
        self.file.write(self.header(0))
        self.checksums: list[int] = []
        self.fingerprints: list[tuple[bytes, ...]] = []
        self.most = 0.0

    def header(self, rows: int) -> bytes:
        """numpy leaves room for any number of rows, so its length is always the same."""
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            buffer,
            {
                "descr": np.lib.format.dtype_to_descr(self.dtype),
                "fortran_order": False,
                "shape": (rows, *self.shape),
            },
        )
        return buffer.getvalue()

    def offset(self, row: int) -> int:
        return len(self.header(0)) + row * self.row_bytes

    def append(self, row: np.ndarray) -> None:
        content = np.ascontiguousarray(row, self.dtype).tobytes()
        self.file.write(content)
        self.rows += 1
        self.checksums.append(zlib.crc32(content))
        self.most = max(self.most, float(np.abs(row).max()))

    def read(self, row: int) -> np.ndarray:
        content = os.pread(self.file.fileno(), self.row_bytes, self.offset(row))
        return np.frombuffer(content, self.dtype).reshape(self.shape)

    def keep(self, rows: np.ndarray) -> None:
        """Keep only these rows, in ascending order."""
        for new, old in enumerate(rows.tolist()):
            if new != old:
                os.pwrite(self.file.fileno(), self.read(old).data, self.offset(new))
        for values in (self.checksums, self.fingerprints):
            values[:] = [values[row] for row in rows.tolist()]
        self.rows = len(rows)
        self.file.truncate(self.offset(self.rows))

    def close(self) -> None:
        self.file.flush()
        os.pwrite(self.file.fileno(), self.header(self.rows), 0)
        self.file.close()


def equal_images(train: ArrayFile, test: ArrayFile, labels: Sequence[Any]) -> tuple[int, int, int]:
    """How many images have the same pixels as another one: those of the test split that are in the
    train split too, those of the train split of which an earlier one there is equal, and of these
    those that are of another class than that one.

    Args:
        labels: of the train split.
    """
    counts = Counter(train.checksums)
    candidates = {checksum for checksum, count in counts.items() if count > 1}
    candidates |= counts.keys() & set(test.checksums)

    def contents(file: ArrayFile) -> Iterator[tuple[int, bytes]]:
        file.file.flush()
        for row, checksum in enumerate(file.checksums):
            if checksum in candidates:
                yield row, hashlib.sha256(file.read(row).data).digest()

    first: dict[bytes, int] = {}
    copies = others = 0
    for row, content in contents(train):
        copies += content in first
        others += labels[first.setdefault(content, row)] != labels[row]
    return sum(content in first for _, content in contents(test)), copies, others


def chosen_for_test(n: int, user_data: UserData, number: int) -> np.ndarray:
    """The images of a class that become test images: a function of the seed and the class."""
    fraction = user_data.test_fraction or 0.0
    count = min(n - 1, max(1, round(fraction * n)))
    return np.random.default_rng((user_data.split_seed, number)).permutation(n)[:count]


def may_lack_classes(user_data: UserData, split: str, there: int) -> bool:
    """Whether a split need not have images of all classes: the test images, if a table says which
    they are, and they are of two classes or more.

    Args:
        there: of how many classes it has images.
    """
    chosen = split == "test" and user_data.table is not None and user_data.test_fraction is None
    return chosen and there > 1


def write_labels(
    user_data: UserData,
    folder: Path,
    names: Sequence[str],
    labels: Mapping[str, Sequence[int]],
    tell: Callable[[str], None],
) -> None:
    """Write the labels of both splits.

    Args:
        names: of the classes.

    Raises:
        Refusal: there is one class, or a class has no images in a split that needs all.
    """
    if len(names) < 2:
        raise Refusal(f"dataset.{user_data.kind}: there is one class; two or more are needed")
    for split, of_split in labels.items():
        found = np.asarray(of_split, label_type(len(names)))
        empty = np.flatnonzero(np.bincount(found, minlength=len(names)) == 0).tolist()
        if empty and may_lack_classes(user_data, split, len(names) - len(empty)):
            lacking = named([names[number] for number in empty])
            tell(f"warning: classes without test images, of which no result tells: {lacking}")
        elif empty:
            remedy = "add some, or remove the class"
            if empty == [0] and names[0] == "0":
                remedy = "add some, or count the labels from 0"
            raise Refusal(
                f"dataset.{user_data.kind}: the class {shown(names[empty[0]])} has no {split} "
                f"images; {remedy}"
            )
        write_array(folder / f"{split}_labels.npy", found)


def finish(
    user_data: UserData,
    names: Sequence[str],
    files: Mapping[str, ArrayFile],
    labels: Mapping[str, Sequence[int]],
    tell: Callable[[str], None],
    skipped: Sequence[str] = (),
    similar: int = 0,
) -> dict[str, Any]:
    """Write the labels beside the images; returns what the manifest says about both, and tells how
    many images are equal or left out, or seem to have another range.

    Args:
        names: of the classes.
        files: of the images, by split.
        labels: of the images, by split.
        skipped: names of unreadable images that were left out.
        similar: images of the test split that are in the train split in another size or quality.

    Raises:
        Refusal: as `write_labels`.
    """
    train, test = (files[split] for split in SPLITS)
    write_labels(user_data, train.path.parent, names, labels, tell)
    if user_data.test_fraction is None:
        tell_other_ranges(files, tell)
    shared, copies, others = equal_images(train, test, labels["train"])
    if shared:
        tell(
            f"warning: {shared:,} of the {test.rows:,} test images are in the train split too; "
            "accuracy on them says nothing about new images"
        )
    if copies:
        grouped = user_data.group or "group" in user_data.columns
        tell(
            f"warning: {copies:,} of the {train.rows:,} train images are copies of others"
            + (f", {others:,} of them in another class" if others else "")
            + ("" if grouped else "; validation and folds have some on both sides")
        )
    if skipped:
        tell(f"warning: {len(skipped):,} unreadable images are left out, see the manifest")
    return {
        "dataset": user_data.name,
        "source": user_data.kind,
        "classes": len(names),
        "class_names": list(names),
        "image_shape": list(train.shape),
        "dtype": str(train.dtype),
        "images": {split: files[split].rows for split in SPLITS},
        "settings": user_data.settings,
        "skipped": list(skipped),
        # Only then: the manifest of an import of an earlier version stays what it is.
        **({"in_train": {"same": shared, "similar": similar}} if shared or similar else {}),
        **({"copies": copies} if copies else {}),
    }


def tell_other_ranges(files: Mapping[str, ArrayFile], tell: Callable[[str], None]) -> None:
    """Warn if the pixels of one split are so much larger that they seem to have another unit."""
    train, test = (files[split].most for split in SPLITS)
    if max(train, test) > MOST_SCALE * min(train, test):
        tell(
            f"warning: the pixels of train go up to {train:.5g}, those of test to {test:.5g}; "
            "bring both to one range, such as 0 to 255"
        )


def pixels(chunk: np.ndarray, kind: str, where: str) -> np.ndarray:
    """Images as uint8 or float32.

    Args:
        where: the images are, for a message.

    Raises:
        Refusal: values do not fit.
    """
    if kind == "uint8":
        if chunk.dtype != np.uint8 and (chunk.min() < 0 or chunk.max() > 255):
            raise Refusal(
                f"{where} are whole numbers outside 0 to 255; bring them to that range, or make "
                "them float32"
            )
        return chunk.astype(np.uint8, copy=False)
    with np.errstate(over="ignore"):
        found = chunk.astype(np.float32, copy=False)
    if not np.isfinite(found).all():
        raise Refusal(f"{where} have values that are not finite in float32")
    return found


def type_of(dtype: np.dtype) -> str:
    """The type in which images of this type are kept."""
    return "float32" if dtype.kind == "f" else "uint8"


def is_channels_first(height: int, width: int, channels: int) -> bool:
    """Whether an image that should have this form seems to have its channels first; not one of 12
    bands of 64 x 64.
    """
    return channels > 4 and (height <= 4 or height < width == channels)


def named(names: Sequence[object]) -> str:
    """The first names, for a line."""
    return ", ".join(map(str, names[:MOST_NAMED])) + (", …" if len(names) > MOST_NAMED else "")


@dataclass(frozen=True)
class Remarks:
    """What decoders say of images, told once for all of them.

    Attributes:
        warned: names of images, by what their decoder warned of.
        levels: the highest of each grey image of 16 bits.
    """

    warned: dict[str, list[object]] = field(default_factory=dict)
    levels: list[int] = field(default_factory=list)

    def note(self, name: object, warnings: Sequence[str], level: int | None) -> None:
        """Note what `pictures.Picture` says of an image."""
        for text in warnings:
            self.warned.setdefault(text, []).append(name)
        if level is not None:
            self.levels.append(level)

    def tell(self, tell: Callable[[str], None]) -> None:
        """Texts that differ in numbers are told once."""
        kinds: dict[str, tuple[str, list[object]]] = {}
        for text, names in self.warned.items():
            kinds.setdefault(re.sub(r"\d+", "", text), (text, []))[1].extend(names)
        for text, names in kinds.values():
            images = list(dict.fromkeys(names))
            tell(f"warning: {len(images):,} images: {text}: {named(images)}")
        # Images of 16 bits that use less than half of them, or most of them far less, such as those
        # of a camera of 12: of each level only the upper 8 bits are kept.
        whole = max(self.levels, default=0) < 2**15
        dark = [level for level in self.levels if whole or level < 2**13]
        if 2 * len(dark) > len(self.levels):
            tell(
                f"warning: {len(dark):,} grey images of 16 bits are dark: their levels go up to "
                f"{max(dark):,} of 65,535; scale them to 16 bits"
            )


def progress(things: Iterable[Any], what: str, total: int | None = None) -> Iterable[Any]:
    """The things, with a progress bar; a log gets a line of it every ten seconds."""
    seconds = 0.2 if sys.stderr.isatty() else 10
    return tqdm(
        things, total=total, desc=what, unit=" images", file=sys.stderr,
        mininterval=seconds, maxinterval=seconds, leave=False, delay=seconds,
    )  # fmt: skip
