"""predictions.csv: what a run's final weights say of each test image."""

import csv
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manynodes.base import atomic
from manynodes.base.errors import Refusal, reason, spreadsheet_text
from manynodes.base.reading import file_sha256, read_bytes
from manynodes.reporting.results import MOST_ROW, read_evaluation
from manynodes.reporting.sums import REMAKE

if TYPE_CHECKING:
    # Otherwise where it is needed: `evaluate` only writes, and would begin 0.4 CPU seconds later.
    import pandas as pd

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
    safe = [spreadsheet_text(name) for name in names]
    with atomic.replacing(path) as temporary:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow([*COLUMNS, *(f"p({name})" for name in safe[:every])])
            for row, true, predicted, *probabilities in rows:
                origin = files[row] if files else ""
                classes = [true, predicted, safe[true], safe[predicted]]
                table.writerow([row, origin, *classes, *(f"{p:.9g}" for p in probabilities)])
        return file_sha256(temporary)


@dataclass(frozen=True)
class Predictions:
    """What predictions.csv and evaluation.json say of a run's test images.

    Attributes:
        table: the columns COLUMNS, and if there are few classes the probability of each.
        class_names: by label.
        images_sha256: of the array that the rows are of.
        views: of each image.
    """

    table: "pd.DataFrame"
    class_names: list[str]
    images_sha256: str
    views: str


def read(run: Path) -> Predictions | None:
    """The predictions of a run; None if an earlier version evaluated it.

    Raises:
        FileNotFoundError: it is not evaluated.
        Refusal: predictions.csv is not that of its evaluation.json.
    """
    evaluation = read_evaluation(run / "evaluation.json")
    if "predictions_sha256" not in evaluation:
        return None
    try:
        content = read_bytes(run / FILE, MOST_ROW * (evaluation["n"] + 1))
    except OSError as error:
        raise Refusal(f"{run / FILE} cannot be read ({reason(error)}); {REMAKE}") from None
    if hashlib.sha256(content).hexdigest() != evaluation["predictions_sha256"]:
        raise Refusal(f"{run / FILE} is not that of evaluation.json beside it; {REMAKE}")
    import pandas as pd

    texts = dict.fromkeys(("file", "true_name", "predicted_name"), str)
    table = pd.read_csv(io.BytesIO(content), dtype=texts, keep_default_na=False)
    return Predictions(
        table, evaluation["class_names"], evaluation["images_sha256"], evaluation["views"]
    )


def pooled(parts: Sequence[Predictions | None]) -> Predictions | None:
    """The predictions of the folds of a setting together; None if those of one are missing."""
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    import pandas as pd

    return replace(whole[0], table=pd.concat([part.table for part in whole], ignore_index=True))
