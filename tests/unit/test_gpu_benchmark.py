"""What a GPU would have to do, without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT


@pytest.mark.faults
def test_a_step_of_airbench94_is_few_kernels(digits: Path, tmp_path: Path) -> None:
    """Estimated; before Muon's filter banks were taken together, 370; by shape, 165."""
    command = [sys.executable, ROOT / "benchmarks" / "bench.py", digits, tmp_path, "launches"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["details"]["optimizer"] <= 30
    assert row["value"] <= 120
