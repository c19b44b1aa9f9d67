"""How the shipped CPU recipes were chosen: each candidate is trained once and compared on the 5,000
validation images.

The test images are never read. python benchmarks/tuning.py DATA-FOLDER WORK-FOLDER writes
tuning.csv beside this file, a row per candidate as it is done; a candidate that is there is not
trained again. On the same kind of processor the accuracies are the same again.
"""

import csv
import os
import sys
from collections.abc import Iterator
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
    "precision",
    "epochs",
    "seed",
    "val_accuracy",
    "val_loss",
    "train_accuracy",
    "cpu",
    "torch",
)


IDENTITY = ("recipe", "widths", "precision", "seed")  # of a row
SEEDS = 3
# With one seed, and the best of them with SEEDS.
WIDTHS = ((24, 64, 128), (24, 64, 192), (16, 64, 256), (24, 96, 128), (24, 64, 256), (32, 96, 192))
BEST = (24, 64, 192)


def shipped(name: str) -> Run:
    """The run of a shipped configuration that trains on two processes."""
    return next(
        run for run in read_experiment(ROOT / "config" / name).runs.values() if run.world_size == 2
    )


def candidates() -> Iterator[tuple[str, Run]]:
    """The runs with their names: in fp32 one step away from the shipped recipe in each direction
    that was considered; in bf16, where wide networks cost less, networks for three epochs.
    """
    default = shipped("config.yaml").with_values(precision="fp32")
    change = default.with_values
    yield "config/config.yaml", default
    yield "narrower at the end", change(widths=(32, 64, 64))
    yield "sgd", change(optimizer="sgd")
    yield "narrower at the end, sgd", change(widths=(32, 64, 64), optimizer="sgd")
    yield "lower learning rate", change(learning_rate=0.375)
    yield "higher learning rate", change(learning_rate=0.9)
    # The decay per image stays the same.
    larger = {"global_batch_size": 500, "learning_rate": 0.85, "weight_decay": 0.0023}
    yield "larger batches", change(**larger)
    yield "three epochs", change(epochs=3)
    yield "config/ninety.yaml", shipped("ninety.yaml").with_values(precision="fp32")
    for seed in range(SEEDS):
        default = shipped("config.yaml").with_values(precision="bf16", seed=seed)
        yield "config/config.yaml", default
        for widths in [BEST] if seed else WIDTHS:
            yield "three epochs", default.with_values(widths=widths, epochs=3)


def main() -> None:
    data, work = map(Path, sys.argv[1:])
    done = []
    if TABLE.exists():
        with TABLE.open() as file:
            done = [[row[key] for key in IDENTITY] for row in csv.DictReader(file)]
    else:
        with TABLE.open("w", newline="") as file:
            csv.writer(file).writerow(COLUMNS)
    for name, run in candidates():
        values = run.values | {"recipe": name, "widths": "-".join(map(str, run.widths))}
        if [str(values[key]) for key in IDENTITY] in done:
            continue
        about = train(run, data, work / name.replace("/", "-"), len(os.sched_getaffinity(0)))
        row = about["config"] | about["metrics"] | about["attempts"][-1] | values
        with TABLE.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS, extrasaction="ignore").writerow(row)
        print(f"{name}: {row['val_accuracy']:.2%}", flush=True)


if __name__ == "__main__":
    main()
