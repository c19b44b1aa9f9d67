"""The points of a search: fixed by their seed, within their ranges, runs like any others."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import aggregate
from manynodes.base.errors import Refusal
from manynodes.experiment.config import Experiment
from manynodes.reporting import numbers
from manynodes.reporting.progress import read_record
from manynodes.reporting.result_figures import FigureData, draw, draw_search
from programs import finished

RANGES = {
    "learning_rate": "log(1e-3, 1)",
    "momentum": "uniform(0.5, .95)",
    "epochs": "uniform(1, 4)",
    "schedule": ["linear", "cosine"],
}


def experiment(search: Any, **config: Any) -> Experiment:
    return Experiment.from_files({"experiment": "x", "search": search} | config, [Path()])


def searched(table: pd.DataFrame, keys: list[str], result: str, *others: str) -> Figure:
    """The figure of a search of these keys, beside other axes."""
    data = FigureData(table, table, [*others, *keys], [], [result], "x", False, searched=keys)
    return draw_search(data, result)


def test_points_fill_their_ranges_and_more_of_them_keep_the_first() -> None:
    found = experiment({"runs": 40} | RANGES)
    runs = found.runs.values()
    assert len(runs) == 40
    assert all(0.001 <= run.learning_rate <= 1 and 0.5 <= run.momentum <= 0.95 for run in runs)
    # As many in each decade; each whole number as often.
    assert sum(run.learning_rate < 0.01 for run in runs) == pytest.approx(40 / 3, abs=3)
    for epochs in (1, 2, 3, 4):
        assert sum(run.epochs == epochs for run in runs) == pytest.approx(10, abs=3)
    assert sum(run.schedule == "cosine" for run in runs) == pytest.approx(20, abs=3)
    assert all(len(str(run.learning_rate)) <= len("0.00123") for run in runs)
    assert list(experiment({"runs": 11} | RANGES).runs) == list(found.runs)[:11]
    other = experiment({"runs": 40, "seed": 1} | RANGES)
    assert not other.runs.keys() & found.runs.keys()


def test_points_between_close_ends_are_different_ones() -> None:
    found = experiment({"runs": 8, "momentum": "uniform(0.99, 0.9999)"})
    assert len({run.momentum for run in found.runs.values()}) == 8
    # All others have three digits, as names of folders.
    wide = experiment({"runs": 8, "momentum": "uniform(0.9, 0.99)"}).runs.values()
    assert all(len(str(run.momentum)) <= len("0.999") for run in wide)


def test_an_end_that_a_key_excludes_is_never_drawn() -> None:
    found = experiment({"runs": 3000, "momentum": "uniform(0, 1)", "learning_rate": "log(1e-3, 1)"})
    assert max(run.momentum for run in found.runs.values()) > 0.9995


def test_points_are_combined_with_axes_and_survive_a_command_line() -> None:
    found = experiment({"runs": "3", "momentum": "uniform(0.5, 0.9)"}, seed=[0, 1])
    assert len(found.runs) == 6
    assert Experiment.from_json(found.science).runs == found.runs


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ({"runs": 3, "momentom": "uniform(0, 1)"}, '"momentom" is no key of a run; did you mean m'),
        ({"runs": 3, "momentum": "log(0, 0.5)"}, "must have a lower end first and above 0"),
        ({"runs": 3, "momentum": "uniform(0.9, 0.1)"}, "must have a lower end first"),
        ({"runs": 3, "momentum": 0.5}, r"momentum: 0\.5 is not log\(1e-3, 1\), uniform"),
        ({"runs": 3, "momentum": "uniform(1..2, 3)"}, "has no two numbers"),
        ({"runs": 3, "momentum": "uniform(0.5, 7)"}, r"momentum: \S+ is too large"),
        ({"runs": 3, "schedule": ["linear", "cosin"]}, "3 is more than the 2 different points"),
        ({"runs": 0, "momentum": "uniform(0, 1)"}, "runs: 0 is not a whole number from 1"),
        ({"momentum": "uniform(0, 1)"}, "runs: 0 is not a whole number from 1"),
        ({"runs": 3}, "no key to search"),
        ({"runs": 3, "epochs": "uniform(1.5, 4)"}, "must have whole ends, as epochs is whole"),
        ([3], r"\[3\] is no mapping"),
    ],
)
def test_what_cannot_be_drawn_is_refused(search, words) -> None:
    with pytest.raises(Refusal, match=words) as refused:
        experiment(search)
    assert "\n" not in str(refused.value)


def test_listed_texts_stay_texts() -> None:
    given = {"runs": "4", "subject": ["01", "10"], "release": ["1.10", "1.2"], "rate": ["1", "2"]}
    config = {"experiment": "x", "program": "t.py", "search": given}
    parameters = [run.parameters for run in Experiment.from_files(config, []).runs.values()]
    found = {key: {each[key] for each in parameters} for key in parameters[0]}
    assert found == {"subject": {"01", "10"}, "release": {"1.10", "1.2"}, "rate": {1, 2}}


def test_files_of_a_search_are_relative_to_the_configuration(tmp_path) -> None:
    (tmp_path / "a.safetensors").touch()
    given = {"experiment": "x", "search": {"runs": 1, "initial_weights": ["a.safetensors"]}}
    (run,) = Experiment.from_files(given, [tmp_path]).runs.values()
    assert Path(run.initial_weights).resolve() == tmp_path / "a.safetensors"


def test_runs_and_a_search_are_not_both() -> None:
    with pytest.raises(Refusal, match="runs is given too"):
        experiment({"runs": 3, "momentum": "uniform(0, 1)"}, runs=[{"epochs": 1}])
    with pytest.raises(Refusal, match="search: momentum is an axis too"):
        experiment({"runs": 3, "momentum": "uniform(0, 1)"}, momentum=[0.1, 0.2])


def test_many_settings_are_curves_in_one_panel() -> None:
    names = [(a, b, c) for a in range(5) for b in range(7) for c in range(6)]
    curves = pd.DataFrame(
        {"run": str(name), "a": name[0], "b": name[1], "c": name[2], "epoch": epoch, "loss": epoch}
        for name in names for epoch in (1, 2)
    )  # fmt: skip
    summary = curves[curves["epoch"] == 2][["run", "a", "b", "c", "loss"]]
    figures, _ = draw(FigureData(curves, summary, ["a", "b", "c"], [], ["loss"], "x", False))
    (panel,) = figures["loss"].axes
    assert sum(len(line.get_xdata()) == 2 for line in panel.lines) == len(names)


def test_the_best_run_is_drawn_last_and_in_the_highest_colour() -> None:
    table = pd.DataFrame(
        {"lr": [0.001, 1.0, 0.03], "kind": ["b", "a", "a"], "val_accuracy": [0.5, 0.9, 0.7]}
    )
    figure = searched(table.replace(0.7, float("nan")), ["lr", "kind"], "val_accuracy")
    assert "without 1 of 3 runs that have no number" in " ".join(figure.get_suptitle().split())
    (axes, _bar) = searched(table, ["lr", "kind"], "val_accuracy").axes
    runs = [line for line in axes.lines if len(line.get_xdata()) == 2 and line.get_alpha()]
    assert [list(line.get_ydata()) for line in runs] == [
        pytest.approx([0, 1]), pytest.approx([0.4924, 0], abs=0.001), pytest.approx([1, 0])
    ]  # fmt: skip
    assert to_hex(runs[-1].get_color()) == "#fde725"


@pytest.mark.parametrize(("result", "words"), [
    ("valLoss", "the best with lr 1"), ("cross_entropy", "the best with lr 1"),
    ("test_nrmse", "the best with lr 1"), ("mIoU", "the best with lr 3"),
    ("top5", "the best with lr 3"), ("f1", "the best with lr 3"),
    # Which one is better is not known.
    ("speed", "the highest with lr 3"), ("reader", "the highest with lr 3"),
])  # fmt: skip
def test_the_best_run_has_the_lowest_loss_or_the_highest_score(result: str, words: str) -> None:
    table = pd.DataFrame({"lr": [1, 2, 3], "kind": ["a", "b", "c"], result: [0.1, 0.2, 0.3]})
    assert words in searched(table, ["lr", "kind"], result).get_suptitle()


@pytest.mark.parametrize(("result", "numbers", "words"), [
    # As scikit-learn negates them.
    ("neg_log_loss", [-0.1, -0.2, -0.3], "the best with lr 1"),
    ("test_neg_mean_squared_error", [-0.3, -0.2, 0.0], "the best with lr 3"),
    ("d2_log_loss_score", [-0.1, 0.2, 0.3], "the best with lr 3"),
    # Of what is negative.
    ("negative_pair_loss", [0.1, 0.2, 0.3], "the best with lr 1"),
])  # fmt: skip
def test_a_loss_that_is_negated_is_best_where_it_is_highest(
    result: str, numbers: list[float], words: str
) -> None:
    table = pd.DataFrame({"lr": [1, 2, 3], "kind": ["a", "b", "c"], result: numbers})
    assert words in searched(table, ["lr", "kind"], result).get_suptitle()


def test_the_best_point_has_the_best_mean_of_its_seeds() -> None:
    none = float("nan")
    table = pd.DataFrame({"lr": [1, 1, 1, 2, 2, 2, 3, 3, 3], "kind": "a",
                          "acc": [0.95, 0.5, 0.5, 0.9, 0.9, 0.9, 0.99, 0.99, none]})  # fmt: skip
    figure = searched(table, ["lr", "kind"], "acc")
    words = " ".join(figure.get_suptitle().split())
    assert "the best mean of 3 runs with lr 2 kind a, without 1 of 9 runs" in words
    (axes, bar) = figure.axes
    assert sum(len(line.get_xdata()) == 2 and bool(line.get_alpha()) for line in axes.lines) == 3
    assert bar.get_ylabel() == "mean acc"


def test_the_best_of_a_search_is_of_one_setting_of_all_axes() -> None:
    """A mean over models is no mean over seeds."""
    rows = [{"model": model, "lr": lr, "wd": lr / 10, "seed": seed, "acc": acc + seed / 100}
            for model, accuracies in (("a", (0.9, 0.1)), ("b", (0.1, 0.6)))
            for lr, acc in enumerate(accuracies, 1) for seed in (0, 1)]  # fmt: skip
    for keys, seeds, best in (
        (["lr", "wd"], 2, "the best mean of 2 runs with model a lr 1 wd 0.1"),
        (["lr", "wd"], 1, "the best with model a lr 1 wd 0.1"),
    ):
        table = pd.DataFrame(row for row in rows if row["seed"] < seeds)
        figure = searched(table, keys, "acc", "seed", "model")
        assert " ".join(figure.get_suptitle().split()).endswith(best)
        axes = figure.axes[0]
        assert [text.get_text() for text in axes.get_xticklabels()] == ["model", "lr", "wd"]
        assert sum(len(line.get_xdata()) == 3 for line in axes.lines) == 4


def test_a_seed_that_varies_with_a_setting_is_none_itself(tmp_path: Path) -> None:
    for keys, scales in ((["lr"], None), (["lr", "wd"], ["lr", "wd"])):
        runs = [{"seed": n % 2, **dict.fromkeys(keys, n // 2 + 1)} for n in range(8)]
        folder = finished(tmp_path / keys[-1], {"runs": runs}, [{"acc": 0.1 * n} for n in range(8)])
        experiment = read_record(folder)
        found = numbers.read(experiment, experiment.runs, folder)
        tables = numbers.tables(experiment, found)
        figures, _ = aggregate.figures_of(experiment, found, tables, ["acc"], "x")
        search = figures.get("search")
        assert search is None or "mean of 2 runs with lr 4 wd 4" in " ".join(
            search.get_suptitle().split()
        )
        names = search and [text.get_text() for text in search.axes[0].get_xticklabels()]
        assert names == scales


@pytest.mark.parametrize("scales", [2, 3, 4, 9])
def test_names_of_scales_leave_room_for_each_other_and_are_whole_in_the_title(scales: int) -> None:
    keys = [f"a_rather_long_parameter_name_of_mine_{number}" for number in range(scales)]
    table = pd.DataFrame({**{key: [1, 2] for key in keys}, "loss": [1.0, 2.0]})
    figure = searched(table, keys, "loss")
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert min(box.y0 for box in boxes) >= 0
    assert boxes[-1].x1 < figure.axes[1].get_window_extent().x0
    assert all(f"{key} 1" in " ".join(figure.get_suptitle().split()) for key in keys)


def test_a_scale_names_the_values_that_were_used() -> None:
    table = pd.DataFrame(
        {"width": [64, 128, 256], "kind": ["a", "b", "a_long_name_of_a_kind"], "loss": [1, 2, 3.0]}
    )
    (axes, _bar) = (figure := searched(table, ["width", "kind"], "loss")).axes
    assert [text.get_text() for text in axes.texts] == [
        "64", "128", "256", "a", "a_long…_a_kind", "b",
    ]  # fmt: skip
    assert figure.get_suptitle().endswith("the best with width 64  kind a")


def test_many_values_have_a_narrow_bar_with_short_numbers() -> None:
    values = [0.1234567890123 * (number + 1) for number in range(30)]
    curves = pd.DataFrame(
        {"run": str(value), "lr": value, "kind": kind, "epoch": epoch, "loss": epoch}
        for value in values for kind in range(12) for epoch in (1, 2)
    )  # fmt: skip
    summary = curves[curves["epoch"] == 2][["run", "lr", "kind", "loss"]]
    data = FigureData(curves, summary, ["lr", "kind"], [], ["loss"], "x", False)
    figure = draw(data)[0]["loss"]
    bar = figure.axes[-1]
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0.123457", "1.97531", "3.7037"]
    figure.canvas.draw()
    assert bar.get_position().width < 0.05
