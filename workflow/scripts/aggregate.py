"""Put an experiment's runs into tables: summary.csv, a row per run; curves.csv, a row per run and epoch; confusion.csv, the confusion
matrix of the most accurate run.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from ddp import atomic
from ddp.config import Experiment
from ddp.errors import Refusal, told_in_one_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the configuration as a JSON object")
    parser.add_argument("--results", type=Path, required=True, help="folder of the experiment's results")
    parser.add_argument("--missing", type=Path, metavar="FILE", help="table of runs to leave out, because they failed")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder for the tables")
    args = parser.parse_args()
    with told_in_one_line("aggregate"):
        experiment = Experiment.from_json(args.config)
        left_out = set(pd.read_csv(args.missing, dtype=str)["run"]) if args.missing else set()
        names = [name for name in experiment.runs if name not in left_out]
        summary, curves = zip(*(read_run(experiment, name, args.results / name) for name in names), strict=True)
        table = pd.DataFrame(list(summary))
        best = str(table["run"].iloc[int(table["accuracy"].argmax())])
        write(table, args.output / "summary.csv")
        write(pd.concat(curves), args.output / "curves.csv")
        write(confusion(best, read_json(args.results / best / "evaluation.json")), args.output / "confusion.csv")


def confusion(run: str, evaluation: dict[str, Any]) -> pd.DataFrame:
    """A run's confusion matrix, a row per pair of classes."""
    rows = [
        {"run": run, "true_class": true, "predicted_class": predicted, "images": images}
        for true, row in enumerate(evaluation["confusion_matrix"])
        for predicted, images in enumerate(row)
    ]
    return pd.DataFrame(rows)


def axis_values(experiment: Experiment, name: str) -> dict[str, Any]:
    """The run's name and its value on each axis."""
    run = experiment.runs[name]
    values = {key: getattr(run, key) for key in experiment.axes}
    return {"run": name} | {key: "-".join(map(str, v)) if isinstance(v, tuple) else v for key, v in values.items()}


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise Refusal(f"{path} is damaged ({error}); delete it and run snakemake again") from None


def read_run(experiment: Experiment, name: str, folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """A run's row of the summary, and its curves.

    Raises:
        Refusal: a file of the run is damaged.
    """
    try:
        history = pd.read_csv(folder / "history.csv")
        if history["epoch"].tolist() != list(range(1, experiment.runs[name].epochs + 1)):
            raise Refusal(f"{folder}/history.csv does not have the epochs 1 to {experiment.runs[name].epochs}; train the run again")
        evaluation, about = read_json(folder / "evaluation.json"), read_json(folder / "run.json")
        axes = axis_values(experiment, name)
        return axes | summary_row(evaluation, about, history), run_curves(axes, evaluation, history)
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(f"{folder}: evaluation.json, run.json or history.csv is damaged ({error}); make it again") from None


def summary_row(evaluation: dict[str, Any], about: dict[str, Any], history: pd.DataFrame) -> dict[str, Any]:
    """One run: test metrics, speed, and what it was made of. `images_per_second` is the mean over its epochs."""
    return {
        "n": evaluation["n"],
        "views": evaluation["views"],
        "accuracy": evaluation["accuracy"],
        "loss": evaluation["loss"],
        "plain_accuracy": evaluation["plain"]["accuracy"],
        "plain_loss": evaluation["plain"]["loss"],
        "images_per_second": history["images_per_second"].mean(),
        "seconds": about["seconds"],
        "commit": about["git"]["commit"],
        "dirty": about["git"]["dirty"],
        "code_sha256": about["code_sha256"],
        "data_sha256": about["data_sha256"],
    }


def run_curves(axes: dict[str, Any], evaluation: dict[str, Any], history: pd.DataFrame) -> pd.DataFrame:
    """One run's axes and history with, for the kept epochs, loss and accuracy on the test images."""
    kept = pd.DataFrame(evaluation["checkpoints"], columns=["epoch", "loss", "accuracy"])
    kept = kept.rename(columns={"loss": "test_loss", "accuracy": "test_accuracy"})
    curves = history.merge(kept, on="epoch", how="left", validate="one_to_one")
    for position, (key, value) in enumerate(axes.items()):
        curves.insert(position, key, value)
    return curves


def write(table: pd.DataFrame, path: Path) -> None:
    with atomic.replacing(path) as temporary:
        table.to_csv(temporary, index=False)


if __name__ == "__main__":
    main()
