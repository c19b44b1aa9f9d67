"""Share of a training's time for saving at the default interval: an epoch or 300 s, whichever is
shorter.

Trains on few images and two processes and saves every second. The time that training waited for a
state is compared with a whole epoch at the measured speed. Writing continues in the background;
only the last state is waited for, and it counts too. The cost depends on the size of a state and on
the storage of `work`.
"""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured import Measured

from classifier.training.sizes import training_images
from manynodes.data.datasets import DATASETS
from manynodes.experiment.config import Experiment

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
# So many images are held out that training takes some ten seconds.
MODELS = {
    "airbench": {"learning_rate": 0.75, "validation_fraction": 0.3},
    "resnet18_imagenet": {"learning_rate": 0.05, "validation_fraction": 0.8},
}
SAVE_EVERY_SECONDS = 300


def measure(data: Path, work: Path) -> Iterator[Measured]:
    (default,) = Experiment.from_config({"experiment": "test"}).runs.values()
    for model, recipe in MODELS.items():
        output = work / model
        shutil.rmtree(output, ignore_errors=True)
        about, speed = trained(
            {"model": model, "epochs": 1, "nproc_per_node": 2, "checkpoint_every": 0} | recipe,
            data,
            output,
        )
        still = about["saving"]["seconds"] / about["saving"]["times"]
        epoch = training_images(default, DATASETS["cifar10"].train_images) / speed
        size = max(path.stat().st_size for path in (output / "state").glob("*.safetensors"))
        details = {
            "saves": about["saving"]["times"],
            "state_mb": size / 1e6,
            "still_ms": 1e3 * still,
            "epoch_seconds": epoch,
        }
        share = still / min(epoch, SAVE_EVERY_SECONDS)
        yield Measured(
            f"saving the state, {model}",
            "share of the training's time",
            share,
            most=0.01,
            details=details,
        )


def trained(run: dict[str, Any], data: Path, output: Path) -> tuple[dict[str, Any], float]:
    """Train the run, of one epoch; returns its run.json and its images per second."""
    train = [
        SCRIPTS / "train.py",
        "--run",
        json.dumps(run),
        "--data",
        data,
        "--output",
        output,
        "--save-every-seconds",
        1,
    ]
    launch = [SCRIPTS / "launch.py", "--nproc-per-node", 2, "--cpus", 2, "--", *train]
    subprocess.run([sys.executable, *map(str, launch)], check=True, stdout=subprocess.DEVNULL)
    with (output / "metrics.csv").open() as file:
        (speed,) = (float(row["images_per_second"]) for row in csv.DictReader(file))
    return json.loads((output / "run.json").read_text()), speed
