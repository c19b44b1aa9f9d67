"""CSV files of the user's: which images of a folder there are, and which belong together."""

import csv
import difflib
import io
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from manynodes.base.errors import Refusal, one_line, reason, shown
from manynodes.base.reading import is_file, read_bytes
from manynodes.data.user.declaration import (
    MOST_TABLE,
    UserData,
    is_class_name,
    is_image,
    is_wanted,
)
from manynodes.data.user.writing import MOST_CLASSES, SPLITS
from manynodes.data.walk import walk

# Least and most of an image: single precision holds the product with any other weight.
WEIGHTS = (1e-6, 1e6)
CLOSE = 0.85  # of difflib: groups is group, but a height is no weight


@dataclass(frozen=True)
class Members:
    """The images of a data set.

    Attributes:
        class_names: by label.
        paths: by split, those of each class; `all` if they are not split yet.
        groups: the group of each image; empty without groups.
        weights: the weight of each image in the loss; empty without weights.
    """

    class_names: list[str]
    paths: dict[str, list[list[Path]]]
    groups: dict[Path, str]
    weights: dict[Path, float] = field(default_factory=dict)


def from_table(user_data: UserData, tell: Callable[[str], None]) -> Members:
    """The images that `dataset.table` names, in the order of their names.

    Raises:
        Refusal: it is no such table, or an image is not there.
    """
    root, table = Path(user_data.path), str(user_data.table)
    found: dict[Path, dict[str, str]] = {}
    weights: dict[Path, float] = {}
    optional = ("split", "group", "weight")
    for line, row in rows_of("table", table, tell, ("file", "label"), optional):
        path = in_root(root, inside("table", table, line, row["file"]))
        if path is None:
            remedy = "; write / between folders" if "\\" in row["file"] else ""
            raise refusal("table", table, line, f"{row['file']} is not a file in {root}{remedy}")
        if path in found:
            raise refusal("table", table, line, f"names {row['file']} for a second time")
        label = row["label"] = unicodedata.normalize("NFC", row["label"])
        if not is_class_name(label):
            raise refusal("table", table, line, f"{shown(label)} is not a label")
        for key in ("split", "group"):
            if row.get(key) == "":
                raise refusal("table", table, line, f"has no {key}")
        if "weight" in row and (row["weight"] or row.get("split") != "test"):
            weights[path] = weight("table", table, line, row["weight"])
        found[path] = row
    names = sorted({row["label"] for row in found.values()})
    if len(names) > MOST_CLASSES:
        raise Refusal(f"dataset.table: {table} has {len(names):,} labels; are they classes?")
    tell_alike(names, table, tell)
    if unused := sum(
        is_image(name) and place / name not in found
        for place, files in walk(root, is_wanted, [])
        for name in files
    ):
        tell(f"warning: {unused:,} images are not used, as they are not in {table}")
    splits = SPLITS if "split" in next(iter(found.values())) else ("all",)
    if splits == SPLITS and user_data.test_fraction is not None:
        raise Refusal(
            f"dataset.test_fraction: {table} has a column split already; leave test_fraction out"
        )
    paths: dict[str, list[list[Path]]] = {split: [[] for _ in names] for split in splits}
    number = {name: label for label, name in enumerate(names)}
    for path in sorted(found):
        split = found[path].get("split", "all")
        if split not in paths:
            raise Refusal(
                f"dataset.table: {table} has the split {shown(split)}; use train and test, and "
                "validation_fraction or folds to validate on a part of train"
            )
        paths[split][number[found[path]["label"]]].append(path)
    if user_data.group and "group" in next(iter(found.values())):
        raise Refusal(f"dataset.group: {table} has a column group already; leave dataset.group out")
    groups = {path: row["group"] for path, row in found.items() if "group" in row}
    if "weight" in next(iter(found.values())):
        tell(f"the column weight of {table} weights the training images in the loss")
    return Members(names, paths, groups, weights)


def in_root(root: Path, name: str) -> Path | None:
    """The path of a file in a folder, where its name and those of the folders in it may each be in
    another form of Unicode; None if it is not there.
    """
    if is_file(root / name):
        return root / name
    places = [root]
    for part in name.split("/"):
        forms = (part, unicodedata.normalize("NFC", part), unicodedata.normalize("NFD", part))
        paths = [place / form for place in places for form in dict.fromkeys(forms)]
        places = [path for path in paths if os.access(path, os.F_OK)]
    return next(filter(is_file, places), None)


def tell_alike(names: Sequence[str], table: str, tell: Callable[[str], None]) -> None:
    """Warn of labels that seem to mean one class: `0` and `0.0`, `ant` and `Ant`."""
    seen: dict[object, str] = {}
    for name in names:
        plain: object = name.casefold()
        with suppress(ValueError):
            plain = float(name)
        if (other := seen.setdefault(plain, name)) != name:
            tell(f"warning: the labels {shown(other)} and {shown(name)} of {table} are two classes")


