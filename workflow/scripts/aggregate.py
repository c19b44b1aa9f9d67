"""Make the tables, the figures and the page of an experiment from the files of its runs.

summary.csv has one row per run, curves.csv one per run and epoch, and confusion.csv the confusion
matrix of the most accurate run. incidents.csv has what interrupted or slowed the runs. scaling.csv
has one row per size, if the runs vary in it. report.html shows them, and SHA256SUMS says of which
bytes all of these are made.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from ddp.base import atomic
from ddp.base.errors import Refusal, told_in_one_line
from ddp.experiment.config import Experiment
from ddp.reporting import accuracy_figures, page, scaling, scaling_figure, sums
from ddp.reporting.figures import STYLE
from ddp.reporting.results import Finished, read_finished, read_missing
from ddp.reporting.tables import incident_table, refuse_mixture, write_table

# Sentences of advice that are printed.
MOST_SHOWN = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", required=True, metavar="JSON", help="the configuration")
    add("--results", type=Path, required=True, help="folder of the experiment's results")
    add("--missing", type=Path, metavar="FILE", help="table of runs to leave out: they failed")
    add("--output", type=Path, required=True, metavar="FOLDER", help="for tables and figures")
    args = parser.parse_args()
    with told_in_one_line("aggregate"):
        experiment = Experiment.from_json(args.config)
        missing = read_missing(args.missing) if args.missing else None
        left_out = set(missing["run"]) if missing is not None else set()
        names = [name for name in experiment.runs if name not in left_out]
        finished = {name: read_run(experiment, name, args.results / name) for name in names}
        refuse_mixture({name: each.about for name, each in finished.items()})
        tables = tables_of(experiment, finished)
        figures = figures_of(experiment, tables, missing)
        made = []
        for name, table in tables.items():
            made.append(args.output / f"{name}.csv")
            write_table(table, made[-1])
        for name, figure in figures.items():
            made.append(args.output / f"{name}.svg")
            with atomic.replacing(made[-1]) as temporary, mpl.rc_context(STYLE):
                figure.savefig(temporary, format="svg", metadata={"Date": None})
        images = {name: (args.output / f"{name}.svg").read_bytes() for name in figures}
        made.append(args.output / "report.html")
        atomic.write_text(made[-1], page.report(experiment, tables, missing, images))
        sources = {
            args.results / name / file: sha256
            for name, each in finished.items()
            for file, sha256 in each.sums.items()
        }
        sums.write(args.output, made, sources)
        if experiment.varies_in_size:
            for sentence in scaling.advice(experiment, tables["scaling"])[:MOST_SHOWN]:
                print(f"scaling: {sentence}")


def read_run(experiment: Experiment, name: str, folder: Path) -> Finished:
    """The files of a run.

    Raises:
        Refusal: one is missing, damaged, or of another run.
    """
    try:
        return read_finished(folder, experiment.runs[name], experiment.config["test_views"])
    except FileNotFoundError as error:
        raise Refusal(f"{error.filename} is not there; run snakemake again") from None


def tables_of(experiment: Experiment, finished: Mapping[str, Finished]) -> dict[str, pd.DataFrame]:
    """The tables by name, with the columns that docs/results.md describes."""
    histories = {name: pd.DataFrame(each.history) for name, each in finished.items()}
    axes = {name: experiment.axis_values(name) for name in finished}
    summary = pd.DataFrame(
        [axes[name] | summary_row(each, histories[name]) for name, each in finished.items()]
    )
    best = str(summary["run"].iloc[int(summary["accuracy"].argmax())])
    tables = {
        "summary": summary,
        "curves": pd.concat(
            [run_curves(axes[name], each.evaluation, histories[name])
             for name, each in finished.items()]
        ),
        "confusion": confusion(best, finished[best].evaluation),
        "incidents": pd.concat(
            [incident_table(name, each.about) for name, each in finished.items()]
        ),
    }  # fmt: skip
    if experiment.varies_in_size:
        measured = [
            scaling.of_run(name, experiment.runs[name], each.about, histories[name],
                           each.evaluation["accuracy"])
            for name, each in finished.items()
        ]  # fmt: skip
        tables["scaling"] = scaling.sizes(experiment, measured)
    return tables


def figures_of(
    experiment: Experiment, tables: Mapping[str, pd.DataFrame], missing: pd.DataFrame | None
) -> dict[str, Figure]:
    """The figures by name."""
    summary, curves = tables["summary"], tables["curves"]
    settings = [axis for axis in experiment.axes if axis != "seed"]
    title = experiment.name + (
        f" (partial: {len(missing)} runs are missing)" if missing is not None else ""
    )
    figures = {
        metric: accuracy_figures.draw(curves, summary, settings, metric, title)
        for metric in ("accuracy", "loss")
    }
    if experiment.numeric_axes:
        figures["accuracy_by_axis"] = accuracy_figures.draw_axes(
            summary, settings, experiment.numeric_axes, title
        )
    figures["confusion"] = accuracy_figures.draw_confusion(tables["confusion"])
    if experiment.varies_in_size:
        figures["scaling"] = scaling_figure.draw(experiment, tables["scaling"], title)
    return figures


def confusion(run: str, evaluation: dict[str, Any]) -> pd.DataFrame:
    """A run's confusion matrix, one row per pair of classes."""
    names = evaluation["class_names"]
    rows = [
        {
            "run": run,
            "true_class": true,
            "predicted_class": predicted,
            "images": images,
            "true_name": names[true],
            "predicted_name": names[predicted],
        }
        for true, row in enumerate(evaluation["confusion_matrix"])
        for predicted, images in enumerate(row)
    ]
    return pd.DataFrame(rows)


def summary_row(run: Finished, history: pd.DataFrame) -> dict[str, Any]:
    """One run: test metrics, mean images_per_second over its epochs, and provenance."""
    about, evaluation = run.about, run.evaluation
    return {
        "n": evaluation["n"],
        "views": evaluation["views"],
        "accuracy": evaluation["accuracy"],
        "loss": evaluation["loss"],
        "plain_accuracy": evaluation["plain"]["accuracy"],
        "plain_loss": evaluation["plain"]["loss"],
        "images_per_second": history["images_per_second"].mean(),
        "seconds": about["seconds"],
        "attempts": len(about["attempts"]),
        "commit": about["git"]["commit"],
        "dirty": about["git"]["dirty"],
        "code_sha256": about["code_sha256"],
        "data_sha256": about["data_sha256"],
        "run_sha256": run.sums["run.json"],
        "evaluation_sha256": run.sums["evaluation.json"],
    }


def run_curves(
    axes: dict[str, Any], evaluation: dict[str, Any], history: pd.DataFrame
) -> pd.DataFrame:
    """One run's axes and history, with test loss and accuracy for the kept epochs."""
    kept = pd.DataFrame(evaluation["checkpoints"], columns=["epoch", "loss", "accuracy"])
    kept = kept.rename(columns={"loss": "test_loss", "accuracy": "test_accuracy"})
    curves = history.merge(kept, on="epoch", how="left", validate="one_to_one")
    for position, (key, value) in enumerate(axes.items()):
        curves.insert(position, key, value)
    return curves


if __name__ == "__main__":
    main()
