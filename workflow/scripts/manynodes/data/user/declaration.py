"""A user's own data set, as the configuration declares it; free of numpy and torch, because every
dry run reads it.
"""

import csv
import hashlib
import io
import json
import os
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manynodes.base.errors import Refusal, shown
from manynodes.base.reading import MOST, NotAFile, open_file, read_bytes
from manynodes.base.sources import local_sources, sources_sha256
from manynodes.data.walk import is_folder, walk

KINDS = ("folder", "arrays", "python")
# The other keys of `dataset` that only own data have, with the kinds that use them.
USED_BY = {
    "labels": ("arrays",),
    "image_size": ("folder", "python"),
    "channels": ("folder", "python"),
    "test_fraction": ("folder", "arrays"),
    "split_seed": KINDS,
    "skip_unreadable": ("folder",),
    "decode_in_full": ("folder",),
    "table": ("folder",),
    "group": ("folder",),
}
KEYS = (*KINDS, *USED_BY)
# Bytes of a table, and of its first line.
MOST_TABLE, MOST_HEADER = 10 * MOST, 100_000
# The value of `group` for which the folders of the images are groups.
BY_FOLDER = "folder"
SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
# The names that a folder of test images may have, in the order in which they are looked for.
TEST_FOLDERS = ("test", "val", "valid", "validation")
# The names that are no class's, with those that the splits have here.
SPLIT_FOLDERS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys((*TEST_FOLDERS, "testing", "dev", "eval"), "test"),
}

