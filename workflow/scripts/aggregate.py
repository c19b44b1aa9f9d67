"""Make the tables of an experiment.

summary.csv has one row per run, curves.csv one per run and epoch, and confusion.csv the confusion
matrix of the most accurate run. incidents.csv has what interrupted or slowed the runs. scaling.csv
has one row per size, if the runs vary in it.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from ddp.base.errors import Refusal, told_in_one_line
from ddp.experiment.config import Experiment
from ddp.reporting import scaling
from ddp.reporting.history import read_history
from ddp.reporting.results import read_about, read_evaluation
from ddp.reporting.tables import incident_table, read_table, write_table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="the configuration as a JSON object")
    parser.add_argument(
        "--results", type=Path, required=True, help="folder of the experiment's results"
    )
    parser.add_argument(
        "--missing",
        type=Path,
        metavar="FILE",
        help="table of runs to leave out, because they failed",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="folder for the tables"
    )
    args = parser.parse_args()
    with told_in_one_line("aggregate"):
        experiment = Experiment.from_json(args.config)
        left_out = (
            set(read_table(args.missing, "missing", experiment)["run"]) if args.missing else set()
        )
        names = [name for name in experiment.runs if name not in left_out]
        summary, curves, incidents, measured = zip(
            *(read_run(experiment, name, args.results / name) for name in names), strict=True
        )
        table = pd.DataFrame(list(summary))
        best = str(table["run"].iloc[int(table["accuracy"].argmax())])
        write_table(table, args.output / "summary.csv")
        write_table(pd.concat(curves), args.output / "curves.csv")
        write_table(
            confusion(best, read_evaluation(args.results / best / "evaluation.json")),
            args.output / "confusion.csv",
        )
        write_table(pd.concat(incidents), args.output / "incidents.csv")
        if experiment.varies_in_size:
            write_table(scaling.sizes(experiment, measured), args.output / "scaling.csv")


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


def read_run(
    experiment: Experiment, name: str, folder: Path
) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """A run's row of the summary, its curves, its incidents, and its measured numbers.

    Raises:
        Refusal: a file of the run is missing, damaged, or of another run.
    """
    run = experiment.runs[name]
    history = pd.DataFrame(read_history(folder / "history.csv", run.epochs))
    try:
        evaluation, about = (
            read_evaluation(folder / "evaluation.json"),
            read_about(folder / "run.json"),
        )
    except FileNotFoundError as error:
        raise Refusal(f"{error.filename} is not there; run snakemake again") from None
    if evaluation["data_sha256"] != about["data_sha256"] or evaluation["dataset"] != run.dataset:
        raise Refusal(
            f"{folder}: evaluation and training used different data; delete evaluation.json "
            "and run snakemake again"
        )
    if any(checkpoint["epoch"] > run.epochs for checkpoint in evaluation["checkpoints"]):
        raise Refusal(
            f"{folder}/evaluation.json has later epochs than the run; delete it and run snakemake "
            "again"
        )
    axes = experiment.axis_values(name)
    return (
        axes | summary_row(evaluation, about, history),
        run_curves(axes, evaluation, history),
        incident_table(name, about),
        scaling.of_run(name, run, about, history, evaluation["accuracy"]),
    )


def summary_row(
    evaluation: dict[str, Any], about: dict[str, Any], history: pd.DataFrame
) -> dict[str, Any]:
    """One run: test metrics, mean images_per_second over its epochs, and provenance."""
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
