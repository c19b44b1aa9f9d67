"""Put an experiment's runs into two tables: summary.csv, a row per run, and curves.csv, a row per run and epoch."""

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
    parser.add_argument("--summary", type=Path, required=True, help="summary.csv to write")
    parser.add_argument("--curves", type=Path, required=True, help="curves.csv to write")
    args = parser.parse_args()
    with told_in_one_line("aggregate"):
        experiment = Experiment.from_config(json.loads(args.config))
        summary = [summary_row(experiment, name, args.results / name) for name in experiment.runs]
        curves = [run_curves(experiment, name, args.results / name) for name in experiment.runs]
        write(pd.DataFrame(summary), args.summary)
        write(pd.concat(curves), args.curves)


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


def summary_row(experiment: Experiment, name: str, folder: Path) -> dict[str, Any]:
    """One run: axes, test metrics, speed, and what it was made of. `images_per_second` is the mean over its epochs."""
    evaluation, about = read_json(folder / "evaluation.json"), read_json(folder / "run.json")
    history = pd.read_csv(folder / "history.csv")
    return axis_values(experiment, name) | {
        "n": evaluation["n"],
        "accuracy": evaluation["accuracy"],
        "loss": evaluation["loss"],
        "images_per_second": history["images_per_second"].mean(),
        "seconds": about["seconds"],
        "commit": about["git"]["commit"],
        "dirty": about["git"]["dirty"],
        "code_sha256": about["code_sha256"],
        "data_sha256": about["data_sha256"],
    }


def run_curves(experiment: Experiment, name: str, folder: Path) -> pd.DataFrame:
    """One run's history with, for the kept epochs, loss and accuracy on the test images."""
    history = pd.read_csv(folder / "history.csv")
    kept = pd.DataFrame(read_json(folder / "evaluation.json")["checkpoints"], columns=["epoch", "loss", "accuracy"])
    kept = kept.rename(columns={"loss": "test_loss", "accuracy": "test_accuracy"})
    curves = history.merge(kept, on="epoch", how="left", validate="one_to_one")
    for position, (key, value) in enumerate(axis_values(experiment, name).items()):
        curves.insert(position, key, value)
    return curves


def write(table: pd.DataFrame, path: Path) -> None:
    with atomic.replacing(path) as temporary:
        table.to_csv(temporary, index=False)


if __name__ == "__main__":
    main()
