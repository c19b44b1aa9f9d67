"""A results folder: finished runs, runs to be replaced, and reasons for missing runs."""

import csv
import json
import math
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from ddp.base import atomic
from ddp.base.errors import Refusal, reason
from ddp.base.reading import read_json
from ddp.checkpointing.incidents import RESTART
from ddp.experiment.config import Common, Run
from ddp.experiment.programs import ProgramRun

# Shown with every accuracy: accuracies with different numbers of views are not comparable.
VIEWS = {"plain": "one view", "flip": "two views", "flip_shift": "six views"}
# Bytes at the end of a log that are searched for the reason of a failure.
TAIL = 65536


@dataclass(frozen=True)
class Missing:
    """A run without evaluation.json.

    Attributes:
        run: its name.
        reason: in one line.
        log: file with more; empty if there is none.
    """

    run: str
    reason: str
    log: str = ""


def replaced(experiment: Common, names: Sequence[str], results: Path) -> dict[str, str]:
    """Finished runs whose configuration has changed, so that training them again replaces results.

    Args:
        names: of the runs to look at.
        results: folder of the experiment.

    Returns:
        For each such run, what has changed: `epochs 4 -> 5`.
    """
    found = {}
    for name in names:
        changes = changed(results / name / "run.json", experiment.runs[name])
        if changes:
            found[name] = ", ".join(changes)
    return found


def changed(about: Path, run: Run | ProgramRun) -> list[str]:
    try:
        own = isinstance(run, ProgramRun)
        before = read_about(about, "program_run" if own else "run")["config"]
    except (FileNotFoundError, Refusal):
        return []
    except OSError as error:
        raise Refusal(
            f"{about} cannot be read: {reason(error)}; change its mode or owner"
        ) from None
    now = json.loads(run.to_json())
    # A key of the built-in trainer that is not there is newer than the run.
    keys = dict.fromkeys([*before, *now]) if own else [key for key in now if key in before]
    return [
        f"{key} {before.get(key, 'not given')} -> {now.get(key, 'not given')}"
        for key in keys
        if key not in before or key not in now or before[key] != now[key]
    ]


def read_about(path: Path, form: str = "run") -> dict[str, Any]:
    """run.json.

    Args:
        form: `program_run` for a program of the user's.

    Raises:
        FileNotFoundError: it does not exist.
        Refusal: it is damaged.
    """
    return read_json(path, form, "train the run again")


def read_evaluation(path: Path) -> dict[str, Any]:
    """evaluation.json, with consistent numbers.

    Raises:
        FileNotFoundError: it does not exist.
        Refusal: it is damaged.
    """
    remedy = "delete it and run the same command again"
    evaluation = read_json(path, "evaluation", remedy)
    matrix = evaluation["confusion_matrix"]
    classes = len(matrix)
    right = sum(row[label] for label, row in enumerate(matrix) if label < len(row))
    epochs = [checkpoint["epoch"] for checkpoint in evaluation["checkpoints"]]
    agrees = (
        all(len(row) == classes for row in matrix)
        and len(evaluation["per_class_accuracy"]) == classes
        and len(evaluation["class_names"]) == classes
        and sum(map(sum, matrix)) == evaluation["n"]
        and math.isclose(evaluation["accuracy"], right / evaluation["n"], abs_tol=1e-12)
        and len(set(epochs)) == len(epochs)
        and (
            evaluation["views"] != "plain"
            or evaluation["plain"]["accuracy"] == evaluation["accuracy"]
        )
    )
    if not agrees:
        raise Refusal(f"{path} is damaged (its numbers do not agree with each other); {remedy}")
    return evaluation


def replacement_line(experiment: str, changes: dict[str, str]) -> str:
    """All replaced runs in one line, grouped by their change."""
    runs: dict[str, list[str]] = {}
    for name, change in changes.items():
        runs.setdefault(change, []).append(name)
    parts = [f"{shortened(names)} ({change})" for change, names in runs.items()]
    return f"{experiment}: training again would replace finished results: {shortened(parts, '; ')}"


def shortened(words: Sequence[str], separator: str = ", ", most: int = 4) -> str:
    more = f"{separator}and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more


def why_missing(name: str, folder: Path, trained_by: str = "model.safetensors") -> Missing:
    """A missing run, with the reason from the log of its failed stage.

    Args:
        trained_by: the file that a finished training has.
    """
    trained = (folder / trained_by).exists()
    # The programs whose last line names the reason, by stage.
    training = {"train": ("launch: ", "prepare: ", "publish: "), "stage": ("launch: ",)}
    evaluating = {"evaluate": ("evaluate: ", "run_program: ", "publish: ")}
    stages = evaluating if trained else training
    for stage, programs in stages.items():
        log = folder / f"{stage}.log"
        if reason := last_reason(log, programs):
            return Missing(name, f"{stage}: {reason}", str(log))
    if trained:
        return Missing(name, "trained, not evaluated")
    # Snakemake may end before `launch` has ended the ranks and told why.
    began = (folder / "train.log").exists()
    return Missing(name, "interrupted; run the same command again" if began else "not started")


def last_reason(log: Path, prefixes: tuple[str, ...]) -> str:
    """The last line of a log that begins with a prefix, without it; empty if there is none, or if
    it says that the training goes on.
    """
    try:
        if not log.is_file():
            return ""
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read(TAIL).decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = next((line for line in reversed(lines) if line.startswith(prefixes)), "")
    return "" if RESTART in last else last.partition(": ")[2]


def read_missing(path: Path) -> pd.DataFrame:
    """The table that `write_missing` has written."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def write_missing(runs: Sequence[Missing], path: Path) -> None:
    """Write the missing runs as a table: run, reason, log."""
    with atomic.replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Missing)])
        writer.writerows(map(spreadsheet_text, astuple(run)) for run in runs)


def spreadsheet_text(text: str) -> str:
    """Text for a cell of a table, which a spreadsheet might otherwise compute as a formula.

    Source: OWASP, CSV Injection.
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def read_accuracy(folder: Path) -> str:
    """A run's accuracy in one line, or the reason why it cannot be read."""
    path = folder / "evaluation.json"
    try:
        return accuracy_line(read_evaluation(path))
    except FileNotFoundError:
        return f"{path} is not there; run the same command again"
    except Refusal as refusal:
        return str(refusal)


def accuracy_line(evaluation: dict[str, Any]) -> str:
    """Test accuracy with its number of views, and the one with one view if it differs."""
    views = str(evaluation["views"])
    plain = f", {evaluation['plain']['accuracy']:.2%} with one view" if views != "plain" else ""
    return f"test accuracy {evaluation['accuracy']:.2%} with {VIEWS[views]}{plain}"
