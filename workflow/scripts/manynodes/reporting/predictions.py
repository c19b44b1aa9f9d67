"""predictions.csv: what a run's final weights say of each test image."""

import csv
import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from manynodes.base import atomic
from manynodes.base.errors import Refusal, printable, reason, spreadsheet_text
from manynodes.base.reading import file_sha256, read_bytes
from manynodes.reporting.results import read_evaluation
from manynodes.reporting.sums import REMAKE

FILE = "predictions.csv"
COLUMNS = (
    *("row", "file", "true_class", "predicted_class", "true_name", "predicted_name"),
    *("probability", "true_probability"),
)


def write(
    path: Path,
    files: Sequence[str],
    names: Sequence[str],
    rows: Iterable[Sequence[Any]],
    every: int,
) -> str:
    """Write predictions.csv.

    Args:
        files: of all images, by row; empty if they are not known.
        names: of the classes.
        rows: for each test image its row, its true and its predicted class, the probabilities of
            the predicted and of the true class, and those of the first classes.
        every: number of these.

    Returns:
        Its SHA-256.
    """
    safe = [spreadsheet_text(printable(name)) for name in names]
    with atomic.replacing(path) as temporary:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow([*COLUMNS, *(f"p({name})" for name in safe[:every])])
            for row, true, predicted, *probabilities in rows:
                origin = files[row] if files else ""
                classes = [true, predicted, safe[true], safe[predicted]]
                table.writerow([row, origin, *classes, *(f"{p:.9g}" for p in probabilities)])
        return file_sha256(temporary)


def read(run: Path) -> pd.DataFrame | None:
    """The table of a run, with the columns COLUMNS and one of each class's probability, if there
    are few; None if an earlier version evaluated the run.

    Raises:
        FileNotFoundError: the run is not evaluated.
        Refusal: it is not the table of the run's evaluation.json.
    """
    known = read_evaluation(run / "evaluation.json").get("predictions_sha256")
    if known is None:
        return None
    try:
        content = read_bytes(run / FILE)
    except OSError as error:
        raise Refusal(f"{run / FILE} cannot be read ({reason(error)}); {REMAKE}") from None
    if hashlib.sha256(content).hexdigest() != known:
        raise Refusal(f"{run / FILE} is not that of evaluation.json beside it; {REMAKE}")
    texts = dict.fromkeys(("file", "true_name", "predicted_name"), str)
    return pd.read_csv(io.BytesIO(content), dtype=texts, keep_default_na=False)
