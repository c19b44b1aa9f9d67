"""The weights of the best epoch, and the end before all epochs, from validation alone."""

import json
import os
import signal
from pathlib import Path

import pytest

from classifier.states import state
from classifier.states.kept import best_epoch, finished, kept_epochs
from programs import program
from trainings import RUN, Training, complete, complete_on_ranks, result, rows_of

ACCURACIES = (0.1, 0.4, 0.4, 0.3, 0.5, 0.2)
HISTORY = [
    {"epoch": epoch, "val_accuracy": each, "val_loss": 1 - each}
    for epoch, each in enumerate(ACCURACIES, 1)
]
# Its validation accuracy rises for six epochs, then falls.
HOW = {"epochs": 40, "schedule": "constant", "best": "val_accuracy", "patience": 4}


@pytest.mark.parametrize("measure", ["val_accuracy", "val_loss"])
def test_the_first_of_equals_is_the_best(measure) -> None:
    assert [best_epoch(HISTORY[:count], measure) for count in range(1, 7)] == [1, 2, 2, 2, 5, 5]


@pytest.mark.parametrize(("patience", "ends"), [(None, 6), (1, 3), (2, 4), (3, 6)])
def test_it_ends_after_so_many_epochs_without_a_better_one(patience, ends) -> None:
    run = {"epochs": 6, "best": "val_accuracy", "patience": patience}
    assert next(count for count in range(7) if finished(run, HISTORY[:count])) == ends


def test_the_best_and_those_to_publish_are_kept() -> None:
    run = {"checkpoint_every": 3, "best": "val_loss"}
    assert [kept_epochs(run, HISTORY[:count]) for count in range(7)] == [
        set(), {1}, {2}, {2, 3}, {2, 3}, {3, 5}, {3, 5, 6},
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished training that keeps the weights of every epoch."""
    output = tmp_path_factory.mktemp("best") / "whole"
    complete(output, digits, checkpoint_every=1, **HOW)
    return output


def test_the_best_weights_are_the_model(digits, whole, tmp_path) -> None:
    rows = rows_of(whole)
    best = max(rows, key=lambda row: (float(row["val_accuracy"]), -int(row["epoch"])))
    assert len(rows) == int(best["epoch"]) + 4 < 40
    kept = whole / f"checkpoints/epoch={int(best['epoch']):03}.safetensors"
    assert (whole / "model.safetensors").read_bytes() == kept.read_bytes()
    assert json.loads((whole / "run.json").read_text())["metrics"]["epoch"] == int(best["epoch"])
    # A training of two processes ends on both.
    said = complete_on_ranks(tmp_path / "two", digits, 2, checkpoint_every=0, **HOW)
    assert "patience: no better val_accuracy for 4 epochs" in said
    assert sorted((tmp_path / "two/checkpoints").iterdir()) == []


@pytest.mark.faults
def test_killed_after_the_best_epoch_it_ends_with_the_same_weights(digits, whole, tmp_path) -> None:
    """Also if the newest state is damaged: what the one before needs is still there."""
    output = tmp_path / "killed"
    training = Training(output, digits, checkpoint_every=0, **HOW)
    training.reach(len(rows_of(whole)) - 2)
    training.process.send_signal(signal.SIGKILL)
    training.end()
    newest, *older = [path for path, _ in state.states(output / "state")]
    assert older
    os.truncate(newest, 1000)
    said = complete(output, digits, checkpoint_every=0, **HOW).said
    assert "resumed after" in said
    assert result(output)["rows"] == result(whole)["rows"]
    assert result(output)["model.safetensors"] == result(whole)["model.safetensors"]
    assert len(list((output / "state/checkpoints").iterdir())) == 1


@pytest.mark.faults
def test_its_evaluation_and_report_are_of_that_epoch(digits, whole, tmp_path) -> None:
    run = tmp_path / "best/run"
    run.parent.mkdir()
    run.symlink_to(whole)
    weights = ["--model", run / "model.safetensors", "--checkpoints", run / "checkpoints"]
    output = ["--device", "cpu", "--output", run / "evaluation.json"]
    evaluated = program("evaluate", "--data", digits, *weights, *output)
    assert evaluated.returncode == 0, evaluated.stderr
    config = (
        RUN | HOW | {"experiment": "best", "dataset": {"name": "digits"}, "checkpoint_every": 1}
    )
    done = program("aggregate", "--config", json.dumps(config), "--results", run.parent,
                   "--output", run.parent)  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = (run.parent / "summary.csv").read_text().splitlines()
    best = json.loads((whole / "run.json").read_text())["metrics"]["epoch"]
    assert dict(zip(table[0].split(","), table[1].split(","), strict=False))["epoch"] == str(best)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"best": "val_loss", "validation_fraction": 0}, "best: val_loss needs validation images"),
        ({"patience": 3}, "patience: it waits for a better validation result; give best too"),
    ],
)
def test_contradictions_are_named(change, words, tmp_path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"experiment": "x", "dataset": {"name": "digits"}, **change}))
    done = program("check", file)
    assert done.returncode == 1
    assert words in done.stderr
