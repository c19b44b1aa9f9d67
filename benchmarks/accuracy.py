"""Time of the default recipe to 87.5 % of the CIFAR-10 test images, and of a longer one to 90 %.

Accuracies are with six views of each image. The peer is `plain_airbench.py`, a single-process
script with airbench's legacy recipe in fp32; it takes turns with the graph in fp32 and, on a CPU
that computes in bf16, with the graph as it is by default, in three rounds. Its training is compared
with ours (from run.json: from reading the data to the end, with validation and saving), and its
whole process with the whole graph, from `snakemake` to the report, with the data already fetched.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from measured import Measured
from training import ROOT, evaluate, read_experiment, seeds_of, train

from manynodes.ranks.device import computes_in_bf16

SEEDS, ROUNDS = 3, 3
CPUS = len(os.sched_getaffinity(0))
PRECISIONS = ("fp32", "bf16") if computes_in_bf16(torch.device("cpu")) else ("fp32",)


def measure(data: Path, work: Path) -> Iterator[Measured]:
    peers: list[dict[str, float]] = []
    graphs: dict[str, list[dict[str, float]]] = {precision: [] for precision in PRECISIONS}
    for number in range(ROUNDS):
        peers.append(plain_script(data, number))
        for precision, there in graphs.items():
            there.append(whole_graph(data, work / f"graph-{number}-{precision}", precision))
    for precision, there in graphs.items():
        training, whole = (
            mean(graph[key] / peer[key] for graph, peer in zip(there, peers, strict=True))
            for key in ("seconds", "whole_seconds")
        )
        recipe = f"default recipe in {precision}"
        peer = "plain_airbench.py: 5 epochs of airbench's legacy recipe"
        details = {"plain_script": peers, "graph": there}
        yield Measured(f"{recipe}: training time", peer, training, most=0.75, details=details)
        yield Measured(
            f"{recipe}: whole graph, from snakemake to report", f"{peer}, whole process", whole
        )
    yield Measured(
        "plain_airbench.py: test accuracy, six views", "", mean(peer["accuracy"] for peer in peers)
    )
    default = read_experiment(ROOT / "config" / "config.yaml")
    run = next(run for run in default.runs.values() if run.world_size == 2)
    found = [
        trained(seeded, data, work / f"seed~{seeded.seed}", default.config["test_views"])
        for seeded in seeds_of(run, SEEDS)
    ]
    yield from accuracies(f"default recipe, mean of {SEEDS} seeds", "87.5 %", 0.875, found)
    yield Measured(
        f"default recipe, mean of {SEEDS} seeds: training",
        "seconds",
        mean(entry["seconds"] for entry in found),
    )
    longer = read_experiment(ROOT / "config" / "ninety.yaml")
    (run,) = longer.runs.values()
    one = trained(run, data, work / "ninety", longer.config["test_views"])
    yield from accuracies("config/ninety.yaml, one seed", "90 %", 0.9, [one])
    yield Measured("config/ninety.yaml, one seed: training", "seconds", one["seconds"])


def accuracies(
    what: str, against: str, least: float, found: list[dict[str, Any]]
) -> Iterator[Measured]:
    """The accuracy to reach, with six views, and the one with one view beside it."""
    for views, key in (("six views", "accuracy"), ("one view", "plain_accuracy")):
        values = [entry[key] for entry in found]
        details = {
            "accuracies": values,
            "standard_deviation": stdev(values) if len(values) > 1 else None,
        }
        wanted = least if key == "accuracy" else None
        yield Measured(
            f"{what}: test accuracy, {views}",
            against if wanted else "",
            mean(values),
            least=wanted,
            details=details,
        )


def trained(run: Any, data: Path, output: Path, views: str) -> dict[str, Any]:
    about = train(run, data, output, CPUS)
    evaluation = evaluate(output, data, views)
    return {
        "seed": run.seed,
        "seconds": about["seconds"],
        "val_accuracy": about["metrics"]["val_accuracy"],
        "accuracy": evaluation["accuracy"],
        "plain_accuracy": evaluation["plain"]["accuracy"],
        "views": evaluation["views"],
    }


def plain_script(data: Path, seed: int) -> dict[str, float]:
    """The peer in its own process, on all CPUs."""
    start = time.perf_counter()
    command = [
        sys.executable,
        str(Path(__file__).with_name("plain_airbench.py")),
        str(data),
        str(seed),
    ]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(CPUS)},
    )
    return json.loads(done.stdout) | {"whole_seconds": time.perf_counter() - start}


def whole_graph(data: Path, folder: Path, precision: str) -> dict[str, float]:
    """One run of the default experiment, on two processes, in a new working directory with the
    data.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("Snakefile", "config", "profiles", "workflow"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        folder.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / name)
    shutil.copytree(data, folder / "results" / "data" / data.name)
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--profile",
        "profiles/local",
        "--config",
        "nodes=2",
        f"precision={precision}",
    ]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(done.stdout[-4000:] + done.stderr[-4000:])
    results = folder / "results" / "quickstart" / "run"
    evaluation = json.loads((results / "evaluation.json").read_text())
    return {
        "seconds": json.loads((results / "run.json").read_text())["seconds"],
        "whole_seconds": seconds,
        "accuracy": evaluation["accuracy"],
        "plain_accuracy": evaluation["plain"]["accuracy"],
    }
