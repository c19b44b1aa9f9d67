"""How the shipped CPU recipes were chosen: each candidate is trained once and compared on the 5,000
validation images.

The test images are never read. python benchmarks/tuning.py DATA-FOLDER WORK-FOLDER writes
tuning.csv beside this file, a row per candidate as it is done; a candidate that is there is not
trained again. On the same kind of processor the accuracies are the same again.
"""

import csv
import dataclasses
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "workflow" / "scripts"))

from training import read_experiment, train  # noqa: E402

from manynodes.experiment.config import Run  # noqa: E402

TABLE = Path(__file__).with_name("tuning.csv")
COLUMNS = (
    "recipe",
    "widths",
    "optimizer",
    "learning_rate",
    "global_batch_size",
    "weight_decay",
    "epochs",
    "seed",
    "val_accuracy",
    "val_loss",
    "train_accuracy",
    "cpu",
    "torch",
)


def shipped(name: str) -> Run:
    """The run of a shipped configuration that trains on two processes."""
    return next(
        run for run in read_experiment(ROOT / "config" / name).runs.values() if run.world_size == 2
    )


def candidates() -> dict[str, Run]:
    """The runs by name; one step away from the shipped recipe in each direction that was
    considered.
    """
    default = shipped("config.yaml")
    change = dataclasses.replace
    return {
        "config/config.yaml": default,
        "narrower at the end": change(default, widths=(32, 64, 64)),
        "sgd": change(default, optimizer="sgd"),
        "narrower at the end, sgd": change(default, widths=(32, 64, 64), optimizer="sgd"),
        "lower learning rate": change(default, learning_rate=0.375),
        "higher learning rate": change(default, learning_rate=0.9),
        # The decay per image stays the same.
        "larger batches": change(
            default, global_batch_size=500, learning_rate=0.85, weight_decay=0.0023
        ),
        "three epochs": change(default, epochs=3),
        "config/ninety.yaml": shipped("ninety.yaml"),
    }


def main() -> None:
    data, work = map(Path, sys.argv[1:])
    done = []
    if TABLE.exists():
        with TABLE.open() as file:
            done = [row["recipe"] for row in csv.DictReader(file)]
    else:
        with TABLE.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)
    for name, run in candidates().items():
        if name in done:
            continue
        about = train(run, data, work / name.replace("/", "-"), len(os.sched_getaffinity(0)))
        row = about["config"] | about["metrics"] | about["attempts"][-1] | {"recipe": name}
        row |= {"widths": "-".join(map(str, row["widths"]))}
        with TABLE.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, extrasaction="ignore").writerow(row)
        print(f"{name}: {row['val_accuracy']:.2%}", flush=True)


if __name__ == "__main__":
    main()
