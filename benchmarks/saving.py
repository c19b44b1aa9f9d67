"""What saving its state costs a training, on this machine: python benchmarks/saving.py DATA-FOLDER [OUTPUT-FOLDER]

Trains an epoch on two processes, saving far more often than by default, and puts the time that the training stood still for it into
proportion: to the default interval, an epoch or 300 s, whichever is shorter. Writing goes on in the background, beside the training; what
it takes is the size of a state and the speed of the storage under OUTPUT-FOLDER.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
MODELS = {"airbench": {"learning_rate": 0.75}, "resnet18_imagenet": {"learning_rate": 0.05}}
SAVE_EVERY_SECONDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="results/data/cifar10 or results/data/digits, fetched before")
    parser.add_argument("output", type=Path, nargs="?", help="where the states are written; a temporary folder by default")
    args = parser.parse_args()
    dataset = json.loads((args.data / "manifest.json").read_text())["dataset"]
    for model, recipe in MODELS.items():
        with tempfile.TemporaryDirectory(dir=args.output) as folder:
            run = {"dataset": dataset, "model": model, "epochs": 1, "nproc_per_node": 2, "checkpoint_every": 0} | recipe
            print(json.dumps({"model": model, "dataset": dataset} | measure(run, args.data, Path(folder) / "run")), flush=True)


def measure(run: dict[str, object], data: Path, output: Path) -> dict[str, float]:
    """Train, and read off what saving took.

    Returns:
        saves: states saved. state_mb: size of one. still_ms: that the training stood still for one. epoch_s: duration of the epoch.
        share: of the training's time at the default interval.
    """
    train = [SCRIPTS / "train.py", "--run", json.dumps(run), "--data", data, "--output", output]
    launch = [SCRIPTS / "launch.py", "--nproc-per-node", "2", "--cpus", "2", "--", *train, "--save-every-seconds", SAVE_EVERY_SECONDS]
    subprocess.run([sys.executable, *map(str, launch)], check=True, stdout=subprocess.DEVNULL)
    saving = json.loads((output / "run.json").read_text())["saving"]
    with (output / "history.csv").open() as file:
        (epoch,) = (float(row["seconds"]) for row in csv.DictReader(file))
    still = saving["seconds"] / saving["times"]
    size = max(path.stat().st_size for path in (output / "state").glob("*.pt"))
    return {
        "saves": saving["times"],
        "state_mb": round(size / 1e6, 2),
        "still_ms": round(1e3 * still, 1),
        "epoch_s": round(epoch, 1),
        "share": round(still / min(epoch, 300), 5),
    }


if __name__ == "__main__":
    main()