def groups_in(
    user_data: UserData, paths: Sequence[Path], tell: Callable[[str], None]
) -> dict[Path, str]:
    """The group of each image, from the file that `dataset.group` names.

    Raises:
        Refusal: it is no such file, or an image has no group.
    """
    root, table = Path(user_data.path), str(user_data.group)
    known: dict[str, str] = {}
    for line, row in rows_of("group", table, tell, ("file", "group")):
        named = unicodedata.normalize("NFC", inside("group", table, line, row["file"]))
        if named in known:
            raise refusal("group", table, line, f"names {row['file']} for a second time")
        if not row["group"]:
            raise refusal("group", table, line, "has no group")
        known[named] = row["group"]
    found = {}
    for path in paths:
        name = str(path.relative_to(root))
        if (group := known.get(unicodedata.normalize("NFC", name))) is None:
            raise Refusal(f"dataset.group: {table} has no group for {name}")
        found[path] = group
    return found


def rows_of(
    key: str,
    table: str,
    tell: Callable[[str], None],
    needed: Sequence[str],
    optional: Sequence[str] = (),
) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file with the number of their line; other columns are left out, and told.

    Raises:
        Refusal: it is missing, too large, or is no such table; or a column is almost named like one
            that has a meaning.
    """
    number = 1
    try:
        text = read_bytes(Path(table), MOST_TABLE).decode("utf-8-sig")
        lines = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = [name.strip() for name in next(lines, [])]
        for name in needed:
            if name not in header:
                columns = one_line(", ".join(header) or "none", 50)
                raise Refusal(
                    f"dataset.{key}: {table} has no column {name}; its columns are {columns}; "
                    f"begin it with a line such as {','.join(needed)}"
                )
        for name in (*needed, *optional):
            if header.count(name) > 1:
                raise Refusal(f"dataset.{key}: {table} has two columns {name}; keep one")
        others = [name for name in header if name and name not in (*needed, *optional)]
        refuse_near_miss(key, table, header, others, (*needed, *optional))
        if others:
            tell(f"not used of {table}: the columns {one_line(', '.join(others), 100)}")
        some = False
        number = lines.line_num + 1
        for cells in lines:
            number = lines.line_num + 1
            # A spreadsheet may leave rows of empty cells behind.
            if not any(map(str.strip, cells)):
                continue
            if len(cells) != len(header):
                problem = f"has {len(cells)} cells, not {len(header)}"
                raise refusal(key, table, lines.line_num, problem)
            row = dict(zip(header, map(str.strip, cells), strict=True))
            some = True
            yield lines.line_num, {name: row[name] for name in (*needed, *optional) if name in row}
    except UnicodeDecodeError:
        raise Refusal(f"dataset.{key}: {table} is not UTF-8; save it as CSV in UTF-8") from None
    except OSError as error:
        raise Refusal(f"dataset.{key}: {table} is not a CSV file: {reason(error)}") from None
    except csv.Error as error:
        raise refusal(key, table, number, f"is no CSV: {reason(error)}") from None
    if not some:
        raise Refusal(f"dataset.{key}: {table} has no rows; give one per image")


def refuse_near_miss(
    key: str, table: str, header: Sequence[str], others: Sequence[str], known: Sequence[str]
) -> None:
    """Refuse a column that would be ignored for its spelling: without its groups, images of one
    patient are in both splits.

    Args:
        header: all columns.
        others: those without a meaning.
        known: names with one.
    """
    absent = [name for name in known if name not in header]
    for name in others:
        plain = name.casefold()
        if near := [plain] * (plain in known) or difflib.get_close_matches(plain, absent, 1, CLOSE):
            raise Refusal(
                f"dataset.{key}: {table} has a column {shown(name)}; did you mean {near[0]}? "
                "rename it, or remove it"
            )


def weight(key: str, table: str, line: int, text: str) -> float:
    """The weight of an image.

    Raises:
        Refusal: it is none.
    """
    least, most = WEIGHTS
    with suppress(ValueError):
        if least <= (number := float(text)) <= most:
            return number
    problem = f"the weight {shown(text)} is not a number from {least:f} to {most:,.0f}"
    raise refusal(key, table, line, problem)


def inside(key: str, table: str, line: int, name: str) -> str:
    """A path in the folder of the images, in its shortest form.

    Raises:
        Refusal: it is none, or leads out of the folder.
    """
    path = os.path.normpath(name)
    if not name or "\0" in name or Path(path).is_absolute() or path.split("/")[0] == "..":
        problem = f"{shown(name)} is not a path in dataset.folder; write it relative to that folder"
        raise refusal(key, table, line, problem)
    if not all(map(is_wanted, path.split("/"))):
        raise refusal(key, table, line, f"{shown(name)} is hidden, or in a folder of previews")
    return path


def refusal(key: str, table: str, line: int, problem: str) -> Refusal:
    return Refusal(f"dataset.{key}: {table}, line {line}: {problem}")
