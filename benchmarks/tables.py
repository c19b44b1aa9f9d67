"""aggregate.py on 1,000 runs of 100 epochs, with every epoch evaluated.

The result folders are synthetic, in the form of docs/results.md; nothing else of the workflow runs.
"""

import csv
import json
import math
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured import Measured

from classifier.states.kept import METRICS
from manynodes.base.reading import file_sha256
from manynodes.experiment.config import Experiment

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
RUNS, EPOCHS, CLASSES = 1000, 100, 10
# Runs a command and prints its peak memory in KB. A separate process, because the counter includes
# all children.
PEAK = (
    "import resource as r, subprocess as s, sys; s.run(sys.argv[1:], check=True); "
    "print(r.getrusage(r.RUSAGE_CHILDREN).ru_maxrss)"
)


def measure(data: Path, work: Path) -> Iterator[Measured]:  # noqa: ARG001, the data are not read
    results = work / "many"
    shutil.rmtree(results, ignore_errors=True)
    draw = random.Random(0)
    for seed in range(RUNS):
        write_run(results / f"seed~{seed}", seed, draw)
    config = json.dumps({"experiment": "many", "epochs": EPOCHS, "seed": list(range(RUNS))})
    seconds, gigabytes = run(
        "aggregate", "--config", config, "--results", results, "--output", results
    )
    yield Measured(
        f"tables and figures of {RUNS:,} runs of {EPOCHS} epochs",
        "seconds",
        seconds,
        most=30,
    )
    yield Measured(
        f"tables and figures of {RUNS:,} runs of {EPOCHS} epochs",
        "peak memory in GB",
        gigabytes,
        most=1,
    )


def run(program: str, *options: object) -> tuple[float, float]:
    """Seconds and peak memory in GB of one of our programs."""
    start = time.perf_counter()
    command = [sys.executable, "-c", PEAK, sys.executable, SCRIPTS / f"{program}.py", *options]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    return time.perf_counter() - start, int(done.stdout.split()[-1]) * 1024 / 1e9


def write_run(folder: Path, seed: int, draw: random.Random) -> None:
    """The files of a run, with realistic curves."""
    folder.mkdir(parents=True)
    accuracies = [
        0.94 - 0.6 * math.exp(-epoch / 10) + draw.gauss(0, 0.004) for epoch in range(EPOCHS)
    ]
    rows: list[dict[str, Any]] = []
    for epoch, accuracy in enumerate(accuracies, start=1):
        loss = 2 * (1 - accuracy)
        row = (
            epoch,
            90 * epoch,
            0.75 * (1 - epoch / EPOCHS),
            loss,
            accuracy,
            loss,
            accuracy,
            draw.gauss(5000, 100),
            draw.gauss(10, 0.1),
        )
        rows.append(dict(zip(METRICS, row, strict=True)))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, METRICS)
        writer.writeheader()
        writer.writerows(rows)
    kept = {epoch: f"{epoch:064x}" for epoch in range(1, EPOCHS + 1)}
    checkpoints = [
        {
            "epoch": epoch,
            "sha256": kept[epoch],
            "loss": 2 * (1 - accuracy),
            "accuracy": round(accuracy * 10_000) / 10_000,
        }
        for epoch, accuracy in enumerate(accuracies, start=1)
    ]
    # The numbers agree with each other, as those of a real evaluation do.
    of_class = 10_000 // CLASSES
    right = round(accuracies[-1] * of_class)
    matrix = [[of_class * (row == column) for column in range(CLASSES)] for row in range(CLASSES)]
    for true in range(CLASSES):
        matrix[true][true], matrix[true][true - 1] = right, of_class - right
    result = {"loss": 2 * (1 - accuracies[-1]), "accuracy": right / of_class}
    checkpoints[-1] |= result
    data = {"model_sha256": kept[EPOCHS], "data_sha256": "b" * 64, "dataset": "cifar10",
            "class_names": list("abcdefghij")}  # fmt: skip
    classes = {
        "per_class_accuracy": [right / of_class] * CLASSES,
        "confusion_matrix": matrix,
        "expected_calibration_error": 0.1,
    }
    evaluation = (
        data
        | {"n": 10_000, "views": "plain", "plain": result, "checkpoints": checkpoints}
        | result
        | classes
    )
    (folder / "evaluation.json").write_text(json.dumps(evaluation, indent=2))
    config = {"experiment": "many", "epochs": EPOCHS, "seed": seed}
    about = {
        "config": json.loads(Experiment.from_config(config).runs["run"].to_json()),
        "git": {"commit": "0" * 40, "dirty": False},
        "files": {
            "model.safetensors": kept[EPOCHS],
            "metrics.csv": file_sha256(folder / "metrics.csv"),
            **{f"checkpoints/epoch={epoch:03}.safetensors": sum_ for epoch, sum_ in kept.items()},
        },
        "code_sha256": "a" * 64,
        "network_sha256": None,
        "augmentation": {},
        "parameters": 1,
        "data_sha256": "b" * 64,
        "data_source": "npm",
        "versions": {},
        "ranks": [{"host": "n1", "device": "cpu", "threads": 1, "cpu_ids": "0",
                   "forward_seconds": None, "input_seconds": None}],
        "probe": None,
        "attempts": [{}],
        "incidents": [],
        "started": "",
        "ended": "",
        "saving": {"times": 1, "seconds": 0.1},
        "seconds": 1000.0,
        "metrics": rows[-1],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(about, indent=2))
