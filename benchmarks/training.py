"""Trainings and evaluations by the programs, in their own processes, as users run them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from manynodes.experiment.config import Experiment, Run

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "workflow" / "scripts"


def read_experiment(path: Path) -> Experiment:
    """The experiment of a configuration file."""
    return Experiment.from_config(yaml.safe_load(path.read_text()))


def train(run: Run, data: Path, output: Path, cpus: int) -> dict[str, Any]:
    """Train through `launch`; returns run.json. Errors go to stderr."""
    geometry = [
        "--nodes",
        run.nodes,
        "--nproc-per-node",
        run.nproc_per_node,
        "--cpus",
        cpus,
        "--device",
        run.device,
    ]
    program = [
        SCRIPTS / "train.py",
        "--run",
        run.to_json(),
        "--data",
        data,
        "--output",
        output,
        "--resume=fresh",
    ]
    command = [
        sys.executable,
        SCRIPTS / "launch.py",
        "--transport",
        "local",
        *geometry,
        "--",
        *program,
    ]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return json.loads((output / "run.json").read_text())


def evaluate(output: Path, data: Path, views: str) -> dict[str, Any]:
    """Evaluate the weights in a run's folder; returns evaluation.json."""
    files = [
        "--data",
        data,
        "--model",
        output / "model.safetensors",
        "--output",
        output / "evaluation.json",
    ]
    command = [sys.executable, SCRIPTS / "evaluate.py", *files, "--views", views]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return json.loads((output / "evaluation.json").read_text())


def seeds_of(run: Run, seeds: int) -> list[Run]:
    """The same run with the seeds 0, 1, and so on."""
    return [run.with_values(seed=seed) for seed in range(seeds)]
