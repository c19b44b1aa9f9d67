"""benchmarks/gpu.py without a GPU: a small case."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from forked import server
from programs import ROOT

BENCHMARKS = ROOT / "benchmarks"


def run_forked(command: list[str], **_: object) -> None:
    """Instead of subprocess.run: `launch` only prints its plan, and train.py runs without it."""
    _, *words = command
    if "--" in words:
        launch, *arguments = words[: words.index("--")]
        words = words[words.index("--") + 1 :]
        plan = server().run([launch, "--dry-run", *arguments, "--", *words])
        assert plan.returncode == 0, plan.stderr
    done = server().run(words)
    assert done.returncode == 0, done.stderr


@pytest.mark.faults
def test_a_small_case_on_the_cpu(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu
    import training

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
    arguments = [digits, tmp_path / "out", "--configfile", config, "--seeds", 2]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
    forked = SimpleNamespace(run=run_forked, DEVNULL=None)
    monkeypatch.setattr(training, "subprocess", forked)
    gpu.main()
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
    done = server().run([*map(str, [BENCHMARKS / "bench.py", digits, tmp_path]), "launches"])
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["details"]["optimizer"] <= 30
    assert row["value"] <= 120
