"""aggregate.py and plot.py on 1,000 runs of 100 epochs, with every epoch evaluated.

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

from ddp.reporting.history import HISTORY

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
    taken = {
        "aggregate": run(
            "aggregate", "--config", config, "--results", results, "--output", results
        ),
        "plot": run("plot", "--tables", results, "--config", config, "--output", results),
    }
    details = {
        f"{program}_{what}": value
        for program, both in taken.items()
        for what, value in zip(("seconds", "gb"), both, strict=True)
    }
    seconds, gigabytes = zip(*taken.values(), strict=True)
    yield Measured(
        f"tables and figures of {RUNS:,} runs of {EPOCHS} epochs",
        "seconds",
        sum(seconds),
        most=30,
        details=details,
    )
    yield Measured(
        f"tables and figures of {RUNS:,} runs of {EPOCHS} epochs",
        "peak memory in GB",
        max(gigabytes),
        most=1,
        details=details,
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
        rows.append(dict(zip(HISTORY, row, strict=True)))
    with (folder / "history.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, HISTORY)
        writer.writeheader()
        writer.writerows(rows)
    checkpoints = [
        {"epoch": epoch, "loss": 2 * (1 - accuracy), "accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies, start=1)
    ]
    # The numbers agree with each other, as those of a real evaluation do.
    of_class = 10_000 // CLASSES
    right = round(accuracies[-1] * of_class)
    matrix = [[of_class * (row == column) for column in range(CLASSES)] for row in range(CLASSES)]
    for true in range(CLASSES):
        matrix[true][true], matrix[true][true - 1] = right, of_class - right
    result = {"loss": 2 * (1 - accuracies[-1]), "accuracy": right / of_class}
    data = {"model_sha256": "c" * 64, "data_sha256": "b" * 64, "dataset": "cifar10"}
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
    about = {
        "config": {"seed": seed, "epochs": EPOCHS},
        "git": {"commit": "0" * 40, "dirty": False},
        "code_sha256": "a" * 64,
        "data_sha256": "b" * 64,
        "data_source": "npm",
        "versions": {},
        "ranks": [{}],
        "attempts": [{}],
        "incidents": [],
        "started": "",
        "ended": "",
        "saving": {"times": 1, "seconds": 0.1},
        "seconds": 1000.0,
        "metrics": rows[-1],
    }
    (folder / "run.json").write_text(json.dumps(about, indent=2))
