"""metrics.csv: what a training has measured, one row per epoch or step."""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from manynodes.base import atomic
from manynodes.base.errors import Refusal, drawable, reason, shown
from manynodes.base.reading import MOST, NotAFile, read_bytes, refuse_separator
from manynodes.experiment.log_lines import COUNTS
from manynodes.reporting.counting import Counted, Tell, of_the_last_start, to_nobody

MOST_COLUMNS = 1000
LARGEST = 10**300
ROUNDING = 1e-9  # of a mean of shares
# What to do about a line that is none.
HALF = "; remove it, if a killed process has left half a line there"
OTHERS = "; the key metrics leaves out other columns"
# Behind what a program is to write in another way.
THERE_TOO = ", also into the file that is there"
T = TypeVar("T")
# Words in the names of numbers that say how good a network is.
GOOD = re.compile("loss|acc|perplexity|error|score", re.IGNORECASE)
# None: it has no number, which is not NaN, the number of a training that went wrong.
Row = dict[str, float | None]


def metrics_file(run: Path) -> Path:
    """The rows of a user's program so far: its own file, or what `supervise` makes of another."""
    collected = run / "state" / "metrics.csv"
    return collected if collected.exists() else run / "work" / "metrics.csv"


def rows_so_far(run: Path) -> Path:
    """The same of any program, or the published rows of a finished run: of the user's program, the
    others may be by an earlier key `metrics`, or of a training that was to replace it.
    """
    published = run / "metrics.csv"
    return published if published.exists() else metrics_file(run)


def read_metrics(path: Path, restarts: int | None = None, tell: Tell = to_nobody) -> list[Row]:
    """The rows of metrics.csv, in the order of its first column; none if there is no such file.

    The first column counts epochs or steps. The numbers of a later row with the same count replace
    those of an earlier one: a program that was interrupted has written some rows twice.

    Args:
        restarts: how often the program that has written it was started again; None if the rows are
            known to be those of its last start.
        tell: as of `of_the_last_start`.

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
        refuse_separator(str(path), header, THERE_TOO)
        # What a killed process wrote last may be half a line.
        if not text.endswith("\n") and len(lines[-1]) < len(header):
            lines = lines[:-1]
        if len(set(header)) < len(header) or not all(header) or len(header) > MOST_COLUMNS:
            raise ValueError(f"its first line must name every column, each once{OTHERS}")
        if any(numeric(name) for name in header):
            raise ValueError("its first line has numbers; it must name every column")
        written: list[Counted] = []
        for number, line in enumerate(lines[1:], 2):
            if line == lines[0]:  # a program that has started again
                continue
            if len(line) != len(header):
                raise ValueError(f"row {number} has {len(line)} cells, not {len(header)}{HALF}")
            row = {key: cell(value, number) for key, value in zip(header, line, strict=True)}
            count = row[header[0]]
            if count is None or not math.isfinite(count):
                raise ValueError(f"row {number} has no {header[0]}")
            written.append((count, row))
    except (ValueError, csv.Error) as error:
        raise Refusal(f"{path}: {error}") from None
    if restarts is not None:
        written = of_the_last_start(written, restarts, header[0], COUNTS, tell)
    rows: dict[float, Row] = {}
    for count, row in written:
        measured = {name: value for name, value in row.items() if value is not None}
        rows[count] = rows.get(count, dict.fromkeys(header)) | measured
    return [rows[count] for count in sorted(rows)]


def numeric(value: Any) -> bool:
    """Whether a value can stand in a column of numbers; nothing can."""
    try:
        number_of(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def number_of(value: Any) -> float:
    return math.nan if value in (None, "") else float(value)


def cell(text: str, row: int) -> float | None:
    """A number, or None for an empty cell; infinities are of a training that went wrong.

    Raises:
        ValueError: it is none.
    """
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"row {row}: {shown(text)} is not a number{OTHERS}") from None
    # What is larger cannot be drawn.
    return value if abs(value) <= LARGEST or math.isnan(value) else math.copysign(math.inf, value)


def write_metrics(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows atomically; an empty file if there are none. None is an empty cell."""
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        # Names in a JSON file may have surrogates, which cannot be written.
        writer.writerow({key: drawable(key) for key in rows[0]})
        writer.writerows({key: number_text(row[key]) for key in row} for row in rows)
    atomic.write_text(path, text.getvalue())


def number_text(value: float | None) -> str:
    """The shortest text of a number; whole ones without a point."""
    if value is None:
        return ""
    value = float(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def newest(rows: Sequence[Row]) -> dict[str, float]:
    """The last number of each column of metrics.csv but the first, which counts: what a program has
    come to that writes no result. That of a training that has diverged is NaN.
    """
    found: dict[str, float] = {}
    for row in rows:
        cells = list(row.items())[1:]
        found |= {key: value for key, value in cells if value is not None}
    return found


def telling_first(found: Iterable[T], by: Callable[[T], str] = str) -> list[T]:
    """What has the names of numbers: those that say how good a network is before others.

    Args:
        by: the name of each.
    """
    return sorted(found, key=lambda each: GOOD.search(by(each)) is None)


def is_share(name: str, values: Iterable[float]) -> bool:
    """Whether numbers of this name are shares of one, shown in percent.

    Args:
        values: all numbers that are shown together.
    """
    finite = [value for value in values if math.isfinite(value)]
    named = "accuracy" in name or name == "macro_f1"
    return named and bool(finite) and min(finite) >= 0 and max(finite) <= 1


def share_form(values: Iterable[float], decimals: int = 2) -> str:
    """How shares are written together: in percent, with so many decimals that only all of them is
    100 %; what is less by no more than the rounding of a mean is all.
    """
    largest = max((value for value in values if value < 1 - ROUNDING), default=0)
    return f"{{:.{next(n for n in range(decimals, 9) if round(largest, n + 2) < 1)}%}}"


def percent(share: float) -> str:
    """A share that stands alone."""
    return share_form([share]).format(share)