# Folders of previews whose name a class may have too.
PREVIEWS = ("thumbs", "thumbnails")
# What network storage and systems put among images: previews, deleted files, copies.
JUNK = {
    *("@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "@__thumb", "@tmp"),
    *("@sharebin", "~snapshot", "$recycle.bin", "recycler", "system volume information"),
    *("__macosx", "network trash folder", "temporary items", "lost+found", *PREVIEWS),
}


def is_wanted(name: str) -> bool:
    """Whether a file or folder of this name is a part of the data set."""
    return name[0] != "." and name.lower() not in JUNK


def is_class_name(name: str) -> bool:
    """Whether it can be shown in a table."""
    return name.isprintable() and 0 < len(name) <= 100


def is_image(name: str) -> bool:
    return is_wanted(name) and name.lower().endswith(SUFFIXES)


@dataclass(frozen=True)
class UserData:
    """A data set that the user brings.

    Attributes:
        kind: one of KINDS.
        path: of the folder, the array file, or the Python file.
        function: in the Python file; called with `train` and with `test`, it yields (image, label).
        labels: file with the labels, if `path` is an .npy file of images.
        image_size: height and width to which images are resized and cropped; None: as they are.
        channels: 1 (grey) or 3 (RGB); None: 1 if all images are grey.
        test_fraction: share of each class's images for the test split, if there is none.
        decode_in_full: JPEGs too that are much larger than `image_size`.
        table: CSV file that names the images in the folder, instead of folders of classes.
        group: BY_FOLDER, or a CSV file with the group of each image; the images of a group are in
            one split.
    """

    name: str
    kind: str
    path: str
    function: str = ""
    labels: str | None = None
    image_size: tuple[int, int] | None = None
    channels: int | None = None
    test_fraction: float | None = None
    split_seed: int = 0
    skip_unreadable: bool = False
    decode_in_full: bool = False
    table: str | None = None
    group: str | None = None

    @staticmethod
    def from_config(dataset: Mapping[str, Any]) -> "UserData | None":
        """What the key `dataset` declares; None for a built-in data set.

        Raises:
            Refusal: keys contradict each other.
        """
        kinds = [kind for kind in KINDS if dataset[kind] is not None]
        if not kinds:
            for key in KEYS:
                if dataset[key] not in (None, False, 0):
                    raise Refusal(
                        f"config: dataset.{key}: is only for your own images; give dataset.folder, "
                        f"dataset.arrays or dataset.python too, or leave it out"
                    )
            return None
        kind, *others = kinds
        if others:
            raise Refusal(
                f"config: dataset.{others[0]}: dataset.{kind} is given too; keep one of them"
            )
        path, _, function = dataset[kind].partition(":") if kind == "python" else (
            dataset[kind], "", ""
        )  # fmt: skip
        if kind == "python" and not (path.endswith(".py") and function.isidentifier()):
            raise Refusal(
                f"config: dataset.python: {shown(dataset[kind])} is not FILE.py:FUNCTION, such as "
                "my_data.py:load"
            )
        for key, kinds_of_key in USED_BY.items():
            if dataset[key] not in (None, False) and kind not in kinds_of_key:
                raise Refusal(
                    f"config: dataset.{key}: dataset.{kind} has no use for it; leave it out"
                )
        if dataset["labels"] is not None and not path.endswith(".npy"):
            raise Refusal(
                f"config: dataset.labels: {shown(path)} brings its own labels; leave labels out"
            )
        given = {key: dataset[key] for key in ("name", *USED_BY)}
        if (size := given["image_size"]) is not None:
            given["image_size"] = (size, size) if isinstance(size, int) else tuple(size)
        return UserData(kind=kind, path=path, function=function, **given)

    @staticmethod
    def from_json(text: str) -> "UserData":
        """From `to_json`."""
        given = json.loads(text)
        size = given.pop("image_size")
        return UserData(image_size=tuple(size) if size else None, **given)

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @property
    def settings(self) -> dict[str, Any]:
        """What the content depends on besides the files: a part of the data set's hash."""
        found: dict[str, Any] = {"kind": self.kind}
        if self.kind in ("folder", "python"):
            found |= {
                "image_size": list(self.image_size) if self.image_size else None,
                "channels": self.channels,
            }
        if self.kind == "python":
            found["function"] = self.function
            found["code_sha256"] = sources_sha256(local_sources(Path(self.path)))
        elif self.test_fraction is not None:
            found |= {"test_fraction": self.test_fraction, "split_seed": self.split_seed}
        if self.skip_unreadable:
            found["skip_unreadable"] = True
        if self.jpeg_scaling:
            found["jpeg_scaling"] = True
        if self.table:
            found["table"] = True
        if self.group or "group" in self.columns:
            found["groups"] = BY_FOLDER if self.group == BY_FOLDER else "table"
        if "weight" in self.columns:
            found["weights"] = True
        return found

    @property
    def tables(self) -> dict[str, str]:
        """The CSV files that belong to the folder, by their keys."""
        group = None if self.group == BY_FOLDER else self.group
        return {key: path for key, path in (("table", self.table), ("group", group)) if path}

    @property
    def columns(self) -> list[str]:
        """Those of the table, as far as its header tells; none without a table."""
        if not self.table:
            return []
        # A table that is none is refused when it is read.
        with suppress(csv.Error, NotAFile), open_file(Path(self.table)) as file:
            beginning = file.read(MOST_HEADER).decode("utf-8-sig", "replace")
            return list(map(str.strip, next(csv.reader(io.StringIO(beginning, newline="")), [])))
        return []

    @property
    def jpeg_scaling(self) -> bool:
        """Whether large JPEGs are decoded at a part of their size, see `pictures.decoded`."""
        return self.kind == "folder" and bool(self.image_size) and not self.decode_in_full

    @property
    def classes(self) -> int | None:
        """Number of class folders; None without them."""
        if self.kind != "folder" or self.table or not Path(self.path).is_dir():
            return None
        train = Path(self.path, "train")
        root = train if train.is_dir() else Path(self.path)
        return sum(is_folder(entry) and is_wanted(entry.name) for entry in os.scandir(root))

    def refuse_missing(self) -> None:
        """Refuse a path that is not there.

        Raises:
            Refusal: naming the key.
        """
        paths = {self.kind: self.path, "labels": self.labels} | self.tables
        for key, path in paths.items():
            found = Path(path) if path else None
            if found and not (found.is_dir() if key == "folder" else found.exists()):
                wanted = "a folder" if key == "folder" else "there"
                raise Refusal(f"config: dataset.{key}: {shown(path)} is not {wanted}")

    @property
    def fingerprint(self) -> str:
        """Changes if a source file is added, removed or written, by names, sizes and times."""
        self.refuse_missing()
        found = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode())
        # The content of a Python file is a part of its settings.
        paths = [self.path, *([self.labels] if self.labels else []), *self.tables.values()]
        named: frozenset[str] | None = None
        places: set[tuple[str, ...]] = set()
        for path in paths if self.kind != "python" else ():
            for name, status in files_below(path):
                # Of a folder, an import takes no others, such as Thumbs.db or, in the folder in
                # which Snakemake runs, what it writes.
                if name and self.kind == "folder" and not is_image(Path(name).name):
                    named = self.named_otherwise if named is None else named
                    if unicodedata.normalize("NFC", name) not in named:
                        continue
                # Snakemake may run in a locale of other characters.
                text = os.fsencode(name).decode("utf-8", "surrogateescape")
                entry = f"{text}\0{status.st_size}\0{status.st_mtime_ns}\n"
                found.update(entry.encode("utf-8", "replace"))
                if path == self.path and self.group == BY_FOLDER:
                    places.add(tuple(name.split("/")[:-1]))
        # Earlier versions took such groups for others: they are imported again.
        if self.are_below_groups(places):
            found.update(b"the first folder below the class is the group\n")
        if composed({*self.group_names(places)}):
            found.update(b"a group is one in either form of Unicode\n")
        return found.hexdigest()

    def are_below_groups(self, places: Collection[tuple[str, ...]]) -> bool:
        """Whether an image lies in a folder below that of its group, see `groups.by_folder`.

        Args:
            places: the folders of each image by which folders are groups.
        """
        depth = self.depth_of_groups(places)
        return any(len(folders) > depth + 1 for folders in places)

    def group_names(self, places: Collection[tuple[str, ...]]) -> Iterator[str]:
        """The names of the groups as folders or a table have them; `places` as above."""
        depth = self.depth_of_groups(places)
        yield from (folders[depth] for folders in places if len(folders) > depth)
        for key, table in self.tables.items():
            if key == "group" or "group" in self.columns:
                yield from cells(table, "group")

    def depth_of_groups(self, places: Collection[tuple[str, ...]]) -> int:
        """How many folders are above that of a group; `places` as above."""
        if self.table:
            below = all(folders and folders[0].lower() in SPLIT_FOLDERS for folders in places)
            return int("split" in self.columns and below)
        divided = any(Path(self.path, name).is_dir() for name in ("train", *TEST_FOLDERS))
        return 2 if divided else 1

    @property
    def named_otherwise(self) -> frozenset[str]:
        """The files that the table names and that are not named like images; none without a
        table.
        """
        return frozenset(
            unicodedata.normalize("NFC", os.path.normpath(file))
            for file in (cells(self.table, "file") if self.table else ())
            if not is_image(Path(file).name or ".")
        )


def composed(names: Collection[str]) -> dict[str, str]:
    """The names of groups in one form of Unicode, if any is there in two; else none, as images that
    were imported before stay what they are.
    """
    found = {name: unicodedata.normalize("NFC", name) for name in names}
    return found if len({*found.values()}) < len(found) else {}


def cells(table: str, name: str) -> list[str]:
    """Those of a column of a CSV file; none if it has no such column, or is no table."""
    with suppress(OSError, ValueError, csv.Error):
        text = read_bytes(Path(table), MOST_TABLE).decode("utf-8-sig")
        rows = csv.reader(io.StringIO(text, newline=""))
        column = list(map(str.strip, next(rows, []))).index(name)
        return [row[column].strip() for row in rows if row[column:]]
    return []


def files_below(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """The files in a folder, sorted, or the file itself; with relative names."""
    if not Path(path).is_dir():
        yield "", Path(path).stat()
        return
    for folder, names in walk(Path(path), is_wanted, []):
        for name in names:
            # The import names a link to nothing.
            with suppress(OSError):
                yield os.path.relpath(folder / name, path), (folder / name).stat()
