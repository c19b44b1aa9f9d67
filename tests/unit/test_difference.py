"""Two experiments compared, with intervals that are known."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import difference as comparison
from forked import server
from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment
from manynodes.reporting import difference, predictions
from manynodes.reporting.difference import Results
from programs import ROOT, finished, python


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
    return Results(parsed, numbers, dict.fromkeys(numbers, (None,)), frozenset())


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


def test_a_fold_is_compared_with_itself_if_runs_are_missing() -> None:
    """One has the folds 0 and 1 of the seeds 0 and 1, the other those of the seeds 1 and 0."""
    one = {((0, "0"), 0): {"rate": 1.0}, ((1, "1"), 0): {"rate": 2.0}}
    other = {((0, "1"), 0): {"rate": 2.6}, ((1, "0"), 0): {"rate": 1.4}}
    found = difference.difference("lr 0.1", "rate", one, other)
    assert (found.paired, found.before, found.after) == (True, (1.0, 2.0), (1.4, 2.6))
    # The changes 0.4 and 0.6 have the standard error 0.1; t(1) = 12.706.
    assert (found.low, found.high) == pytest.approx((0.5 - 1.2706, 0.5 + 1.2706), rel=1e-4)
    assert comparison.line(found).endswith(", paired by fold)")


@pytest.mark.parametrize(
    ("keys", "data"),
    [({}, "1"), ({"folds": 2, "validation_seed": 1}, "0"), ({"folds": 3, "fold": [0, 1]}, "0")],
)
def test_folds_of_other_images_are_not_paired(keys: dict[str, Any], data: str) -> None:
    def folded(name: str, sha256: str, **keys: Any) -> Results:
        dataset = {"experiment": name, "dataset": {"name": "digits"}}
        found = Experiment.from_config(dataset | {"folds": 2} | keys)
        numbers = {run: {"rate": float(fold)} for fold, run in enumerate(found.runs)}
        return Results(found, numbers, dict.fromkeys(numbers, (sha256,)), frozenset())

    before = folded("a", "0")
    (found,) = difference.compare(before, folded("b", data, **keys))
    assert (found.paired, found.of) == (False, "fold")
    (found,) = difference.compare(before, folded("b", "0", device="cpu"))
    assert (found.paired, found.of) == (True, "fold")


def test_folds_are_means_of_the_seeds_that_both_have() -> None:
    """Seeds differ by 1, the experiments by 0.5; one of them lacks a seed of a fold."""
    one = {
        ((seed, str(fold)), 0): {"rate": 1.0 * seed + fold} for seed in (0, 1) for fold in (0, 1)
    }
    other = {key: {"rate": numbers["rate"] + 0.5} for key, numbers in one.items()}
    del other[(1, "1"), 0]
    found = difference.difference("", "rate", one, other)
    assert (found.before, found.after) == ((0.5, 1.0), (1.0, 1.5))
    assert (found.difference, found.paired) == (0.5, True)


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


def test_accuracies_in_per_cent_are_no_shares() -> None:
    """Also if their difference is less than one."""
    shares, percents = ({(0.1, 0): {"accuracy": value}} for value in (0.905, 90.5))
    lines = []
    for found, more in ((shares, 0.007), (percents, 0.7)):
        later = {key: {"accuracy": each["accuracy"] + more} for key, each in found.items()}
        sides = experiment(program("a"), found), experiment(program("b"), later)
        lines += map(comparison.line, difference.compare(*sides))
    shown = {69_999 / 70_000: "99.999%", 1 - 1e-8: "99.999999%", 1 - 1e-12: "100.00%"}
    assert [comparison.number(value, share=True) for value in shown] == [*shown.values()]
    assert [text.rpartition(" (too few")[0] for text in lines] == [
        "lr 0.1: accuracy 90.50% (n = 1) -> 91.20% (n = 1): +0.70 points",
        "lr 0.1: accuracy 90.5 (n = 1) -> 91.2 (n = 1): +0.7",
    ]


def test_each_value_of_an_axis_that_only_one_has_is_compared() -> None:
    """Together they would be repetitions of one setting; and 1 and 1.0 are one value."""
    one = {"parameters": {"lr": [1, 0.1]}, "seed": [0, 1]}
    other = {"parameters": {"lr": [1.0, 0.2], "width": [8, 16]}, "seed": [0, 1]}
    before = experiment(program("a", **one), rate(1.0, 1.2, lr=1) | rate(9.0, 9.0))
    after = experiment(program("b", **other), rate(2.0, 2.2, lr=1))
    found = difference.compare(before, after)
    assert [(each.setting, len(each.before), len(each.after)) for each in found] == [
        ("lr 1  width 8", 2, 2), ("lr 1  width 16", 2, 2),
    ]  # fmt: skip
    assert difference.unpaired(before, after) == ["lr 0.1"]


def test_only_common_settings_and_numbers_are_compared() -> None:
    before = experiment(program("a"), rate(1.0) | rate(2.0, lr=0.2))
    after = experiment(program("b", parameters={"lr": [0.2, 0.4]}), rate(2.5, lr=0.2))
    (found,) = difference.compare(before, after)
    assert (found.setting, found.difference) == ("lr 0.2", 0.5)
    assert difference.settings(before.experiment, after.experiment) == ["lr 0.1, 0.2 -> 0.2, 0.4"]
    elsewhere = experiment(program("b", parameters={"lr": [0.3, 0.4]}), rate(2.5, lr=0.3))
    with pytest.raises(Refusal, match="no setting and number in common"):
        difference.compare(before, elsewhere)


def test_runs_that_are_left_out_are_named() -> None:
    before = experiment(program("a"), rate(1.0))
    after = experiment(program("b"), rate(1.0) | rate(2.0, lr=0.2))
    line = "1 of 2 runs of a is not finished, and left out: lr~0.2"
    assert difference.doubts(before, after) == [line]


def test_numbers_that_only_one_of_the_two_has_are_named() -> None:
    """As of trainings that diverged; and those that the same runs lack, in one line."""
    before = experiment(program("a"), rate(1.0) | rate(2.0, lr=0.2))
    numbers = {"rate": 1.0, "loss": 0.5, "top5": 0.9}
    after = experiment(program("b"), {(0.1, 0): numbers, (0.2, 0): {"loss": 0.5, "top5": 0.9}})
    assert difference.doubts(before, after) == [
        "2 of 2 runs of a have no loss, top5",
        "1 of 2 runs of b has no rate",
    ]


# What the runs of an experiment have written.
WRITTEN: dict[str, dict[str, Any]] = {
    "rows": {"numbers": [{}] * 2, "metrics": ["epoch,accuracy\n1,0.5\n2,0.9\n"]},
    "own": {"numbers": [{"accuracy": 0.8}] * 2},
    "tested": {"numbers": [{}] * 2, "evaluations": [{"accuracy": 0.7}]},
    "both": {"numbers": [{"accuracy": 0.9}] * 2, "evaluations": [{"accuracy": 0.6}]},
}
OF_ROWS, OF_TESTS = (
    "accuracy of rows is from its last row",
    "accuracy of tested is from its evaluation",
)


@pytest.mark.parametrize(
    ("before", "after", "told", "compared"),
    [
        ("rows", "own", [OF_ROWS], {"accuracy": (0.9, 0.8)}),
        ("own", "rows", [OF_ROWS], {"accuracy": (0.8, 0.9)}),
        ("rows", "tested", [OF_ROWS], {"accuracy": (0.9, 0.7)}),
        ("tested", "own", [OF_TESTS], {"accuracy": (0.7, 0.8)}),
        ("both", "tested", [OF_TESTS], {"accuracy (evaluated)": (0.6, 0.7)}),
        (
            "both",
            "own",
            ["2 of 2 runs of own have no accuracy (evaluated)"],
            {"accuracy": (0.9, 0.8)},
        ),
    ],
)
def test_numbers_of_another_origin_are_compared_if_there_are_no_others_and_that_is_told(
    tmp_path: Path, before: str, after: str, told: list[str], compared: dict[str, tuple]
) -> None:
    """As of a program that writes a result now, or that a program of its own evaluates."""
    folders = []
    for name in (before, after):
        keys = {"seed": [0, 1]} | ({"evaluate": "e.py"} if "evaluations" in WRITTEN[name] else {})
        folders.append(finished(tmp_path / name, keys, **WRITTEN[name]))
    one, other = difference.read(*folders)
    assert difference.doubts(one, other) == told
    found = {each.name: each for each in difference.compare(one, other)}
    assert {name: (each.before[0], each.after[0]) for name, each in found.items()} == compared | {
        "seconds": (1, 1)
    }
    assert all(each.paired for each in found.values())


def test_a_number_is_not_an_axis_of_the_other_experiment(tmp_path: Path) -> None:
    one = finished(tmp_path / "a", {"parameters": {"lr": [1, 2]}}, [{"lr": 3}] * 2)
    other = finished(tmp_path / "b", {"parameters": {"lr": 1}}, [{"lr": 4}])
    for folders in ((one, other), (other, one)):
        found = difference.read(*folders)
        numbers = {each.experiment.name: next(iter(each.numbers.values())) for each in found}
        assert numbers == {"a": {"lr (result)": 3, "seconds": 1},
                           "b": {"lr (result)": 4, "seconds": 1}}  # fmt: skip
        assert difference.doubts(*found) == ["lr of b is from its result"]


def test_what_auto_came_to_is_named_if_it_differs(tmp_path: Path, monkeypatch) -> None:
    def read(name: str, precision: str, computed_in: str) -> Results:
        config = {"experiment": name, "dataset": {"name": "digits"}, "precision": precision}
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "experiment.json").write_text(json.dumps(config))
        about = {"config": {}, "code_sha256": "", "data_sha256": "", "versions": {}, "seconds": 1,
                 "computed_in": computed_in}  # fmt: skip
        evaluation = {"accuracy": 0.5, "loss": 1, "views": "plain", "plain": {"accuracy": 0.5}}
        found = SimpleNamespace(about=about, evaluation=evaluation)
        monkeypatch.setattr(difference, "read_finished", lambda *_: found)
        return difference.read(tmp_path / name)[0]

    one = read("a", "auto", "bf16")
    assert difference.doubts(one, read("b", "auto", "bf16")) == []
    assert difference.doubts(one, read("b", "auto", "fp32")) == [
        "precision: auto was bf16 in a and fp32 in b",
    ]
    # The keys that differ say it.
    assert difference.doubts(one, read("b", "fp32", "fp32")) == []


def test_packages_that_differ_are_named(tmp_path: Path) -> None:
    def packages(**versions: str) -> dict[str, tuple[str, ...]]:
        modules = [f"{name}/{versions.pop(name)}" for name in ("cuda",) if name in versions]
        about = {"python": "3.12.1", "distributions": versions, "modules": modules}
        record = json.dumps(about)
        (tmp_path / "environment.json").write_text(record)
        found = difference.packages(tmp_path, {"versions": {"python": "3.11.2"}})
        return {name: (version,) for name, version in found.items()}

    one = experiment(program("a"), rate(1.0) | rate(1.0, lr=0.2))
    before, after = (
        replace(one, versions=packages(numpy=version, torch="2.9")) for version in ("2.3", "2.4")
    )
    assert difference.doubts(before, before) == []
    assert difference.doubts(before, after) == ["their packages differ: numpy 2.3 -> 2.4"]
    few = replace(one, versions={"torch": ("2.8",)}, complete=False)
    assert difference.doubts(few, after) == ["their packages differ: torch 2.8 -> 2.9"]
    before, after = (replace(one, versions=packages(cuda=each)) for each in ("12.4", "12.8"))
    assert difference.doubts(before, after) == [
        "their packages differ: module cuda 12.4 -> 12.8",
    ]


def test_packages_that_only_one_experiment_has_noted_are_no_difference(tmp_path: Path) -> None:
    """run.json has a few, and of a program environment.json has all."""
    one, other = (finished(tmp_path / name, {}, [{"rate": 1.0}]) for name in "ab")
    record = {"python": "3", "distributions": {"numpy": "2.3"}}
    (other / "run/environment.json").write_text(json.dumps(record))
    assert difference.doubts(*difference.read(one, other)) == []


@pytest.mark.parametrize("key", ["data_sha256", "files_sha256"])
def test_other_data_of_the_same_name_are_told(tmp_path: Path, key: str) -> None:
    config = {"files": [str(tmp_path / "d.tar")]}
    before, after = (
        difference.read(finished(tmp_path / name, config, [{"rate": 1.0}], [{key: sum_of}]))[0]
        for name, sum_of in (("a", "1" * 64), ("b", "2" * 64))
    )
    assert difference.settings(before.experiment, after.experiment) == []
    assert difference.doubts(before, after) == ["they were trained on different data"]


def test_other_code_is_told(tmp_path: Path) -> None:
    one, other = (
        finished(tmp_path / name, {}, [{"rate": 1.0}], [{"sources_sha256": sum_of}])
        for name, sum_of in (("a", "1" * 64), ("b", "2" * 64))
    )
    assert said(one, other).stdout.startswith("different: the code\n")
    assert said(one, one).stdout.startswith("different: no key of the configuration\n")


@pytest.mark.parametrize(("key", "what"), [("sources_sha256", "code"), ("files_sha256", "files")])
def test_runs_of_different_code_or_files_are_no_repetitions(
    tmp_path: Path, key: str, what: str
) -> None:
    abouts = [{key: "1" * 64}, {key: "2" * 64}]
    mixed = finished(tmp_path / "a", {"seed": [0, 1]}, [{"rate": 1.0}, {"rate": 2.0}], abouts)
    with pytest.raises(Refusal, match=f"seed~0 and seed~1 were trained with different {what}"):
        difference.read(mixed)


def said(*arguments: object) -> subprocess.CompletedProcess[str]:
    return server().run([str(ROOT / "workflow/scripts/difference.py"), *map(str, arguments)])


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


def evaluated(
    run: Path,
    right: list[bool],
    images: str = "0",
    views: str = "plain",
    first: int = 0,
    skipped: int = 0,
) -> Path:
    """A run of which only the evaluation is there, of these images."""
    run.mkdir(parents=True)
    (run / "run.json").touch()
    true = [first, *[1] * (len(right) - 1)]
    predicted = [label if good else 1 - label for label, good in zip(true, right, strict=True)]
    rows = [(number + skipped, *pair, 0.75, 0.5)
            for number, pair in enumerate(zip(true, predicted, strict=True))]  # fmt: skip
    sha256 = predictions.write(run / predictions.FILE, [], ["a", "b"], rows, 0)
    matrix = [[0, 0], [0, 0]]
    for label, other in zip(true, predicted, strict=True):
        matrix[label][other] += 1
    n, accuracy = len(right), sum(right) / len(right)
    plain = {"loss": 1.0, "accuracy": accuracy}
    found = {
        "model_sha256": "0" * 64, "data_sha256": "0" * 64, "dataset": "x", "views": views,
        "images_sha256": images * 64, "predictions_sha256": sha256, "class_names": ["a", "b"],
        "n": n, "confusion_matrix": matrix, "expected_calibration_error": 0.1, "plain": plain,
        "per_class_accuracy": [row[i] / sum(row) if any(row) else None
                               for i, row in enumerate(matrix)],
        "checkpoints": [],
    } | plain  # fmt: skip
    (run / "evaluation.json").write_text(json.dumps(found))
    return run


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (3, 9), (9, 3), (5, 5), (40, 70)])
def test_mcnemar_is_twice_the_smaller_tail_of_coins(b: int, c: int) -> None:
    n, tail = b + c, range(min(b, c) + 1)
    twice = 2 * sum(math.comb(n, heads) for heads in tail) / 2**n
    assert difference.mcnemar(b, c) == pytest.approx(min(1, twice))


def test_two_runs_are_compared_image_by_image(tmp_path: Path) -> None:
    # 4 are right in both, 2 only before, 9 only after, 5 in none.
    before = evaluated(tmp_path / "a/run", [True] * 6 + [False] * 14)
    after = evaluated(tmp_path / "b/run", [True] * 4 + [False] * 2 + [True] * 9 + [False] * 5)
    done = said(before, after)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "of 20 test images, b = 2 are right only before and c = 9 only after; McNemar's test "
        "(exact): p = 0.0654\n"
    )
    shifted = evaluated(tmp_path / "c/run", [True] * 20, views="flip")
    assert said(before, shifted).stderr == (
        "warning: they are of one view and two views of the test images\n"
    )


def test_runs_of_a_user_s_program_are_compared_by_their_experiments(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a/lr~1", "a/lr~2", "b/lr~1")]
    for run in runs:
        run.mkdir(parents=True)
        (run / "run.json").touch()
        (run / "environment.json").touch()
    done = said(runs[0], runs[2])
    assert done.returncode == 1
    assert "a/lr~1 is of your own program; compare the experiments: " in done.stderr
    line = "a/lr~1 is of your own program; its numbers and the other's are in "
    assert line in said(*runs[:2]).stderr


def test_runs_on_other_images_are_not_compared(tmp_path: Path) -> None:
    before = evaluated(tmp_path / "a", [True] * 3)
    older = evaluated(tmp_path / "older", [True] * 3)
    evaluation = json.loads((older / "evaluation.json").read_text())
    del evaluation["predictions_sha256"], evaluation["images_sha256"]
    (older / "evaluation.json").write_text(json.dumps(evaluation))
    (tmp_path / "program").mkdir()
    (tmp_path / "program/run.json").touch()
    (tmp_path / "program/environment.json").touch()
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/run.json").touch()
    again = "run snakemake for its experiment again"
    for after, line in (
        (evaluated(tmp_path / "images", [True] * 3, images="1"), "compare runs on one data set"),
        (evaluated(tmp_path / "fold", [True] * 3, skipped=1), "compare runs on one data set"),
        (evaluated(tmp_path / "labels", [True] * 3, first=1), "compare runs on one data set"),
        (older, f"older has no predictions.csv; {again}"),
        (tmp_path / "program", "/summary.csv"),
        (tmp_path / "trained", f"trained has no predictions.csv; {again}"),
    ):
        done = said(before, after)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert done.stderr.endswith(f"{line}\n"), done.stderr


def test_values_are_as_they_were_given_and_the_spread_is_named() -> None:
    one = Experiment.from_config(program("a", parameters={"lr": [1e-9, 1e12], "path": "a/b"}))
    other = Experiment.from_config(program("b", parameters={"lr": 0.1, "on": True}))
    assert difference.settings(one, other) == [
        "lr 1e-09, 1e+12 -> 0.1", "path a/b -> not given", "on not given -> true",
    ]  # fmt: skip
    # What a program may tell apart, also where Python, or words, do not.
    values = {"amp": 1, "wd": 1, "decay": None, "size": "none", "x": None}
    one = Experiment.from_config(program("a", parameters=values))
    changes = {"amp": True, "wd": 1.0, "decay": "none", "size": "none"}
    other = Experiment.from_config(program("b", parameters=changes))
    assert difference.settings(one, other) == [
        "amp 1 -> true", "wd 1 -> 1.0", 'decay null -> "none"', "x none -> not given",
    ]  # fmt: skip
    assert difference.settings(one, one) == []
    assert comparison.spread((0.5, 0.7), True) == "60.00% (sd 14.14%, n = 2)"


def test_a_reader_that_has_gone_is_not_told() -> None:
    code = (
        "from manynodes.base.errors import told_in_one_line\n"
        "with told_in_one_line('x'):\n    input()\n    print('x' * 100_000)\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "workflow/scripts")},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert started.stdout
    started.stdout.close()
    assert (started.communicate(b"\n")[1], started.returncode) == (b"", 1)


def test_a_terminal_without_utf_8_gets_escapes() -> None:
    code = "import manynodes.base; print('\u2014')"
    assert python(code, PYTHONIOENCODING="latin-1").stdout == "\\u2014\n"
