"""A results folder: finished runs, runs to be replaced, and reasons for missing runs."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from manynodes.base import atomic, failure
from manynodes.base.errors import Refusal, reason, spreadsheet_text
from manynodes.base.reading import MOST, read_json
from manynodes.experiment.command import apart
from manynodes.experiment.config import Experiment, Run, default_run
from manynodes.reporting.metrics import Row, percent, read_metrics
from manynodes.reporting.sums import EVALUATE, REMAKE, of_files, refuse_changed

MOST_ROW = 30_000  # bytes of a row of predictions.csv, most of them of the path
# Shown with every accuracy: accuracies with different numbers of views are not comparable.
VIEWS = {"plain": "one view", "flip": "two views", "flip_shift": "six views"}


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


def changed(about: Path, run: Run) -> list[str]:
    """What has changed in a run's configuration since it was trained, as `epochs 4 -> 5`.

    Args:
        about: its run.json; one that cannot be read has changed, one that is not there has not.
    """
    try:
        before = read_about(about, form_of(run))["config"]
    except FileNotFoundError:
        return []
    except Refusal:
        return [f"{about.name} is damaged, or not of this version"]
    except OSError as error:
        raise Refusal(
            f"{about} cannot be read: {reason(error)}; change its mode or owner"
        ) from None
    return differences(before, run)


def form_of(run: Run) -> str:
    """The schema of its run.json."""
    return "program_run" if run.command else "run"


def differences(before: dict[str, Any], run: Run) -> list[str]:
    """What a configuration of run.json has differently, as `key before -> now`."""
    now = json.loads(run.to_json())
    if not run.command:
        # A key that is not there is newer than the run, which then had its default.
        before = json.loads(default_run().to_json()) | before
    keys = dict.fromkeys([*before, *now]) if run.command else now
    different = [
        (key, *apart(before.get(key, "not given"), now.get(key, "not given")))
        for key in keys
        if key not in before or key not in now or not same(before[key], now[key], bool(run.command))
    ]
    return [f"{key} {was} -> {is_now}" for key, was, is_now in different]


def same(one: Any, other: Any, as_written: bool) -> bool:
    """Whether two values of a key are equal, of a mapping in the same order too: of regular
    expressions, the first one that matches may count.

    Args:
        as_written: 1, 1.0 and true are not the same: a program of the user's may tell them apart.
    """
    if isinstance(one, dict) and isinstance(other, dict) and [*one] != [*other]:
        return False
    if as_written:
        return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    return bool(one == other)


def read_about(path: Path, form: str = "run") -> dict[str, Any]:
    """run.json.

    Args:
        form: `program_run` for a program of the user's.

    Raises:
        FileNotFoundError: it does not exist.
        Refusal: it is damaged.
    """
    return read_json(path, form, "put it back, or delete it to train again")


def read_about_of(folder: Path, run: Run) -> dict[str, Any]:
    """run.json of this run, and of no other.

    Raises:
        FileNotFoundError: the run is not finished.
        Refusal: it is damaged, or of another configuration.
    """
    path = folder / "run.json"
    about = read_about(path, form_of(run))
    if other := differences(about["config"], run):
        raise Refusal(
            f"{path} is of another run: {', '.join(other)}; give another experiment name, or add "
            "--config replace=true"
        )
    return about


@dataclass(frozen=True)
class Finished:
    """The files of a run that is trained and evaluated, each of this run and of no other.

    Attributes:
        about: run.json.
        evaluation: evaluation.json.
        rows: of metrics.csv.
        sums: SHA-256 of the first two, by name.
    """

    about: dict[str, Any]
    evaluation: dict[str, Any]
    rows: list[Row]
    sums: dict[str, str]


def read_finished(experiment: Experiment, folder: Path) -> Finished:
    """The files of a run, after comparing each with the others: the one reader for all that shows
    its numbers.

    Args:
        folder: of the run.

    Raises:
        FileNotFoundError: it is not finished.
        Refusal: a file is damaged or of another run.
    """
    run = experiment.runs[folder.name]
    about = read_about_of(folder, run)
    evaluation = read_evaluation(folder / "evaluation.json")
    kept = {
        f"checkpoints/epoch={each['epoch']:03}.safetensors": each["sha256"]
        for each in evaluation["checkpoints"]
    }
    of_run = {name: sha256 for name, sha256 in about["files"].items() if "/" in name}
    for key, found, known in (
        ("model_sha256", evaluation["model_sha256"], about["files"]["model.safetensors"]),
        ("checkpoints", kept, of_run),
        ("data_sha256", evaluation["data_sha256"], about["data_sha256"]),
        ("dataset", evaluation["dataset"], run.dataset),
        ("views", evaluation["views"], experiment.config["test_views"]),
    ):
        if found != known:
            raise Refusal(
                f"{folder}/evaluation.json is of other weights or another configuration ({key}); "
                f"delete it and {EVALUATE}"
            )
    refuse_changed(folder, about["files"], ["metrics.csv"])
    rows = read_metrics(folder / "metrics.csv")
    predicted = ["predictions.csv"] if "predictions_sha256" in evaluation else []
    sums = of_files(folder, ["run.json", "evaluation.json"], MOST)
    sums |= of_files(folder, predicted, MOST_ROW * (evaluation["n"] + 1))
    return Finished(about, evaluation, rows, sums)


def read_evaluation(path: Path) -> dict[str, Any]:
    """evaluation.json, with consistent numbers.

    Raises:
        FileNotFoundError: it does not exist.
        Refusal: it is damaged.
    """
    evaluation = read_json(path, "evaluation", REMAKE)
    matrix = evaluation["confusion_matrix"]
    classes, n = len(matrix), evaluation["n"]
    square = all(len(row) == classes for row in matrix)
    right = [row[label] for label, row in enumerate(matrix)] if square else []
    per_class = [
        own / sum(row) if any(row) else None for own, row in zip(right, matrix, strict=False)
    ]
    kept = evaluation["checkpoints"]
    epochs = [checkpoint["epoch"] for checkpoint in kept]
    final = [
        {key: checkpoint[key] for key in ("loss", "accuracy")}
        for checkpoint in kept
        if checkpoint["sha256"] == evaluation["model_sha256"]
    ]
    plain = evaluation["plain"]
    agrees = (
        square
        and len(evaluation["per_class_accuracy"]) == classes
        and all(map(close, evaluation["per_class_accuracy"], per_class))
        and len(evaluation["class_names"]) == classes
        and sum(map(sum, matrix)) == n
        and math.isclose(evaluation["accuracy"], sum(right) / n, abs_tol=1e-12)
        and len(set(epochs)) == len(epochs)
        and all(each == plain for each in final)
        and all(close(each["accuracy"] * n, round(each["accuracy"] * n)) for each in (plain, *kept))
        and (
            evaluation["views"] != "plain"
            or (plain["accuracy"], plain["loss"]) == (evaluation["accuracy"], evaluation["loss"])
        )
    )
    if not agrees:
        raise Refusal(f"{path} is damaged (its numbers do not agree with each other); {REMAKE}")
    return evaluation


def close(one: float | None, other: float | None) -> bool:
    """Whether two numbers are equal but for rounding; a class without images has none."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def replacement_line(experiment: str, changes: dict[str, str]) -> str:
    """All replaced runs in one line, grouped by their change."""
    runs: dict[str, list[str]] = {}
    for name, change in changes.items():
        runs.setdefault(change, []).append(name)
    parts = [f"{shortened(names, most=2)} ({change})" for change, names in runs.items()]
    return f"{experiment}: training again would replace finished results: {shortened(parts, '; ')}"


