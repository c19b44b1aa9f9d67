"""The experiment's tables: strict readers, because others may have edited them, and a writer."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddp.base import atomic
from ddp.base.errors import Refusal, one_line, reason
from ddp.base.reading import MOST, read_bytes
from ddp.checkpointing.incidents import LONGEST
from ddp.experiment.config import Experiment
from ddp.reporting import scaling
from ddp.reporting.history import HISTORY, VALIDATION
from ddp.reporting.results import VIEWS, spreadsheet_text

# The columns besides the run and its axes.
SUMMARY = (
    *("n", "views", "accuracy", "loss", "plain_accuracy", "plain_loss"),
    *("images_per_second", "seconds", "attempts", "commit", "dirty", "code_sha256", "data_sha256"),
)
INCIDENTS = ("time", "kind", "text")
TEST = ("test_loss", "test_accuracy")
COLUMNS = {
    "summary": SUMMARY,
    "curves": (*HISTORY, *TEST),
    "confusion": ("true_class", "predicted_class", "images", "true_name", "predicted_name"),
    "scaling": scaling.COLUMNS,
    "incidents": INCIDENTS,
    "missing": ("reason", "log"),
}
TEXT = {
    *("run", "views", "commit", "dirty", "code_sha256", "data_sha256", "reason", "log"),
    *("time", "kind", "text", "true_name", "predicted_name"),
}
WHOLE = {
    *("n", "epoch", "step", "images", "true_class", "predicted_class", "runs", "attempts"),
    *("nodes", "nproc_per_node", "processes", "threads", "cpus", "gpus", "global_batch_size"),
}
MAY_BE_EMPTY = {*VALIDATION, *TEST, *scaling.MAY_BE_EMPTY, "commit", "dirty", "log"}
# Others are divided by them.
POSITIVE = ("processes", "threads", "cpus", "global_batch_size", "images_per_second", "sharing")


def read_table(path: Path, name: str, experiment: Experiment) -> pd.DataFrame:
    """One of the tables in COLUMNS.

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
    if not (len(table) or name == "incidents") or not set(table["run"]) <= set(experiment.runs):
        raise ValueError("it is not of this experiment's runs")
    keys = {"curves": ["run", "epoch"], "confusion": ["true_class", "predicted_class"]}.get(
        name, ["run"]
    )
    if name != "incidents" and table.duplicated(keys).any():
        raise ValueError("it has a row twice")
    if name == "summary" and not set(table["views"]) <= set(VIEWS):
        raise ValueError("unknown views")
    if name == "curves" and any(
        epoch > experiment.runs[run].epochs
        for run, epoch in zip(table["run"], table["epoch"], strict=True)
    ):
        raise ValueError("it has later epochs than its runs")
    if name == "scaling" and (table[list(POSITIVE)] <= 0).any(axis=None):
        raise ValueError("a size has a value of 0")
    if name == "confusion":
        classes = round(len(table) ** 0.5)
        labels = all(
            set(table[column]) == set(range(classes))
            for column in ("true_class", "predicted_class")
        )
        if table["run"].nunique() > 1 or len(table) != classes**2 or not labels:
            raise ValueError("it is not the matrix of a run")
        if any(table.groupby("true_class")["true_name"].nunique() != 1):
            raise ValueError("a class has several names")


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


def incident_table(run: str, about: dict[str, Any]) -> pd.DataFrame:
    """The incidents of a run, from its run.json."""
    rows = [
        {"run": run, **incident, "text": one_line(incident["text"], LONGEST)}
        for incident in about["incidents"]
    ]
    return pd.DataFrame(rows, columns=["run", *INCIDENTS])


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV, with no text that a spreadsheet would compute."""
    for column in table.select_dtypes(include=["object", "string"]):
        table[column] = [
            spreadsheet_text(cell) if isinstance(cell, str) else cell for cell in table[column]
        ]
    with atomic.replacing(path) as temporary:
        table.to_csv(temporary, index=False)
