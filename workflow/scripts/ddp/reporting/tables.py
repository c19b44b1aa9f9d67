"""Strict readers for the experiment's tables, which others may have edited."""

import io
from pathlib import Path

import numpy as np
import pandas as pd

from ddp.base.errors import Refusal, reason
from ddp.base.reading import MOST, read_bytes
from ddp.data.datasets import DATASETS
from ddp.experiment.config import Experiment
from ddp.reporting.history import HISTORY, VALIDATION
from ddp.reporting.results import VIEWS

# The columns besides the run and its axes.
SUMMARY = (
    *("n", "views", "accuracy", "loss", "plain_accuracy", "plain_loss"),
    *("images_per_second", "seconds", "commit", "dirty", "code_sha256", "data_sha256"),
)
TEST = ("test_loss", "test_accuracy")
COLUMNS = {
    "summary": SUMMARY,
    "curves": (*HISTORY, *TEST),
    "confusion": ("true_class", "predicted_class", "images"),
    "missing": ("reason", "log"),
}
TEXT = {"run", "views", "commit", "dirty", "code_sha256", "data_sha256", "reason", "log"}
WHOLE = {"n", "epoch", "step", "images", "true_class", "predicted_class"}
MAY_BE_EMPTY = {*VALIDATION, *TEST, "commit", "dirty", "log"}


def read_table(path: Path, name: str, experiment: Experiment) -> pd.DataFrame:
    """One of the tables `summary`, `curves`, `confusion` and `missing`.

    Raises:
        Refusal: it is missing, damaged, or of another experiment.
    """
    axes = list(experiment.axes) if name in ("summary", "curves") else []
    columns = ["run", *axes, *COLUMNS[name]]
    try:
        content = io.BytesIO(read_bytes(path, MOST))
        table = pd.read_csv(content, dtype=str, keep_default_na=False)
        if list(table.columns) != columns:
            raise ValueError("it has other columns")
        for column in set(columns) - TEXT - set(axes):
            table[column] = numbers(table[column], column)
        check(table, name, experiment)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise Refusal(
            f"{path} is damaged ({reason(error)}); delete it and run the same command again"
        ) from None
    # From the names of the runs: the table's own values are not trusted.
    values = {run: experiment.axis_values(run) for run in table["run"].unique()}
    for axis in axes:
        table[axis] = [values[run][axis] for run in table["run"]]
    return table


def check(table: pd.DataFrame, name: str, experiment: Experiment) -> None:
    if not len(table) or not set(table["run"]) <= set(experiment.runs):
        raise ValueError("it is not of this experiment's runs")
    keys = {"curves": ["run", "epoch"], "confusion": ["true_class", "predicted_class"]}.get(
        name, ["run"]
    )
    if table.duplicated(keys).any():
        raise ValueError("it has a row twice")
    if name == "summary" and not set(table["views"]) <= set(VIEWS):
        raise ValueError("unknown views")
    if name == "curves" and any(
        epoch > experiment.runs[run].epochs
        for run, epoch in zip(table["run"], table["epoch"], strict=True)
    ):
        raise ValueError("it has later epochs than its runs")
    if name == "confusion":
        classes = DATASETS[experiment.runs[table["run"].iloc[0]].dataset].classes
        labels = all(
            set(table[column]) == set(range(classes))
            for column in ("true_class", "predicted_class")
        )
        if table["run"].nunique() > 1 or len(table) != classes**2 or not labels:
            raise ValueError("it is not the matrix of a run")


def numbers(texts: pd.Series, column: str) -> pd.Series:
    """A column of finite numbers of at least 0, and shares of at most 1; NaN where it may be
    empty.

    Raises:
        ValueError: another value.
    """
    empty = texts == ""
    values = texts.where(~empty, "nan").astype(float)
    most = 1.0 if column.endswith("accuracy") else np.inf
    good = values.between(0, most) & np.isfinite(values)
    if not (good | (empty & (column in MAY_BE_EMPTY))).all():
        raise ValueError(f"{column} has a value that is none")
    if column in WHOLE and (values % 1 != 0).any():
        raise ValueError(f"{column} has a value that is not whole")
    return values.astype(np.int64) if column in WHOLE else values
