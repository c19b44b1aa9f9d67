"""metrics.csv and result.json, which a program of the user's may write."""

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import Refusal, reason, shown
from manynodes.base.reading import MOST, NotAFile, parse_form, read_bytes, read_json
from manynodes.experiment.config import Run
from manynodes.reporting.results import read_about_of
from manynodes.reporting.sums import REMAKE, of_files, refuse_changed

EVALUATED = "evaluated.json"  # beside evaluation.json: what it is of
MOST_COLUMNS = 1000
# Columns that count, in the order in which they are looked for in a program's own tables; if there
# is none, the first one counts.
COUNTS = ("step", "global_step", "iter", "iteration", "epoch")
LARGEST = 10**300
# As Python's json writes them; a name between quotation marks stays.
NOT_FINITE = re.compile(r"(?<=[:\s])-?(?:NaN|Infinity)(?=\s*[,}])")
MATRIX = ("confusion_matrix", "class_names")  # keys of result.json that are no numbers
Row = dict[str, float]
Confusion = tuple[list[str], list[list[int]]]


@dataclass(frozen=True)
class Result:
    """What a program has written to result.json.

    Attributes:
        confusion: class names and matrix (true class by row); None if it has none.
        texts: what is no number, by name.
    """

    numbers: dict[str, float]
    confusion: Confusion | None
    texts: dict[str, str | bool] = field(default_factory=dict)


def metrics_file(run: Path) -> Path:
    """The rows of a run's program so far: its own file, or what `supervise` makes of another."""
    collected = run / "state" / "metrics.csv"
    return collected if collected.exists() else run / "work" / "metrics.csv"


def read_metrics(path: Path) -> list[Row]:
    """The rows of metrics.csv, in the order of its first column; none if there is no such file.

    The first column counts epochs or steps. A later row with the same count replaces an earlier
    one: a program that was interrupted has written some rows twice. An empty cell is NaN.

    Raises:
        Refusal: it is not such a table.
    """
    try:
        text = read_bytes(path, MOST).decode("utf-8-sig")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, NotAFile) as error:
        raise Refusal(f"{path} cannot be read: {reason(error)}; write it as CSV") from None
    try:
        lines = [line for line in csv.reader(io.StringIO(text, newline=""), strict=True) if line]
        if not lines:
            return []
        header = [name.strip() for name in lines[0]]
        # What a killed process wrote last may be half a line.
        if not text.endswith("\n") and len(lines[-1]) < len(header):
            lines = lines[:-1]
        if len(set(header)) < len(header) or not all(header) or len(header) > MOST_COLUMNS:
            raise ValueError("its first line must name every column, each once")
        if any(is_number(name) for name in header):
            raise ValueError("its first line has numbers; it must name every column")
        rows: dict[float, Row] = {}
        for number, line in enumerate(lines[1:], 2):
            if line == lines[0]:  # a program that has started again
                continue
            if len(line) != len(header):
                raise ValueError(f"row {number} has {len(line)} cells, not {len(header)}")
            row = {key: cell(value, number) for key, value in zip(header, line, strict=True)}
            if not math.isfinite(row[header[0]]):
                raise ValueError(f"row {number} has no {header[0]}")
            rows[row[header[0]]] = row
    except (ValueError, csv.Error) as error:
        raise Refusal(f"{path}: {error}") from None
    return [rows[count] for count in sorted(rows)]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def cell(text: str, row: int) -> float:
    """A number; NaN and infinities are numbers of a training that went wrong.

    Raises:
        ValueError: it is none.
    """
    if not text.strip():
        return math.nan
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"row {row}: {shown(text)} is not a number") from None
    # What is larger cannot be drawn.
    return value if abs(value) <= LARGEST or math.isnan(value) else math.copysign(math.inf, value)


