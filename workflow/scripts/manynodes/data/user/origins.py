"""files.csv: the file of the user's folder that each row of an imported data set comes from.

It is no part of the data: their hashes are the same with and without it.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from manynodes.base.errors import Refusal, reason, spreadsheet_text
from manynodes.base.reading import open_file
from manynodes.data.folder import MANIFEST, DataFolder

FILE = "files.csv"
COLUMNS = ["split", "row", "class", "path"]
# Bytes of a row: a path has at most 4,096, and each may be written as an escape.
MOST_ROW = 30_000


def write_origins(
    path: Path,
    class_names: Sequence[str],
    splits: Mapping[str, tuple[Sequence[int], Iterable[Path]]],
) -> None:
    """Write files.csv.

    Args:
        splits: by name, the labels of its images and their paths in the user's folder.
    """
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for split, (labels, paths) in splits.items():
            for row, (label, origin) in enumerate(zip(labels, paths, strict=True)):
                texts = map(spreadsheet_text, (class_names[label], str(origin)))
                table.writerow([split, row, *texts])


def files_of(data: DataFolder, split: str) -> list[str]:
    """The path of each image of a split in the user's folder; empty without files.csv.

    Raises:
        Refusal: it is damaged, or of other images.
    """
    path = data.path / FILE
    found: list[tuple[str, str]] = []
    try:
        rows = sum(data.manifest["images"].values())
        with open_file(path, MOST_ROW * (rows + 1)) as file:
            lines = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""), strict=True)
            if next(lines, None) != COLUMNS:
                raise ValueError("its first line is another one")
            for of_split, _, name, origin in lines:
                if of_split == split:
                    found.append((name, origin))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        raise damaged(path, reason(error)) from None
    _, labels = data.split(split)
    # As they are written: two classes may be written alike, such as `=a` and `'=a`.
    written = [spreadsheet_text(name) for name in data.class_names]
    if [name for name, _ in found] != [written[label] for label in labels.tolist()]:
        raise damaged(path, "it is of other images")
    return [origin for _, origin in found]


def damaged(path: Path, why: str) -> Refusal:
    return Refusal(
        f"{path} is damaged ({why}); delete it and make it again", path.with_name(MANIFEST)
    )
