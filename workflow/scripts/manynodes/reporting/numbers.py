"""What the runs of an experiment have measured, whatever their program, as tables."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from manynodes.base.errors import Refusal, drawable
from manynodes.base.reading import read_json
from manynodes.experiment.config import COLUMNS, Experiment, Run, run_name
from manynodes.experiment.log_lines import COUNTS
from manynodes.reporting import scaling, speed_up
from manynodes.reporting.measures import (
    MOST_WHOLE,
    Confusion,
    Measured,
    columns_of,
    read_measured,
    unused,
)
from manynodes.reporting.metrics import Row
from manynodes.reporting.results import read_finished
from manynodes.reporting.sums import PUT_BACK
from manynodes.reporting.tables import incident_table

# All that an experiment may have.
TABLES = ("summary", "curves", "incidents", "confusion", "scaling")
# In the name of the folds of one of several settings.
OF_SETTING = " folds of "
# Beside a commit.
CHANGES = {True: " + changes", False: "", None: " (changes unknown)"}
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
        environment: environment.json; empty if there is none.
        rates: `speed_up.rates_of` of the training of a user's program.
    """

    about: dict[str, Any]
    results: dict[str, Any]
    rows: pd.DataFrame
    confusion: Confusion | None
    sums: dict[str, str]
    environment: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)


def read(experiment: Experiment, runs: Iterable[str], results: Path) -> dict[str, Numbers]:
    """The numbers of runs.

    Args:
        results: folder of the experiment.

    Raises:
        Refusal: a file of a run is missing, damaged, or of another run.
    """
    try:
        if experiment.built_in:
            return {run: of_classifier(experiment, results / run) for run in runs}
        return of_programs(experiment, runs, results)
    except FileNotFoundError as error:
        raise Refusal(f"{error.filename} is not there; run the same command again") from None


def of_classifier(experiment: Experiment, folder: Path) -> Numbers:
    """Test accuracy and loss, the kept epochs beside its rows, and the confusion matrix. The loss
    has the name of an axis if the runs differ in what they minimize.
    """
    found = read_finished(experiment, folder)
    evaluation, rows = found.evaluation, table_of(found.rows)
    published = {"epoch": found.about["metrics"]["epoch"]} | evaluation["plain"]
    kept = pd.DataFrame([*evaluation["checkpoints"], published])[["epoch", "loss", "accuracy"]]
    kept = kept.drop_duplicates("epoch")
    kept = kept.rename(columns={"loss": "test_loss", "accuracy": "test_accuracy"})
    results = evaluated(evaluation)
    if experiment.runs[folder.name].best:
        results["epoch"] = found.about["metrics"]["epoch"]
    if (validated := found.about["metrics"]["val_accuracy"]) is not None:
        results["val_accuracy"] = validated
    results["images_per_second"] = rows["images_per_second"].mean()
    axes = ["run", *experiment.axes]
    results = {unused(key, "test", axes): value for key, value in results.items()}
    rows = rows.merge(kept, on="epoch", how="left", validate="one_to_one")
    confusion = (evaluation["class_names"], evaluation["confusion_matrix"])
    return Numbers(found.about, results, rows, confusion, found.sums)