def write_metrics(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows; an empty file if there are none."""
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: number_text(row[key]) for key in row} for row in rows)
    atomic.write_text(path, text.getvalue())


def number_text(value: float) -> str:
    """The shortest text of a number; whole ones without a point."""
    if math.isnan(value):
        return ""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def read_result(path: Path) -> Result:
    """result.json; nothing if there is no such file. What is not finite is NaN.

    Raises:
        Refusal: it is not an object of numbers and texts, beside a confusion matrix.
    """
    try:
        return parse_result(read_bytes(path, MOST), path)
    except FileNotFoundError:
        return Result({}, None)
    except (OSError, NotAFile) as error:
        raise Refusal(f"{path} cannot be read: {reason(error)}; write it as JSON") from None


def parse_result(content: bytes, path: Path) -> Result:
    """The same from its content."""
    try:
        # A training that diverged has a result too.
        text = NOT_FINITE.sub("null", content.decode())
        found = parse_form(text.encode(), "result")
        matrix, names = (found.pop(key, None) for key in MATRIX)
        texts = {key: value for key, value in found.items() if isinstance(value, str | bool)}
        numbers = {key: checked(value) for key, value in found.items() if key not in texts}
        return Result(numbers, checked_matrix(matrix, names), texts)
    except ValueError as error:
        raise Refusal(
            f"{path} is not a JSON object of numbers ({reason(error)}); write one such as "
            '{"accuracy": 0.9}'
        ) from None


def checked_matrix(matrix: Any, names: list[str] | None) -> Confusion | None:
    """The confusion matrix with the names of its classes, which are their numbers unless given.

    Raises:
        ValueError: it is not square, or has another number of names.
    """
    if matrix is None:
        return None
    names = names or [str(number) for number in range(len(matrix))]
    if len(names) != len(matrix) or any(len(row) != len(matrix) for row in matrix):
        raise ValueError("confusion_matrix: not square, or class_names has another length")
    return names, matrix


@dataclass(frozen=True)
class Measured:
    """The numbers of a finished run, each of this run and of no other.

    Attributes:
        about: run.json.
        result, evaluation: the numbers of its training and of its evaluation.
        confusion: class names and matrix (true class by row) of either; None if it has none.
        metrics: the rows of metrics.csv.
        evaluated_by: SHA-256 of the program that evaluated; empty without one.
        sums: SHA-256 of run.json and evaluation.json, by name.
    """

    about: dict[str, Any]
    result: dict[str, float]
    evaluation: dict[str, float]
    confusion: Confusion | None
    metrics: list[Row]
    evaluated_by: str
    sums: dict[str, str]

    @property
    def numbers(self) -> dict[str, float]:
        """Those of the evaluation count if both have one."""
        return self.result | self.evaluation


def read_measured(folder: Path, run: Run, evaluated: bool) -> Measured:
    """The numbers of a run, after comparing its files with each other.

    Args:
        evaluated: whether the experiment has an evaluation.

    Raises:
        FileNotFoundError: it is not finished.
        Refusal: a file is damaged, or of another run.
    """
    about = read_about_of(folder, run)
    names = ["run.json", *["evaluation.json"] * evaluated]
    sums, by = of_files(folder, names, MOST), ""
    refuse_changed(folder, about["files"], ["metrics.csv", "result.json"])
    if evaluated:
        record = read_json(folder / EVALUATED, "evaluated", "delete evaluation.json")
        if record["files"] != sums:
            raise Refusal(f"{folder}/evaluation.json is not of this run ({EVALUATED}); {REMAKE}")
        by = record["sources_sha256"]
    result = read_result(folder / "result.json")
    evaluation = read_result(folder / "evaluation.json") if evaluated else Result({}, None)
    return Measured(
        about,
        result.numbers,
        evaluation.numbers,
        evaluation.confusion or result.confusion,
        read_metrics(folder / "metrics.csv"),
        by,
        sums,
    )


def checked(value: float | None) -> float:
    """The number as a float.

    Raises:
        ValueError: it is too large to be drawn, or at all.
    """
    if value is None:
        return math.nan
    if abs(value) > LARGEST:
        raise ValueError("a number is larger than 1e300")
    return float(value)


def write_result(path: Path, result: Result) -> None:
    found: dict[str, Any] = {
        key: value if math.isfinite(value) else None for key, value in result.numbers.items()
    }
    if result.confusion:
        names, matrix = result.confusion
        found |= dict(zip(MATRIX, (matrix, names), strict=True))
    found |= result.texts
    atomic.write_text(path, json.dumps(found, indent=2) + "\n")


def result_line(folder: Path, run: Run, evaluated: bool) -> str:
    """The results of a run in one line, or the reason why they cannot be read."""
    try:
        found = read_measured(folder, run, evaluated)
    except FileNotFoundError as error:
        return f"{error.filename} is not there; run the same command again"
    except Refusal as refusal:
        return str(refusal)
    return line_of(found)


def newest(rows: Sequence[Row]) -> dict[str, float]:
    """The last number of each column of metrics.csv but the first, which counts: what a program has
    come to that writes no result.
    """
    found: dict[str, float] = {}
    for row in rows:
        found |= {key: row[key] for key in list(row)[1:] if not math.isnan(row[key])}
    return found


def line_of(found: Measured) -> str:
    numbers = found.numbers or newest(found.metrics)
    return ", ".join(f"{key} {value:.6g}" for key, value in numbers.items()) or "finished"
