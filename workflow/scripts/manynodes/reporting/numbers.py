"""What the runs of an experiment have measured, whatever their program, as tables."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from manynodes.base.errors import Refusal
from manynodes.experiment.config import COLUMNS, Experiment, Run, run_name
from manynodes.reporting import scaling
from manynodes.reporting.measures import Confusion, newest, read_measured
from manynodes.reporting.results import read_finished
from manynodes.reporting.tables import incident_table

# SHA-256 in run.json of what the run came from.
SOURCES = ("code_sha256", "sources_sha256", "data_sha256", "files_sha256")


@dataclass(frozen=True)
class Numbers:
    """A finished run.

    Attributes:
        about: run.json.
        results: its numbers, by their columns; a text says how they were measured.
        rows: its metrics, one row per count, which is the first column.
        confusion: class names and matrix (true class by row); None if it has none.
        sums: SHA-256 of run.json and evaluation.json, by name.
    """

    about: dict[str, Any]
    results: dict[str, Any]
    rows: pd.DataFrame
    confusion: Confusion | None
    sums: dict[str, str]


def read(experiment: Experiment, name: str, results: Path) -> Numbers:
    """The numbers of a run.

    Args:
        results: folder of the experiment.

    Raises:
        Refusal: a file of the run is missing, damaged, or of another run.
    """
    try:
        if experiment.built_in:
            views = experiment.config["test_views"]
            return of_classifier(results / name, experiment.runs[name], views)
        axes = ["run", *experiment.axes]
        return of_program(results / name, experiment.runs[name], bool(experiment.evaluation), axes)
    except FileNotFoundError as error:
        raise Refusal(f"{error.filename} is not there; run the same command again") from None


def of_classifier(folder: Path, run: Run, views: str) -> Numbers:
    """Test accuracy and loss, the kept epochs beside the history, and the confusion matrix."""
    found = read_finished(folder, run, views)
    evaluation, history = found.evaluation, pd.DataFrame(found.history)
    published = {"epoch": found.about["metrics"]["epoch"]} | evaluation["plain"]
    kept = pd.DataFrame([*evaluation["checkpoints"], published])[["epoch", "loss", "accuracy"]]
    kept = kept.drop_duplicates("epoch")
    kept = kept.rename(columns={"loss": "test_loss", "accuracy": "test_accuracy"})
    results = {key: evaluation[key] for key in ("n", "views", "accuracy", "loss")}
    more = ("top5_accuracy", "roc_auc", "average_precision")
    results |= {key: evaluation[key] for key in more if key in evaluation}
    results |= {f"plain_{key}": evaluation["plain"][key] for key in ("accuracy", "loss")}
    if run.best:
        results["epoch"] = found.about["metrics"]["epoch"]
    if (validated := found.about["metrics"]["val_accuracy"]) is not None:
        results["val_accuracy"] = validated
    results["images_per_second"] = history["images_per_second"].mean()
    rows = history.merge(kept, on="epoch", how="left", validate="one_to_one")
    confusion = (evaluation["class_names"], evaluation["confusion_matrix"])
    return Numbers(found.about, results, rows, confusion, found.sums)


def of_program(folder: Path, run: Run, evaluated: bool, axes: Collection[str]) -> Numbers:
    """The numbers that it has written. One of the evaluation's may have the name of one of the
    training's, and any of them that of one of the axes.
    """
    found = read_measured(folder, run, evaluated)
    results: dict[str, Any] = {}
    written = ("result", found.result), ("evaluated", found.evaluation)
    for origin, numbers in written if found.numbers else [("newest", newest(found.metrics))]:
        for key, value in numbers.items():
            results[unused(key, origin, [*axes, *results, *COLUMNS])] = value
    return Numbers(found.about, results, pd.DataFrame(found.metrics), found.confusion, found.sums)


def unused(name: str, origin: str, taken: Collection[str]) -> str:
    """The name of a column of the user's; if it is taken, with where the numbers come from."""
    while name in taken:
        name = f"{name} ({origin})"
    return name


