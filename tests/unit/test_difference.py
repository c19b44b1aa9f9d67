"""Two experiments compared, with intervals that are known."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment
from manynodes.reporting import difference
from manynodes.reporting.difference import Results

ROOT = Path(__file__).resolve().parents[2]


def program(name: str, **keys: Any) -> dict[str, Any]:
    return {"experiment": name, "program": "t.py", "parameters": {"lr": [0.1, 0.2]}} | keys


def experiment(config: dict[str, Any], found: dict[tuple[float, int], dict[str, float]]) -> Results:
    """Runs of a program with these numbers, by learning rate and seed."""
    parsed = Experiment.from_config(config)
    numbers = {}
    for name, run in parsed.runs.items():
        key = (run.values["lr"], run.seed)
        if key in found:
            numbers[name] = found[key]
    return Results(parsed, numbers, frozenset({"none"}), frozenset())


def rate(*values: float, lr: float = 0.1) -> dict[tuple[float, int], dict[str, float]]:
    return {(lr, seed): {"rate": value} for seed, value in enumerate(values)}


def test_runs_with_the_same_seed_are_compared_with_each_other() -> None:
    before = experiment(program("a", seed=[0, 1, 2]), rate(1.0, 2.0, 3.0))
    after = experiment(program("b", seed=[0, 1, 2]), rate(1.5, 2.6, 3.4))
    (found,) = difference.compare(before, after)
    assert (found.setting, found.name, found.paired) == ("lr 0.1", "rate", True)
    assert found.difference == pytest.approx(0.5)
    # The changes 0.5, 0.6 and 0.4 have the standard deviation 0.1; t(2) = 4.3027.
    assert found.high - 0.5 == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert found.low == pytest.approx(1.0 - found.high)


def test_others_are_compared_by_their_means() -> None:
    before = experiment(program("a", seed=[0, 1, 2]), rate(1.0, 2.0, 3.0))
    after = experiment(program("b", seed=[0, 1]), rate(2.0, 4.0))
    (found,) = difference.compare(before, after)
    assert not found.paired
    # Welch: squared errors 1/3 and 1, so 1.684 degrees of freedom, of which t is 5.176.
    reach = 5.176 * math.sqrt(1 / 3 + 1)
    assert (found.low, found.high) == pytest.approx((1 - reach, 1 + reach), rel=1e-3)


def test_a_single_run_has_no_interval_and_equal_runs_none_of_width() -> None:
    one = experiment(program("a", seed=[0]), rate(1.0))
    (found,) = difference.compare(one, one)
    assert math.isnan(found.low)
    same = experiment(program("a", seed=[0, 1]), rate(1.0, 2.0))
    (found,) = difference.compare(same, same)
    assert (found.low, found.high) == (0, 0)


def test_only_common_settings_and_numbers_are_compared() -> None:
    before = experiment(program("a"), rate(1.0) | rate(2.0, lr=0.2))
    after = experiment(program("b", parameters={"lr": [0.2, 0.4]}), rate(2.5, lr=0.2))
    (found,) = difference.compare(before, after)
    assert (found.setting, found.difference) == ("lr 0.2", 0.5)
    assert difference.settings(before.experiment, after.experiment) == ["lr 0.1-0.2 -> 0.2-0.4"]
    elsewhere = experiment(program("b", parameters={"lr": [0.3, 0.4]}), rate(2.5, lr=0.3))
    with pytest.raises(Refusal, match="no setting and number in common"):
        difference.compare(before, elsewhere)


def said(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "workflow/scripts/difference.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "experiment.json").write_text(json.dumps(program("empty")))
    for arguments, message in (
        ([tmp_path / "nowhere", empty], "experiment.json is not there"),
        ([empty, empty], "has no finished run; run snakemake first"),
    ):
        done = said(*arguments)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert message in done.stderr
