"""Cross-validation: each training image is a test image once, and its fold sees it in no step."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from classifier.training.splits import fold_split
from forked import run_ranks
from manynodes.base.errors import Refusal
from manynodes.data.folder import DataFolder
from manynodes.data.user.declaration import UserData
from manynodes.experiment.config import Experiment
from manynodes.reporting import page
from manynodes.reporting.difference import difference
from manynodes.reporting.numbers import added_up, judged_together
from programs import SCRIPTS, imported, program
from trainings import complete

HOW = {"dataset": "mine", "folds": 3, "fold": 1, "epochs": 2, "checkpoint_every": 0}


def test_each_image_is_in_one_fold_and_each_class_in_all_alike() -> None:
    labels = np.random.default_rng(1).choice(4, size=103, p=[0.6, 0.2, 0.15, 0.05])
    parts = [fold_split(labels, 5, fold, 7) for fold in range(5)]
    assert sorted(np.concatenate([tested for _, tested in parts])) == list(range(103))
    for rest, tested in parts:
        assert sorted([*rest, *tested]) == list(range(103))
        assert len(tested) in (20, 21)
        counts = np.bincount(labels[tested], minlength=4) - np.bincount(labels, minlength=4) / 5
        assert abs(counts).max() <= 1
    other = fold_split(labels, 5, 0, 8)[1]
    assert not np.array_equal(parts[0][1], other)


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ({"folds": 3}, ["fold~0", "fold~1", "fold~2"]),
        ({"folds": 9, "fold": [0, 4]}, ["fold~0", "fold~4"]),
        ({"folds": 9, "runs": [{"fold": 2, "epochs": 1}]}, ["epochs~1_fold~2"]),
        ({"folds": 9, "fold": 2}, ["run"]),
    ],
)
def test_folds_alone_are_an_axis(given, runs) -> None:
    assert list(Experiment.from_config({"experiment": "x"} | given).runs) == runs


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fold": 3}, "fold: 3 is one of folds; give their number too, such as folds: 5"),
        ({"folds": 5, "fold": [0, 5]}, "fold: 5 is not one of 5 folds, 0 to 4"),
        ({"folds": 1}, "folds: 1 is too small"),
        ({"folds": [2, 3]}, r"folds: \[2, 3\] is not a whole number"),
        ({"folds": 999, "dataset": {"name": "digits"}, "global_batch_size": 1400}, "training"),
    ],
)
def test_folds_that_cannot_be_are_refused(given, words) -> None:
    with pytest.raises(Refusal, match=words):
        Experiment.from_config({"experiment": "x"} | given)


@pytest.fixture
def data(digits, tmp_path) -> Path:
    """The digits as arrays of the user's."""
    place = tmp_path / "mine"
    place.mkdir()
    for path in digits.glob("*.npy"):
        shutil.copy(path, place)
    return imported(UserData("mine", "arrays", str(place)), place / "data").path


@pytest.mark.parametrize("fold", [(7, 5, 0), (-1, 5, 0), (0, 1, 0), (0, 0, 0), (1, 5, -1)])
def test_a_fold_that_is_none_is_refused(tmp_path: Path, fold: tuple[int, ...]) -> None:
    done = program("evaluate", "--data", tmp_path, "--model", tmp_path / "m", "--device", "cpu",
                   "--fold", *fold, "--output", tmp_path / "e.json")  # fmt: skip
    assert done.returncode == 1
    given = " ".join(map(str, fold))
    assert done.stderr == (
        f"evaluate: --fold is {given}; FOLD is 0 to FOLDS - 1, of at least 2 FOLDS, and SEED at "
        "least 0\n"
    )


def test_a_fold_is_evaluated_alike_on_one_process_and_on_two(data, tmp_path) -> None:
    complete(tmp_path / "run", data, **HOW)
    arguments = ["--data", data, "--model", tmp_path / "run/model.safetensors", "--device", "cpu",
                 "--batch-size", 100, "--fold", 1, 3, 0]  # fmt: skip
    one = program("evaluate", *arguments, "--output", tmp_path / "1.json")
    assert one.returncode == 0, one.stderr
    other = program("evaluate", *arguments[:-3], 0, 3, 0, "--output", tmp_path / "0.json")
    assert "was trained on the images of that fold; use --fold 1 3 0" in other.stderr
    command = [SCRIPTS / "evaluate.py", *arguments, "--output", tmp_path / "2.json"]
    assert {rank.returncode for rank in run_ranks(list(map(str, command)), 2)} == {0}
    found = json.loads((tmp_path / "1.json").read_text())
    assert found == json.loads((tmp_path / "2.json").read_text())
    labels = DataFolder.read(data).split("train")[1]
    tested = labels[fold_split(labels, 3, 1, 0)[1]]
    assert [sum(row) for row in found["confusion_matrix"]] == np.bincount(tested).tolist()


def test_the_folds_of_a_setting_are_judged_together_and_missing_ones_are_told() -> None:
    config = {"experiment": "x", "folds": 3, "learning_rate": [0.1, 0.2]}
    experiment = Experiment.from_config(config)
    runs = [name for name in experiment.runs if name != "learning_rate~0.1_fold~1"]
    assert judged_together(experiment, runs) == {
        "2 of 3 folds of learning_rate~0.1": runs[:2],
        "all folds of learning_rate~0.2": runs[2:],
    }
    alone = Experiment.from_config({"experiment": "x", "seed": [0, 1]})
    assert judged_together(alone, list(alone.runs)) == {name: [name] for name in alone.runs}
    assert added_up([(["a", "b"], [[fold, 1], [0, 2]]) for fold in range(3)]) == (
        ["a", "b"], [[3, 3], [0, 6]],
    )  # fmt: skip


def test_the_seeds_of_a_fold_count_once() -> None:
    rows = [(fold, seed, 0.1 * fold + 0.001 * seed) for fold in range(3) for seed in range(4)]
    table = pd.DataFrame(rows, columns=["fold", "seed", "accuracy"])
    found = page.means(table, [], ["accuracy"], True)
    assert found is not None
    assert found["folds (n)"].tolist() == [3]
    # Student's t of two degrees of freedom, 4.303, times 0.1 / sqrt(3).
    assert found["± accuracy (95%)"].tolist() == ["24.84%"]
    runs = {((seed, str(fold)), 0): {"accuracy": value} for fold, seed, value in rows}
    assert difference("", "accuracy", runs, runs).before == pytest.approx((0.0015, 0.1015, 0.2015))
    # A run that diverged is told, though its fold has a mean; all of a fold, too.
    table.loc[:4, "accuracy"] = math.nan
    found = page.means(table, [], ["accuracy"], True)
    assert found is not None
    assert found["accuracy"].tolist() == ["15.18% (7 of 12 runs)"]
