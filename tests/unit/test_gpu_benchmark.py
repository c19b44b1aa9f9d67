"""benchmarks/gpu.py without a GPU: a small case."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT


@pytest.mark.faults
def test_a_small_case_on_the_cpu(digits: Path, tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    small = {
        "dataset": {"name": "digits"},
        "model": "airbench",
        "widths": [16, 32, 32],
        "epochs": 1,
        "global_batch_size": 64,
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "flip": False,
        "test_views": "plain",
        "nodes": 1,
        "device": "cpu",
    }
    config.write_text(json.dumps(small | {"experiment": "small"}))
    # Threads on CPUs that are busy with other tests wait for each other.
    one_cpu = ["taskset", "--cpu-list", min(os.sched_getaffinity(0))]
    command = [
        *one_cpu,
        sys.executable,
        ROOT / "benchmarks" / "gpu.py",
        digits,
        tmp_path / "out",
        "--configfile",
        config,
        "--seeds",
        "2",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["accuracy"]["mean"] > 0.5
    assert found["accuracy"]["mean"] == pytest.approx(
        sum(run["accuracy"] for run in found["runs"]) / 2
    )
    assert len({run["seconds"] for run in found["runs"]}) == 2
    # No upper bound: other work takes from a CPU between the two measurements.
    assert found["share_of_matrix_rate"] > 0
    assert found["device"] == "cpu"


@pytest.mark.faults
def test_a_step_of_airbench94_is_few_kernels(digits: Path, tmp_path: Path) -> None:
    """Estimated; before Muon's filter banks were taken together, 370; by shape, 165."""
    command = [sys.executable, ROOT / "benchmarks" / "bench.py", digits, tmp_path, "launches"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["details"]["optimizer"] <= 30
    assert row["value"] <= 120
