"""From the start of `launch` to the first step of two processes, against importing torch in two
processes.

The first step is not printed. Rank 0 prints an epoch when it is over, and the history has the
duration of the epoch: the first step began that long before the line. The two take turns; medians.
"""

import csv
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from measured import Measured

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
# An epoch of a single step, and a small network: the size affects only the time until its line.
RUN = {
    "dataset": "cifar10",
    "widths": [8, 8, 8],
    "epochs": 1,
    "global_batch_size": 500,
    "validation_fraction": 0.99,
    "checkpoint_every": 0,
    "device": "cpu",
    "nproc_per_node": 2,
}
TIMES = 5


def measure(data: Path, work: Path) -> Iterator[Measured]:
    scratch = work / "scratch"
    scratch.mkdir(exist_ok=True)
    # The rule `stage` has done this before: the data are on the node.
    first_step(data, scratch, work / "run")
    launched, imported = list[float](), list[float]()
    for _ in range(TIMES):
        launched.append(first_step(data, scratch, work / "run"))
        imported.append(import_torch())
    step, torch = statistics.median(launched), statistics.median(imported)
    shutil.rmtree(scratch)
    details = {"first_step_seconds": step, "import_torch_seconds": torch, "times": TIMES}
    yield Measured(
        "launching 2 processes, to the first step",
        "seconds more than importing torch in 2",
        step - torch,
        details=details,
    )


def first_step(data: Path, scratch: Path, output: Path) -> float:
    """Seconds from the start of a launch to the beginning of its first step."""
    shutil.rmtree(output, ignore_errors=True)
    train = [
        SCRIPTS / "train.py",
        "--run",
        json.dumps(RUN),
        "--data",
        data,
        "--scratch",
        scratch,
        "--output",
        output,
    ]
    launch = [SCRIPTS / "launch.py", "--nproc-per-node", 2, "--cpus", 2, "--", *train]
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *map(str, launch)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        (told,) = [time.perf_counter() for line in process.stdout if ": epoch 1/1 " in line]
    with (output / "metrics.csv").open() as file:
        (epoch,) = (float(row["seconds"]) for row in csv.DictReader(file))
    return told - epoch - start


def import_torch() -> float:
    """Seconds in which two processes, started at once, import torch."""
    start = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(2)]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise AssertionError("torch cannot be imported")
    return time.perf_counter() - start
