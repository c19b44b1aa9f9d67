"""history.csv: losses, accuracies and speed of a training, one row per epoch."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import Refusal, reason
from manynodes.base.reading import MOST, read_bytes

HISTORY = (
    "epoch",
    "step",
    "lr",
    "train_loss",
    "train_accuracy",
    "val_loss",
    "val_accuracy",
    "images_per_second",
    "seconds",
)
# Empty without a held-out set.
VALIDATION = ("val_loss", "val_accuracy")


def write_history(path: Path, history: Sequence[dict[str, Any]]) -> None:
    """Write the rows atomically."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, HISTORY)
    writer.writeheader()
    writer.writerows(history)
    atomic.write_text(path, text.getvalue())


def read_history(path: Path, epochs: int, fewer: bool = False) -> list[dict[str, float]]:
    """The rows of a finished training; an empty value is NaN.

    Args:
        fewer: it may have ended before all `epochs`.

    Raises:
        Refusal: it is damaged, or does not have the epochs 1 to `epochs`.
    """
    try:
        header, *rows = csv.reader(
            io.StringIO(read_bytes(path, MOST).decode(), newline=""), strict=True
        )
        if tuple(header) != HISTORY:
            raise ValueError("other columns")
        history = [
            {key: number(key, text) for key, text in zip(HISTORY, row, strict=True)} for row in rows
        ]
    except (OSError, ValueError, OverflowError, csv.Error) as error:
        raise Refusal(f"{path} is damaged ({reason(error)}); train the run again") from None
    there = [row["epoch"] for row in history]
    last = min(len(there), epochs) if fewer and there else epochs
    if there != list(range(1, last + 1)):
        raise Refusal(f"{path} does not have the epochs 1 to {epochs}; train the run again")
    return history


def number(key: str, text: str) -> float:
    if key in VALIDATION and text == "":
        return math.nan
    value = int(text) if key in ("epoch", "step") else float(text)
    least = 1e-9 if key == "images_per_second" else 0
    if not (math.isfinite(value) and value >= least) or (key.endswith("accuracy") and value > 1):
        raise ValueError(f"{key} {text[:20]}")
    return value
