"""Which epochs' weights a training keeps, and when it ends: from its validation results alone."""

from collections.abc import Mapping, Sequence
from typing import Any

# The columns of metrics.csv.
METRICS = (
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
# Its rows so far; without a held-out set, those of validation are None.
History = Sequence[Mapping[str, Any]]


def best_epoch(history: History, measure: str) -> int:
    """The epoch with the best validation result, the first of equals.

    Args:
        history: at least one row.
        measure: `val_accuracy` or `val_loss`.
    """
    sign = -1 if measure == "val_accuracy" else 1
    return min(history, key=lambda row: (sign * row[measure], row["epoch"]))["epoch"]


def finished(run: Mapping[str, Any], history: History) -> bool:
    """Whether a training has all its epochs, or enough of them without a better result.

    Args:
        run: every key; one of an earlier version may lack `best` and `patience`.
    """
    patience = run.get("patience")
    return len(history) >= run["epochs"] or bool(
        patience and history and len(history) - best_epoch(history, run["best"]) >= patience
    )


def kept_epochs(run: Mapping[str, Any], history: History) -> set[int]:
    """The epochs whose weights are kept after the last one of the history: those to publish, and
    the best one so far.
    """
    best = run.get("best")
    return scheduled(run["checkpoint_every"], len(history)) | (
        {best_epoch(history, best)} if best and history else set()
    )


def scheduled(every: int, epochs: int) -> set[int]:
    """The epochs that `checkpoint_every` asks for."""
    return set(range(every, epochs + 1, every)) if every else set()