def shortened(words: Sequence[str], separator: str = ", ", most: int = 4) -> str:
    more = f"{separator}and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more


def counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def why_missing(name: str, folder: Path) -> Missing:
    """A missing run, with the reason from the record of its failure."""
    found = failure.read(folder)
    if found and found.again != failure.Again.HERE:
        log = folder / f"{found.stage}.log"
        return Missing(name, f"{found.stage}: {found.line}", str(log))
    if (folder / "run.json").exists():
        return Missing(name, "trained, not evaluated")
    # Snakemake may end before `launch` has ended the ranks and told why.
    began = (folder / "train.log").exists()
    return Missing(name, "interrupted; run the same command again" if began else "not started")


def write_missing(runs: Sequence[Missing], path: Path) -> None:
    """Write the missing runs as a table: run, reason, log."""
    with atomic.replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Missing)])
        writer.writerows(map(spreadsheet_text, astuple(run)) for run in runs)


def accuracy_line(evaluation: dict[str, Any]) -> str:
    """Test accuracy with its number of views, and the one with one view if it differs."""
    views = str(evaluation["views"])
    alone = percent(evaluation["plain"]["accuracy"])
    plain = f", {alone} with one view" if views != "plain" else ""
    return f"test accuracy {percent(evaluation['accuracy'])} with {VIEWS[views]}{plain}"