def tables(experiment: Experiment, runs: Mapping[str, Numbers]) -> dict[str, pd.DataFrame]:
    """The tables by name, with the columns that docs/results.md describes."""
    axes = {name: experiment.axis_values(name) for name in runs}
    summary = pd.DataFrame(
        [axes[name] | summary_row(experiment.runs[name], each) for name, each in runs.items()]
    )
    found = {
        "summary": summary,
        "curves": pd.concat(
            [curves(axes[name], each.rows) for name, each in runs.items()], ignore_index=True
        ),
        "incidents": pd.concat(
            [incident_table(name, each.about) for name, each in runs.items()], ignore_index=True
        ),
    }
    matrices = pooled(axes, {name: each.confusion for name, each in runs.items() if each.confusion})
    if matrices:
        best = max(matrices, key=lambda name: accuracy(matrices[name][1]))
        found["confusion"] = confusion(best, *matrices[best])
    if experiment.built_in and experiment.varies_in_size:
        measured = [
            scaling.of_run(name, experiment.runs[name], each.about, each.rows,
                           each.results["accuracy"])
            for name, each in runs.items()
        ]  # fmt: skip
        found["scaling"] = scaling.sizes(experiment, measured)
    return found


def pool(run: str, axes: Mapping[str, Any]) -> str:
    """What a run is judged with: itself, or all folds of its setting."""
    point = {key: value for key, value in axes.items() if key not in ("run", "fold")}
    if "fold" not in axes:
        return run
    return f"all folds of {run_name(point)}" if point else "all folds"


def pooled(
    axes: Mapping[str, Mapping[str, Any]], matrices: Mapping[str, Confusion]
) -> dict[str, Confusion]:
    """The confusion matrices by run; those of a setting's folds added up, because each image is
    tested in one of them.

    Args:
        axes: the values of each run, as of `axis_values`.
    """
    found: dict[str, Confusion] = {}
    for run, (names, matrix) in matrices.items():
        name = pool(run, axes[run])
        if name in found and found[name][0] == names:
            matrix = np.add(found[name][1], matrix).tolist()
        found[name] = (names, matrix)
    return found


def summary_row(run: Run, numbers: Numbers) -> dict[str, Any]:
    """A run's results, and what they came from."""
    about = numbers.about
    return numbers.results | {
        "seconds": about["seconds"],
        "attempts": len(about["attempts"]),
        "commit": about["git"]["commit"],
        "dirty": about["git"]["dirty"],
        # The user's own, of a program in a repository.
        **(
            {"program_commit": of["commit"][:10] + " + changes" * of["dirty"]}
            if (of := about.get("repository"))
            else {}
        ),
        **({} if run.command else {"computed_in": scaling.computed_in(run, about)}),
        "versions": ", ".join(f"{name} {number}" for name, number in about["versions"].items()),
        **{key: about[key] for key in SOURCES if key in about},
        "run_sha256": numbers.sums["run.json"],
        "evaluation_sha256": numbers.sums.get("evaluation.json"),
    }


def curves(axes: Mapping[str, Any], rows: pd.DataFrame) -> pd.DataFrame:
    """A run's rows, with its axes in front."""
    found = rows.copy()
    for position, (key, value) in enumerate(axes.items()):
        if key in found.columns:
            own = unused(key, "measured", [*axes, *found.columns])
            found = found.rename(columns={key: own})
        found.insert(position, key, value)
    return found


def drawn(experiment: Experiment, table: pd.DataFrame, runs: Mapping[str, Numbers]) -> pd.DataFrame:
    """The curves to draw: unless `test_curve` asks for it, no test results but those of the epoch
    that each run publishes.
    """
    if not experiment.built_in or experiment.config["test_curve"]:
        return table
    published = table["run"].map(
        {name: each.about["metrics"]["epoch"] for name, each in runs.items()}
    )
    found = table.copy()
    found.loc[table["epoch"] != published, ["test_loss", "test_accuracy"]] = float("nan")
    return found


def accuracy(matrix: list[list[int]]) -> float:
    """Share of the diagonal."""
    return sum(row[label] for label, row in enumerate(matrix)) / max(1, sum(map(sum, matrix)))


def confusion(run: str, names: list[str], matrix: list[list[int]]) -> pd.DataFrame:
    """A run's confusion matrix, one row per pair of classes."""
    return pd.DataFrame(
        {
            "run": run,
            "true_class": true,
            "predicted_class": predicted,
            "images": images,
            "true_name": names[true],
            "predicted_name": names[predicted],
        }
        for true, row in enumerate(matrix)
        for predicted, images in enumerate(row)
    )


def results_of(summary: pd.DataFrame, axes: Collection[str]) -> list[str]:
    """The columns of the summary that are measured numbers, and `seconds`."""
    return [
        column
        for column in summary.columns
        if column == "seconds"
        or (
            column not in ("run", "code_sha256", *axes, *COLUMNS)
            and pd.api.types.is_numeric_dtype(summary[column])
        )
    ]