def evaluated(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the classifier's evaluation.json, by their columns. Of two classes none is the
    positive one: each has its average precision.
    """
    keys = ("n", "views", "accuracy", "loss", "top5_accuracy", "roc_auc")
    found = {key: evaluation[key] for key in keys if key in evaluation}
    named = zip(evaluation["class_names"], evaluation.get("average_precision", ()), strict=False)
    found |= {f"average_precision ({drawable(name)})": value for name, value in named}
    found |= over_classes(np.asarray(evaluation["confusion_matrix"], float))
    return found | {f"plain_{key}": evaluation["plain"][key] for key in ("accuracy", "loss")}


def over_classes(matrix: np.ndarray) -> dict[str, float]:
    """Balanced accuracy and macro F1, as scikit-learn defines them.

    Args:
        matrix: images by true class (row) and predicted class.
    """
    true, predicted, right = matrix.sum(axis=1), matrix.sum(axis=0), matrix.diagonal()
    there, seen = true > 0, true + predicted > 0
    return {
        "balanced_accuracy": float((right[there] / true[there]).mean()),
        "macro_f1": float((2 * right[seen] / (true + predicted)[seen]).mean()),
    }


def are_even(matrix: Sequence[Sequence[int]]) -> bool:
    """Whether all classes have equally many images: then the balanced accuracy is the accuracy."""
    return len({sum(row) for row in matrix}) == 1


def of_programs(experiment: Experiment, runs: Iterable[str], results: Path) -> dict[str, Numbers]:
    """The numbers that programs have written. One of the evaluation's may have the name of one of
    the training's, and any of them that of one of the axes.
    """
    measured: dict[str, Measured] = {}
    rows: dict[str, pd.DataFrame] = {}
    for run in runs:
        found = read_measured(experiment, results / run)
        rows[run] = table_of(found.metrics)
        # As a table they are smaller.
        measured[run] = replace(found, metrics=[])
    columns = columns_of(experiment.axes, [each.numbers for each in measured.values()])
    # Trainings have counted other images.
    tested = any(each.evaluation.confusion for each in measured.values())
    return {
        run: Numbers(
            found.about,
            {columns[of]: value for of, value in found.numbers.items()},
            rows[run],
            (found.evaluation if tested else found.result).confusion,
            found.sums,
            environment_of(results / run),
            # A rate of the evaluation says nothing about the size of the training.
            speed_up.rates_of(rows[run], found.result.numbers),
        )
        for run, found in measured.items()
    }


def environment_of(folder: Path) -> dict[str, Any]:
    """environment.json of a run without its diff, which may be a megabyte; an earlier version has
    written none.
    """
    with suppress(FileNotFoundError):
        found = read_json(folder / "environment.json", "environment", PUT_BACK)
        found.pop("repository", None)
        return found
    return {}


def table_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows as a table, with whole epochs and steps as whole numbers, if these can be exact."""
    table = pd.DataFrame(rows).astype(float)
    whole = [key for key in COUNTS if key in table
             if (table[key] % 1 == 0).all() and table[key].abs().max() < MOST_WHOLE]  # fmt: skip
    return table.astype(dict.fromkeys(whole, int))


def tables(experiment: Experiment, runs: Mapping[str, Numbers]) -> dict[str, pd.DataFrame]:
    """The tables by name, with the columns that docs/results.md describes."""
    axes = {name: experiment.axis_values(name) for name in runs}
    summary = pd.DataFrame(
        [axes[name] | summary_row(experiment.runs[name], each) for name, each in runs.items()]
    )
    if experiment.built_in and all(are_even(each.confusion[1]) for each in runs.values()
                                   if each.confusion):  # fmt: skip
        summary = summary.drop(columns=["balanced_accuracy", "macro_f1"])
    found = {
        "summary": summary,
        "curves": pd.concat(
            [curves(axes[name], each.rows) for name, each in runs.items()], ignore_index=True
        ),
        "incidents": pd.concat(
            [incident_table(name, each.about) for name, each in runs.items()], ignore_index=True
        ),
    }
    matrices = {name: each.confusion for name, each in runs.items() if each.confusion}
    if matrices:
        groups = judged_together(experiment, list(matrices))
        matrices = {name: added_up([matrices[run] for run in groups[name]]) for name in groups}
        # One of all folds rather than one that lacks some.
        best = max(matrices, key=lambda name: (len(groups[name]), accuracy(matrices[name][1])))
        found["confusion"] = confusion(best, *matrices[best])
    if experiment.varies_in_size:
        found["scaling"] = sizes(experiment, runs)
    return found


def sizes(experiment: Experiment, runs: Mapping[str, Numbers]) -> pd.DataFrame:
    """One row per size: of the classifier with what is known of its steps."""
    if not experiment.built_in:
        measured = {name: (each.rates, each.about["seconds"]) for name, each in runs.items()}
        return speed_up.sizes(experiment, measured)
    steps = [
        scaling.of_run(name, experiment.runs[name], each.about, each.rows, each.results["accuracy"])
        for name, each in runs.items()
    ]
    return scaling.sizes(experiment, steps)


def judged_together(experiment: Experiment, runs: Sequence[str]) -> dict[str, list[str]]:
    """The runs whose test images are counted together, under what they are called: a run alone, or
    the folds of a setting, each of which has tested other images.
    """
    if not experiment.built_in or "fold" not in experiment.axes:
        return {run: [run] for run in runs}
    groups: dict[str, list[str]] = {}
    for run in runs:
        values = experiment.axis_values(run)
        point = {key: value for key, value in values.items() if key not in ("run", "fold")}
        groups.setdefault(f"{OF_SETTING}{run_name(point)}" if point else "", []).append(run)
    found = {}
    for setting, members in groups.items():
        folds = experiment.runs[members[0]].folds
        which = "all" if len(members) == folds else f"{len(members)} of {folds}"
        found[f"{which}{setting or ' folds'}"] = members
    return found


def not_finite(runs: Mapping[str, Numbers]) -> dict[str, list[str]]:
    """The results without a finite number, such as of a training that diverged, by their run; a
    number that it has not measured is not among them.
    """
    found = {
        name: [
            key
            for key, value in each.results.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        for name, each in runs.items()
    }
    return {name: keys for name, keys in found.items() if keys}


def added_up(matrices: Sequence[Confusion]) -> Confusion:
    """One confusion matrix of several with the same classes."""
    return matrices[0][0], np.sum([matrix for _, matrix in matrices], axis=0).tolist()


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
            {"program_commit": (of["commit"] or "unknown")[:10] + CHANGES[of["dirty"]]}
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
    own = {key: unused(key, "measured", [*axes, *rows]) for key in axes if key in rows}
    found = rows.rename(columns=own)
    for position, (key, value) in enumerate(axes.items()):
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
    return float(np.trace(matrix) / max(1, np.sum(matrix)))


def confusion(run: str, names: list[str], matrix: list[list[int]]) -> pd.DataFrame:
    """A run's confusion matrix, one row per pair of classes."""
    names = [*map(drawable, names)]
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
            column not in ("run", *axes, *COLUMNS)
            and pd.api.types.is_numeric_dtype(summary[column])
        )
    ]
