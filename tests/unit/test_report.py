"""Tables, figures and page of an experiment name views, seeds and single epochs correctly."""

import csv
import math
import os
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy import stats
from sklearn import metrics

import aggregate
from manynodes.experiment.config import Experiment
from manynodes.reporting import intervals, page, result_figures
from manynodes.reporting.events import RunEvents, points_of
from manynodes.reporting.measures import columns_of
from manynodes.reporting.metrics import read_metrics, telling_first, write_metrics
from manynodes.reporting.numbers import (
    Numbers,
    confusion,
    not_finite,
    over_classes,
    results_of,
    table_of,
)
from manynodes.reporting.progress import read_record
from manynodes.reporting.result_figures import FigureData
from manynodes.reporting.results import accuracy_line
from programs import ROOT, finished


def summary(views: str, accuracies: list[float], **columns: list) -> pd.DataFrame:
    n = len(accuracies)
    return pd.DataFrame(
        {
            "run": [f"r{number}" for number in range(n)],
            **columns,
            "n": 10_000,
            "views": views,
            "accuracy": accuracies,
            "loss": 0.5,
            "plain_accuracy": [accuracy - 0.01 for accuracy in accuracies],
            "plain_loss": 0.6,
            "images_per_second": 1000.0,
            "seconds": 10.0,
            "attempts": 1,
            "commit": "0" * 40,
            "dirty": False,
            "versions": "python 3.11.7",
        }
    )


def curves(epochs: int, runs: list[str], **columns: list) -> pd.DataFrame:
    rows = [{"run": run, "epoch": epoch} for run in runs for epoch in range(1, epochs + 1)]
    table = pd.DataFrame(rows)
    for name, values in columns.items():
        table[name] = [value for value in values for _ in range(epochs)]
    for split in ("train", "val", "test"):
        table[f"{split}_accuracy"] = 0.5
        table[f"{split}_loss"] = 1.0
    return table


def test_six_views_are_called_so_and_the_plain_accuracy_is_beside_it() -> None:
    evaluation = {"views": "flip_shift", "accuracy": 0.8816, "plain": {"accuracy": 0.8694}}
    assert accuracy_line(evaluation) == "test accuracy 88.16% with six views, 86.94% with one view"
    table = summary("flip_shift", [0.8816, 0.8827])
    sentence = page.result_sentence(table, [], ["accuracy"], True)
    assert sentence == (
        "2 runs of 1 setting, 10,000 test images: accuracy 88.16% to 88.27% with six "
        "views (87.16% to 87.27% with one view)."
    )


def test_one_view_is_shown_once_and_different_numbers_of_images_are_told() -> None:
    table = summary("plain", [0.9, 0.8])
    assert list(page.every_run(table, [], ["accuracy", "plain_accuracy"], True)) == [
        "run", "accuracy", "attempts",
    ]  # fmt: skip
    two = page.every_run(summary("flip", [0.9]), [], ["accuracy", "plain_accuracy"], True)
    assert "accuracy, one view" in two
    table["n"] = [481, 480]
    assert "480 to 481 test images: accuracy" in page.result_sentence(table, [], ["accuracy"], True)


def test_means_have_the_interval_of_their_seeds_and_one_seed_has_no_table() -> None:
    table = summary("plain", [0.9, 0.81, 0.79], nodes=[1, 2, 2], seed=[0, 0, 1])
    means = page.means(table, ["nodes"], results_of(table, ["nodes", "seed"]), True)
    assert means is not None
    assert means["runs (n)"].tolist() == [1, 2]
    assert means["accuracy"].tolist() == ["90.00%", "80.00%"]
    # Student's t of one degree of freedom, 12.706, times 0.01.
    assert means["± accuracy (95%)"].tolist() == ["–", "12.71%"]
    assert "nan" not in page.table(means)
    assert page.means(summary("plain", [0.9, 0.8], lr=[1, 2]), ["lr"], ["accuracy"], True) is None
    assert "computed in" not in page.means(table.assign(computed_in="fp32"), ["nodes"], [], True)
    mixed = table.assign(computed_in=["fp32", "fp32", "bf16"])
    means = page.means(mixed, ["nodes"], ["accuracy"], True)
    assert means is not None
    assert means["computed in"].tolist() == ["fp32", "bf16, fp32"]
    # In percent, as many programs print it: half a point is no share.
    table = pd.DataFrame({"seed": [0, 1, 2], "val_accuracy": [91.2, 91.5, 91.3]})
    means = page.means(table, [], ["val_accuracy"], False)
    assert means is not None
    assert means["val_accuracy"].tolist() == ["91.333"]
    assert means["± val_accuracy (95%)"].tolist() == ["0.37946"]


def draw(*data: Any) -> dict[str, Figure]:
    """The figures of these values of FigureData, in its order."""
    figures, _ = result_figures.draw(FigureData(*data))
    return figures


def drawn(table: pd.DataFrame, epochs: int, **columns: list) -> dict[str, Figure]:
    curve = curves(epochs, list(table["run"]), **columns)
    numeric = [axis for axis in columns if axis != "seed"]
    results = results_of(table, list(columns))
    return draw(curve, table, list(columns), numeric, results, "x", True)


@pytest.mark.parametrize(
    ("seeds", "words"), [([0], "(a single seed)"), ([0, 1], "mean and range over 2 seeds")]
)
def test_a_figure_says_how_many_seeds_it_is_of(seeds, words) -> None:
    table = summary("plain", [0.9] * len(seeds), seed=seeds)
    figures = drawn(table, 3, seed=seeds)
    assert list(figures) == ["accuracy", "loss"]
    assert all(words in figure.get_suptitle() for figure in figures.values())


def test_a_figure_says_that_settings_have_unequal_numbers_of_seeds() -> None:
    table = summary("plain", [0.9] * 4, nodes=[1, 2, 2, 2], seed=[0, 0, 1, 2])
    assert result_figures.spread_words(table, ["nodes"]) == ", mean and range over 1 to 3 seeds"


def test_points_of_six_views_are_apart_from_curves_of_one() -> None:
    figure = drawn(summary("flip_shift", [0.9]), 3)["accuracy"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"test, one view", "test, six views"} <= set(labels)
    (star,) = (
        line for line in figure.axes[0].lines if line.get_marker() == "*" and len(line.get_xdata())
    )
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([3], [0.9])


def test_an_experiment_of_one_epoch_has_points() -> None:
    figure = drawn(summary("plain", [0.9]), 1)["accuracy"]
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata())]
    assert len(lines) == 3
    assert all(line.get_marker() not in ("None", None, "") for line in lines)


def test_the_points_of_one_epoch_are_in_the_middle() -> None:
    """Those of several settings stand side by side, and were at the ends of the axis."""
    figure = drawn(summary("plain", [0.9, 0.8], nodes=[1, 2]), 1, nodes=[1, 2])["accuracy"]
    assert figure.axes[0].get_xlim() == (0.5, 1.5)
    places = {float(place) for line in figure.axes[0].lines for place in line.get_xdata()}
    assert places == {0.9875, 1, 1.0125}


def test_a_panel_of_one_epoch_takes_no_tick_from_the_others() -> None:
    """They share their axes."""
    columns = {"a": [1, 2, 3], "b": ["x", "x", "y"]}
    curve = curves(4, ["r0", "r1", "r2"], **columns)
    curve = curve[(curve["run"] != "r2") | (curve["epoch"] == 1)]
    table = summary("plain", [0.9] * 3, **columns)
    figure = draw(curve, table, list(columns), [], [], "x", True)["accuracy"]
    figure.canvas.draw()
    assert len(figure.axes[0].get_xticks()) > 3


def test_each_figure_has_a_sentence_on_what_is_drawn() -> None:
    table = summary("plain", [0.9, 0.8], nodes=[1, 2])
    figures = drawn(table, 2, nodes=[1, 2])
    assert figures["accuracy"].get_label() == "Curves of accuracy by epoch (a single seed)."
    assert figures["loss_by_axis"].get_label() == "Points of loss by nodes (a single seed)."


def test_dollar_signs_are_no_formula() -> None:
    """Neither in names nor in values; this one could not be drawn at all."""
    columns = {"$a^$": ["$b_$", "c"]}
    table = summary("plain", [0.9, 0.8], **columns)
    curve = curves(2, list(table["run"]), **columns)
    figure = draw(curve, table, list(columns), [], [], "x", True)["accuracy"]
    figure.canvas.draw()
    assert figure.legends[0].get_texts()[0].get_text() == "$a^$ $b_$"


def test_every_run_has_its_place_by_the_values_of_its_axes() -> None:
    table = summary("plain", [0.9, 0.8, 0.7], lr=[10.0, 2.0, 2.0], seed=[0, 1, 0])
    assert page.in_order(table, ["lr", "seed"])["run"].tolist() == ["r2", "r1", "r0"]
    assert page.in_order(table, [])["run"].tolist() == ["r0", "r1", "r2"]


def test_a_small_difference_does_not_fill_the_figure() -> None:
    table = summary("plain", [0.8816, 0.8827], nodes=[1, 2]).assign(loss=[0.564, 0.568])
    figure = drawn(table, 2, nodes=[1, 2])
    for name, least in (("accuracy_by_axis", 0.02), ("loss_by_axis", 0.0568)):
        bottom, top = figure[name].axes[0].get_ylim()
        assert top - bottom == pytest.approx(least, rel=0.01)


def test_any_columns_are_drawn_by_their_own_count() -> None:
    """As a program of the user's names them: those of a split together, others alone."""
    curve = pd.DataFrame(
        {"run": ["a", "a", "b"], "epoch": [1, 2, float("nan")], "train_loss": [3, 2, float("nan")],
         "val_loss": [3, 2.5, float("nan")], "step": [float("nan")] * 2 + [7],
         "cost $": [float("nan")] * 2 + [1], "never": float("nan")}
    )  # fmt: skip
    table = pd.DataFrame({"run": ["a", "b"], "score": [1.5, float("nan")]})
    figures = draw(curve, table, [], [], ["score"], "x", False)
    assert list(figures) == ["loss", "cost__"]
    assert figures["cost__"].axes[0].get_xlabel() == "step"
    assert page.result_sentence(table, [], ["score"], False) == (
        "2 runs of 1 setting: score 1.5 (1 of 2 runs)."
    )


def test_each_run_has_its_own_count_whatever_column_of_all_comes_first() -> None:
    """One whose rows are numbered, and one with steps, which measures `row` and `accuracy` too."""
    none = float("nan")
    curve = pd.DataFrame({"run": [*"aabb"], "row": [1, 2, 5, 6], "accuracy": [0.5, 0.6, 0.7, 0.8],
                          "step": [none, none, 9, 10]})  # fmt: skip
    table = pd.DataFrame({"run": ["a", "b"]})
    counts = {"a": "row", "b": "step"}
    figures = draw(curve, table, [], [], [], "x", False, counts)
    assert [each.axes[0].get_xlabel() for each in figures.values()] == ["row", "step", "step"]


def test_a_column_with_the_name_of_the_metric_is_apart_from_that_of_a_split() -> None:
    """As Keras writes them; the training's was drawn as the validation's."""
    curve = pd.DataFrame({"run": "a", "epoch": [1, 2], "loss": [3, 2], "val_loss": [3.5, 2.5]})
    for rows, key in ((curve, "get_linestyle"), (curve[:1], "get_marker")):
        figure = draw(rows, pd.DataFrame({"run": ["a"]}), [], [], [], "x", False)["loss"]
        drawn = [line for line in figure.axes[0].lines if len(line.get_xdata())]
        assert len({getattr(line, key)() for line in drawn}) == 2
        named_ones = [text.get_text() for text in figure.legends[0].get_texts()]
        assert named_ones == ["all runs", "loss", "validation"]


@pytest.mark.parametrize("columns", [["val_loss"], ["train_loss", "test_loss"]])
def test_a_single_count_has_the_range_of_its_seeds(columns: list[str]) -> None:
    axes = {"lr": [1, 1, 2, 2], "seed": [0, 1, 0, 1]}
    curve = pd.DataFrame({"run": [*"abcd"], "epoch": 5, **axes})
    for column in columns:
        curve[column] = [1.0, 2.0, 4.0, 6.0]
    table = pd.DataFrame({"run": [*"abcd"], **axes})
    figure = draw(curve, table, [*axes], ["lr"], [], "x", False)["loss"]
    ranges = [bar.get_segments()[0] for bar in figure.axes[0].collections]
    heights = [[1, 2]] * len(columns) + [[4, 6]] * len(columns)
    assert [list(points[:, 1]) for points in ranges] == heights
    # Each has its place.
    assert len({points[0, 0] for points in ranges}) == len(heights)


def test_a_curve_of_one_point_is_seen_beside_longer_ones() -> None:
    none = float("nan")
    curve = pd.DataFrame({"run": [*"aabb"], "epoch": [1, 2] * 2, "seed": [0, 0, 1, 1],
                          "train_loss": [3, 2] * 2, "val_loss": [none, 2, none, 4]})  # fmt: skip
    table = pd.DataFrame({"run": ["a", "b"], "seed": [0, 1]})
    (axes,) = draw(curve, table, ["seed"], [], [], "x", False)["loss"].axes
    assert [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "s"] == [[3]]
    assert axes.collections[0].get_segments()[0][:, 1].tolist() == [2, 4]


def test_only_a_curve_of_the_training_has_its_range_too() -> None:
    curve = pd.DataFrame({"run": [*"aabb"], "epoch": [1, 2] * 2, "seed": [0, 0, 1, 1],
                          "train_loss": [3.0, 2.0, 5.0, 4.0]})  # fmt: skip
    table = pd.DataFrame({"run": ["a", "b"], "seed": [0, 1]})
    for columns, bands in (({}, 1), ({"val_loss": 1.0}, 0)):
        figure = draw(curve.assign(**columns), table, ["seed"], [], [], "x", False)["loss"]
        assert len(figure.axes[0].collections) == bands


def test_a_mean_is_of_counts_that_all_runs_have() -> None:
    def curve_of(*grids: list[int]) -> Figure:
        rows = [{"run": f"r{seed}", "seed": seed, "step": step, "loss": 10.0 - step - 5 * seed}
                for seed, grid in enumerate(grids) for step in grid]  # fmt: skip
        curve, table = pd.DataFrame(rows), pd.DataFrame({"run": ["r0", "r1"], "seed": [0, 1]})
        return draw(curve, table, ["seed"], [], [], "x", False)["loss"]

    def lines_of(figure: Figure) -> list[tuple[list[float], list[float]]]:
        lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines]
        return [line for line in lines if line[0]]

    assert lines_of(curve_of([1, 2, 3, 4], [2, 4])) == [([2, 4], [5.5, 3.5])]
    figure = curve_of([1, 3], [2, 4])
    assert lines_of(figure) == [([1, 3], [9, 7]), ([2, 4], [3, 1])]
    assert "no counts in common" in figure.legends[0].get_texts()[-1].get_text()
    # A run of one point has no line.
    figure = curve_of([1, 3], [2])
    assert lines_of(figure) == [([1, 3], [9, 7]), ([2], [3])]
    assert [line.get_marker() for line in figure.axes[0].lines[-3:-1]] == ["None", "o"]


def test_points_say_where_seeds_have_no_number() -> None:
    """One that has diverged must not look like one that was not there."""
    table = summary("plain", [0.8, 0.82, 0.9, math.nan], lr=[1, 1, 2, 2], seed=[0, 1, 0, 1])
    figure = drawn(table, 2, lr=[1, 1, 2, 2], seed=[0, 1, 0, 1])["accuracy_by_axis"]
    line, hollow = figure.axes[0].lines
    assert (list(line.get_ydata()), list(hollow.get_xdata())) == ([0.81, 0.9], [2])
    assert "open: of those that have a number" in " ".join(figure.get_suptitle().split())


def test_a_loss_that_is_minimized_and_one_that_is_measured_are_apart() -> None:
    table = summary("flip_shift", [0.9, 0.8]).rename(columns={"loss": "loss (test)"})
    table["loss"] = names = ["cross_entropy", "focal"]
    curve = curves(2, list(table["run"]), loss=names)
    figure = draw(curve, table, ["loss"], [], [], "x", True)["loss"]
    stars = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
    assert [list(star.get_ydata()) for star in stars if len(star.get_xdata())] == [[0.5]] * 2


def test_a_program_may_have_a_parameter_views() -> None:
    curve = pd.DataFrame({"run": ["a", "b"], "views": [1, 2], "epoch": 1, "loss": [0.5, 0.4]})
    table = pd.DataFrame({"run": ["a", "b"], "views": [1, 2], "rate": [2.5, 3.5], "attempts": 1})
    figures = draw(curve, table, ["views"], ["views"], ["rate"], "x", False)
    assert figures["loss"].axes[0].get_ylabel() == "loss"
    shown = page.every_run(table, ["views"], ["rate"], False)
    assert shown["views"].tolist() == [1, 2]
    assert page.result_sentence(table, ["views"], ["rate"], False) == (
        "2 runs of 2 settings: rate 2.5 to 3.5."
    )
    assert page.means(table, ["views"], ["rate"], False) is None


def test_a_checkout_with_changes_and_the_precision_are_named() -> None:
    table = summary("plain", [0.9, 0.9]).assign(
        dirty=[True, False], data_sha256="a" * 64, computed_in=["bf16", "fp32"]
    )
    shown = page.provenance(table)
    assert shown["computed in"].tolist() == ["bf16", "fp32"]
    assert shown["commit"].tolist() == ["0000000000 + changes", "0000000000"]
    assert shown["data (SHA-256)"].tolist() == ["a" * 10] * 2
    # Trained where there was no git.
    table = table.assign(commit=["a" * 40, None], dirty=[True, None], data_sha256=["b" * 64, None])
    shown = page.provenance(table)
    assert shown["commit"].tolist() == ["aaaaaaaaaa + changes", "none"]
    assert shown["data (SHA-256)"].tolist() == ["b" * 10, "–"]


def test_a_program_s_own_numbers_of_such_names_are_no_provenance() -> None:
    table = summary("plain", [0.9, 0.9]).assign(weights_sha256=[1, 2], init_sha256="of somewhere")
    assert [name for name in page.provenance(table) if "SHA" in name] == []
    columns = columns_of([], [[("result", "code_sha256")]])
    assert columns == {("result", "code_sha256"): "code_sha256 (result)"}


def test_environments_that_agree_have_one_row_and_one_list_of_packages() -> None:
    same = {"kind": "uv", "interpreter": "/mine/.venv/bin/python", "python": "3.12.1",
            "modules": ["cuda/12.4", "openmpi"], "lock_sha256": 64 * "a", "image": "",
            "distributions": {"numpy": "2.3.5"}}  # fmt: skip
    one = page.environment_section({"a": same | {"host": "n1"}, "b": same | {"host": "n2"}})
    assert one["environments"].to_dict("records") == [
        {"environment": "uv", "interpreter": "/mine/.venv/bin/python", "Python": "3.12.1",
         "modules": "cuda/12.4, openmpi", "lock (SHA-256)": 10 * "a"}
    ]  # fmt: skip
    ((whose, packages),) = one["installed"]
    assert (whose, packages.to_numpy().tolist()) == ("", [["numpy", "2.3.5"]])
    # A program in another language, in the workflow's own environment.
    other = {"kind": None, "python": None, "distributions": {}}
    two = page.environment_section({"a": same, "b": other})
    assert list(two["environments"]["runs"]) == ["a", "b"]
    assert list(two["environments"]["environment"]) == ["uv", "the workflow's own"]
    assert [whose for whose, _ in two["installed"]] == [" of a", " of b"]


def test_classes_are_listed_from_the_worst() -> None:
    confused = confusion("r0", ["cat", "dog"], [[8, 2], [5, 5]])
    assert page.by_class(confused).to_numpy().tolist() == [
        ["dog", "10", "50.00%", "71.43%", "58.82%"], ["cat", "10", "80.00%", "61.54%", "69.57%"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "words"), [(50, ""), (1000, "The 50 of 1,000 classes with the lowest recall:")]
)
def test_a_table_that_lacks_classes_says_so(classes, words) -> None:
    labels = [str(label) for label in range(classes)]
    confused = confusion("r0", labels, np.eye(classes, dtype=int).tolist())
    assert len(page.by_class(confused)) == 50
    assert page.listed_sentence(confused) == words


@pytest.mark.parametrize(
    "matrix",
    [
        [[8, 2, 0], [5, 4, 1], [0, 3, 77]],
        # A class without images, one that nobody predicts, and one of both kinds.
        [[0, 0, 0, 0], [5, 4, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]],
    ],
)
def test_the_means_over_classes_are_those_of_scikit_learn(matrix) -> None:
    pairs = [
        (true, predicted)
        for true, row in enumerate(matrix)
        for predicted, images in enumerate(row)
        for _ in range(images)
    ]
    true, predicted = zip(*pairs, strict=True)
    names = [f"class {number}" for number in range(len(matrix))]
    sentence = page.class_sentence(confusion("r0", names, matrix))
    with warnings.catch_warnings(action="ignore"):
        balanced = metrics.balanced_accuracy_score(true, predicted)
    f1 = metrics.f1_score(true, predicted, average="macro", zero_division=0)
    assert sentence.endswith(f"Balanced accuracy {balanced:.2%}, macro F1 {f1:.2%}.")
    means = over_classes(np.asarray(matrix, float))
    assert means == {"balanced_accuracy": pytest.approx(balanced), "macro_f1": pytest.approx(f1)}
    right = metrics.accuracy_score(true, predicted)
    assert sentence.startswith(f"Accuracy {right:.2%}; of {len(pairs)} images, the 95% interval ")
    most = max(map(sum, matrix)) / len(pairs)
    assert f"{most:.2%} of them are of the largest class, class " in sentence
    assert "independent" not in sentence
    grouped = page.class_sentence(confusion("r0", names, matrix), [{"settings": {"groups": "x"}}])
    assert ", if they were independent; images of a group are alike, so it is wider. " in grouped
    table = page.by_class(confusion("r0", names, matrix)).set_index("class")
    precision, recall, f1s, images = metrics.precision_recall_fscore_support(
        true, predicted, labels=range(len(matrix)), zero_division=np.nan
    )
    wanted = {
        "images (n)": [f"{each:,}" for each in images],
        **{
            name: ["–" if np.isnan(each) else f"{each:.2%}" for each in values]
            for name, values in (("recall", recall), ("precision", precision), ("F1", f1s))
        },
    }
    for column, values in wanted.items():
        assert table.loc[names, column].tolist() == values, column


def test_an_accuracy_that_guessing_reaches_is_told() -> None:
    def said(*matrix: list[int]) -> str:
        return page.guess_sentence(confusion("run", ["bad", "good"], list(matrix)), "the run")

    # 68.75 % of 656 images, all called good; the interval of 75 % begins at 71.5 %, that of 71 %
    # at 67.6 %.
    assert said([0, 205], [0, 451]) == (
        "The accuracy of the run, 68.75%, is not clearly above 68.75%, which calling every image "
        "good would reach."
    )
    assert said([100, 105], [59, 392]) == ""
    assert "71.04%" in said([60, 145], [45, 406])
    assert said([0, 0], [0, 0]) == ""


def test_the_table_in_the_docs_is_the_log_of_the_tuning() -> None:
    with (ROOT / "benchmarks" / "tuning.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"config/config.yaml", "config/ninety.yaml"} <= {row["recipe"] for row in rows}
    docs = (ROOT / "docs" / "performance.md").read_text()
    for row in rows:
        values = (
            row["recipe"],
            row["widths"].replace("-", ", "),
            row["optimizer"],
            row["learning_rate"],
            row["global_batch_size"],
            row["precision"],
            row["epochs"],
            row["seed"],
            f"{float(row['val_accuracy']):.2%}".replace("%", " %"),
        )
        assert f"| {' | '.join(values)} |" in docs


def test_classes_that_are_confused_are_listed_and_stand_side_by_side() -> None:
    names = [f"c{number}" for number in range(30)]
    matrix = np.diag(np.full(30, 8))
    matrix[3, 20], matrix[20, 3], matrix[7, 11] = 6, 2, 4
    pairs = page.confusions(confusion("r", names, matrix.tolist()))
    assert pairs.to_numpy().tolist() == [
        ["c3", "c20", "6", "42.9%"], ["c7", "c11", "4", "33.3%"], ["c20", "c3", "2", "20.0%"]
    ]  # fmt: skip
    order = list(result_figures.by_similarity(matrix))
    assert sorted(order) == list(range(30))
    assert abs(order.index(3) - order.index(20)) == abs(order.index(7) - order.index(11)) == 1


@pytest.mark.parametrize(("values", "words"), [
    ([150.12, 150.44], "x 150.12 to 150.44"), ([1234.56, 2345.67], "x 1,234.6 to 2,345.7"),
    ([12.5, 2e9], "x 12.5 to 2e+09"), ([math.inf], "x inf"),
    ([math.nan], "x none finite (0 of 1 runs)"),
])  # fmt: skip
def test_a_number_has_five_digits(values: list[float], words: str) -> None:
    assert page.between(pd.DataFrame({"x": values}), "x") == words


def test_long_names_lose_their_middle() -> None:
    matrix = confusion("r", ["short", "a_name_of_more_than_thirty_letters_$x$"], [[1, 0], [0, 1]])
    axes = result_figures.draw_confusion(matrix).axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["short", "a_name_of_mor…ty_letters_$x$"]


def test_the_settings_leave_out_what_no_run_uses_and_say_how_images_were_made() -> None:
    def settings(**config: object) -> dict[str, object]:
        return Experiment.from_config({"experiment": "x", "optimizer": "adamw"} | config).settings

    assert "momentum" not in settings()
    assert settings()["widths"] == [32, 64, 64]
    assert "widths" not in settings(model="resnet18")
    row = page.images_row({
        "dataset": "cells", "images": {"train": 1200, "test": 300}, "image_shape": [64, 48, 3],
        "dtype": "uint8", "skipped": ["a"],
        "settings": {"kind": "folder", "image_size": [64, 48], "channels": None},
    })  # fmt: skip
    assert row == (
        "images of cells",
        "1,200 train and 300 test images of 64 x 48 x 3, uint8; kind folder, image_size 64 x 48, "
        "1 unreadable ones left out",
    )


def test_test_images_that_are_in_train_are_told_beside_the_result() -> None:
    manifest = {"images": {"train": 90, "test": 1200}, "in_train": {"same": 12, "similar": 3}}
    assert page.in_train(manifest, "test") == (
        "Of the 1,200 test images, 12 are in the train split too and 3 are almost the same as one "
        "of train; accuracy on them says little about new images."
    )
    manifest["in_train"] = {"same": 0, "similar": 3}
    assert page.in_train(manifest, "test").startswith("Of the 1,200 test images, 3 are almost ")
    manifest["in_train"]["similar"] = 1
    assert "images, 1 is almost the same" in page.in_train(manifest, "test")
    # A fold is of the train split itself.
    assert page.in_train(manifest, "train") == page.in_train({"images": {}}, "test") == ""


@pytest.mark.parametrize(("right", "n"), [(0, 7), (7, 7), (3, 355), (9_107, 10_000)])
def test_intervals_are_those_of_scipy_stats(right: int, n: int) -> None:
    share = stats.binomtest(right, n).proportion_ci(intervals.LEVEL, "wilson")
    assert intervals.of_share(right, n) == (share.low, share.high)
    mean = stats.t.interval(intervals.LEVEL, n - 1, scale=0.3 / np.sqrt(n))
    assert intervals.half_width(0.3, n) == pytest.approx(mean[1], rel=1e-14)


def test_where_runs_have_ended_their_mean_is_faint() -> None:
    """With `patience` the mean of those that are left is of other runs."""
    table = summary("plain", [0.9, 0.8], seed=[0, 1])
    curve = curves(4, list(table["run"]), seed=[0, 1])
    short = curve[(curve["run"] != table["run"][1]) | (curve["epoch"] <= 2)]
    for some, ends in ((curve, [[4]]), (short, [[2], [4]])):
        (figure, *_) = draw(some, table, ["seed"], [], [], "x", True).values()
        lines = [line for line in figure.axes[0].lines
                 if line.get_linestyle() == ":" and len(line.get_xdata())]  # fmt: skip
        assert [list(line.get_xdata())[-1:] for line in lines] == ends
        assert [line.get_alpha() for line in lines] == [None, result_figures.FAINT][: len(ends)]


def test_many_ticks_and_a_long_title_leave_room_for_each_other() -> None:
    values = [0.1 * number for number in range(1, 41)]
    table = summary("plain", [0.9] * 40, lr=values)
    results = results_of(table, ["lr"])
    curve = curves(1, list(table["run"]), lr=values)
    title = "an experiment " * 20
    figure = draw(curve, table, ["lr"], ["lr"], results, title, True)
    axes = figure["accuracy_by_axis"].axes[0]
    figure["accuracy_by_axis"].canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) > 5
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    words = figure["accuracy_by_axis"]._suptitle.get_window_extent()
    assert words.x1 < figure["accuracy_by_axis"].bbox.x1


def test_numbers_of_a_column_have_the_same_decimals_and_no_share_is_rounded_to_all() -> None:
    table = summary("plain", [0.99991, 0.99999], perplexity=[12.3, 12.301])
    shown = page.every_run(table, [], ["accuracy", "perplexity"], True)
    assert shown["perplexity"].tolist() == ["12.300", "12.301"]
    assert shown["accuracy"].tolist() == ["99.991%", "99.999%"]


def test_one_error_of_many_images_is_not_rounded_away_anywhere() -> None:
    confused = confusion("r0", ["cat", "dog"], [[35_000, 0], [1, 34_999]])
    said = page.class_sentence(confused)
    assert said.startswith("Accuracy 99.999%; of 70,000 images, the 95% interval is 99.99% to ")
    assert said.endswith("Balanced accuracy 99.999%, macro F1 99.999%.")
    assert page.by_class(confused).to_numpy().tolist() == [
        ["dog", "35,000", "99.997%", "100.000%", "99.999%"],
        ["cat", "35,000", "100.000%", "99.997%", "99.999%"],
    ]  # fmt: skip
    wrong = confusion("r0", ["cat", "dog"], [[1, 9_999], [0, 10_000]])
    assert page.confusions(wrong)["of its class"].tolist() == ["99.99%"]
    accuracy = 69_999 / 70_000
    evaluation = {"views": "plain", "accuracy": accuracy, "plain": {"accuracy": accuracy}}
    assert accuracy_line(evaluation) == "test accuracy 99.999% with one view"


def test_what_a_program_writes_first_is_not_what_counts() -> None:
    names = ["num_parameters", "eval_accuracy", "seconds", "val_loss"]
    assert telling_first(names) == ["eval_accuracy", "val_loss", "num_parameters", "seconds"]
    # More figures than are drawn.
    wide = {f"metric_{number}": [1.0, 2.0] for number in range(30)} | {"eval_accuracy": [0.5, 0.6]}
    table = pd.DataFrame({"run": ["a", "b"], "lr": [0.1, 0.2], **wide})
    curve = pd.DataFrame({"run": ["a", "b"], "lr": [0.1, 0.2], "epoch": 1, "rate": [1.0, 2.0]})
    given = (curve, table, ["lr"], ["lr"], list(wide), "x", False)
    figures, left_out = result_figures.draw(FigureData(*given))
    assert next(iter(figures)) == "eval_accuracy_by_axis"
    assert left_out == [f"metric_{n}_by_axis" for n in range(22, 30)]


def test_names_of_numbers_and_counts_of_any_length_are_kept_apart() -> None:
    names = [f"{'漢' * 99}{end}" for end in "ab"]
    first = result_figures.file_name(names[0], ())
    found = [first, result_figures.file_name(names[1], {first})]
    assert len({*found}) == 2
    assert max(len(name.encode()) for name in found) < 230
    # A whole number that a table of whole numbers cannot hold.
    (row,) = table_of([{"step": 1e19, "loss": 1.0}]).to_dict("records")
    assert row == {"step": 1e19, "loss": 1.0}
    assert table_of([{"step": 3.0, "loss": 1.0}])["step"].dtype == int


def test_a_run_without_a_finite_number_is_named_and_leaves_a_gap() -> None:
    results = {"a": {"loss": 0.5}, "b": {"loss": math.nan, "rate": 1.0}, "c": {}}
    runs = {name: Numbers({}, each, pd.DataFrame(), None, {}) for name, each in results.items()}
    assert page.not_finite(not_finite(runs)) == (
        "Without a finite number, as of a training that diverged: b (loss)."
    )
    assert page.not_finite({}) == ""
    table = summary("plain", [0.9, math.nan, 0.8], lr=[1, 2, 3])
    (line,) = drawn(table, 2, lr=[1, 2, 3])["accuracy_by_axis"].axes[0].lines
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False]


def test_an_axis_of_accuracies_ends_at_all_of_them() -> None:
    figure = drawn(summary("plain", [1.0, 0.9999], lr=[1, 2]), 2, lr=[1, 2])["accuracy_by_axis"]
    figure.canvas.draw()
    (axes,) = figure.axes
    assert 1 <= axes.get_ylim()[1] < 1.001
    ticks = [tick for tick in axes.get_yticks() if tick <= axes.get_ylim()[1]]
    assert max(ticks) <= 1


def test_ranges_at_one_place_stand_side_by_side() -> None:
    columns = {"lr": [1, 1, 2, 2] * 2, "kind": ["a"] * 4 + ["b"] * 4, "seed": [0, 1] * 4}
    table = summary("plain", [0.9, 0.8, 0.7, 0.6] * 2, **columns)
    curve = curves(1, list(table["run"]), **columns)
    given = (curve, table, list(columns), ["lr"], ["accuracy"], "x", True)
    one, other = draw(*given)["accuracy_by_axis"].axes[0].lines
    apart = other.get_xdata() - one.get_xdata()
    assert ((apart > 0) & (apart < 0.2)).all()


def test_a_legend_keeps_its_order_and_leaves_room_whatever_its_names() -> None:
    columns = {
        "kind": ["a", "a", "b"],
        "a_parameter_of_a_name_of_forty_eight_characters_xx": [2, 3, 1],
    }
    table = summary("plain", [0.9] * 3, **columns)
    curve = curves(2, list(table["run"]), **columns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw(curve, table, list(columns), [], [], "x", True)["loss"]
        figure.canvas.draw()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [label[-1] for label in labels[:3]] == ["1", "2", "3"]
    assert labels[3:] == ["training", "validation", "test"]
    assert max(len(line) for label in labels for line in label.splitlines()) <= 34


@pytest.mark.parametrize(("kinds", "words"), [
    (5, "an option of a long name"), (20, "option"), (20, "an option of a long name"),
    (25, "option"),
])  # fmt: skip
def test_a_legend_leaves_room_for_ticks_and_is_inside_the_figure(kinds: int, words: str) -> None:
    values = [0.00123 * 1.3**power for power in range(12)]
    columns = {
        "lr": values * kinds,
        "an_option": [f"{words} {n}" for n in range(kinds) for _ in values],
    }
    table = pd.DataFrame({"run": [str(n) for n in range(12 * kinds)], **columns, "score": 0.5})
    curve = table[["run", *columns]].assign(epoch=1)
    figure = draw(curve, table, [*columns], ["lr"], ["score"], "x", False)["score_by_axis"]
    figure.canvas.draw()
    named_ones = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert len(named_ones) == (kinds if kinds <= 24 else 0)
    boxes = [tick.get_window_extent() for tick in figure.axes[0].get_xticklabels()]
    assert len(boxes) > 1
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.y0 >= 0
        assert box.y1 <= figure.bbox.y1
        panel = figure.axes[0].get_tightbbox()
        assert box.y1 <= panel.y0 or panel.x1 <= box.x0
    unnamed = "a line per setting of the others" in " ".join(figure.get_suptitle().split())
    assert unnamed == (not figure.legends)


def test_each_curve_has_a_name_however_long_they_are() -> None:
    kinds = [f"random_crop_flip_and_colour_jitter_{number}" for number in range(13)]
    curve = pd.DataFrame({"run": kinds, "augmentation": kinds, "epoch": 1, "val_loss": 1.0})
    figure = draw(curve, curve[["run", "augmentation"]], ["augmentation"], [], [], "x", False)[
        "loss"
    ]
    (legend,) = figure.legends
    assert [text.get_text()[-2:] for text in legend.get_texts()[:13]] == [
        kind[-2:] for kind in sorted(kinds)
    ]
    figure.canvas.draw()
    assert legend.get_window_extent().y0 >= 0
    assert legend.get_window_extent().y1 <= figure.axes[0].get_tightbbox().y0


def test_a_long_name_of_a_number_is_beside_its_axis_as_far_as_there_is_room() -> None:
    name = "train/loss/cross_entropy/with_label_smoothing_of_0.1_over_classes"
    curve = pd.DataFrame({"run": "a", "global_step": [1, 2], name: [3, 2]})
    (figure,) = draw(curve, pd.DataFrame({"run": ["a"]}), [], [], [], "x", False).values()
    figure.canvas.draw()
    box = figure.axes[0].yaxis.label.get_window_extent()
    assert box.y0 >= 0
    assert box.y1 <= figure._suptitle.get_window_extent().y0
    assert name in figure.get_suptitle()


def test_characters_that_no_svg_may_have_are_escapes(tmp_path: Path) -> None:
    """Axis values, columns, names of numbers and of classes: an image with one cannot be shown."""
    axes = {"sep": ["\x01", "a\x01"], "lr": [1, 2]}
    table = pd.DataFrame({"run": ["a", "b"], **axes, "score\ufffe": [1.0, 2.0]})
    curve = table[["run", *axes]].assign(**{"epoch\x0c": 1, "val_loss\x1b": 2.0})
    given = (curve, table, [*axes], ["lr"], ["score\ufffe"], "x", False)
    figures, _ = result_figures.draw(FigureData(*given, searched=["sep", "lr"]))
    figures["classes"] = result_figures.draw_confusion(
        confusion("a", ["a\x01\nb", "c"], [[1, 2], [3, 4]])
    )
    assert len(figures) == 4
    for svg in aggregate.write_figures(figures, tmp_path)[::2]:
        ElementTree.parse(svg)
        assert "\\x01" in svg.read_text()
    assert all(figure.get_label().isprintable() for figure in figures.values())
    assert "<td>\\x01</td>" in page.table(table)


def test_every_column_of_panels_has_its_numbers() -> None:
    columns = {"lr": [number for number in range(4) for _ in range(5)], "kind": list("abcde") * 4}
    table = summary("plain", [0.9] * 20, **columns)
    curve = curves(2, list(table["run"]), **columns)
    figure = draw(curve, table, list(columns), [], [], "x", True)["loss"]
    figure.canvas.draw()
    shown = [any(tick.label1.get_visible() for tick in axes.xaxis.get_major_ticks())
             for axes in figure.axes]  # fmt: skip
    assert shown[:4] == [False, True, True, True]


def test_numbers_far_apart_are_drawn_logarithmically() -> None:
    curve = pd.DataFrame({"run": "a", "step": [1, 2], "loss": [1e4, 1.0], "accuracy": [1e-4, 1.0]})
    figures = draw(curve, pd.DataFrame({"run": ["a"]}), [], [], [], "x", False)
    assert {name: each.axes[0].get_yscale() for name, each in figures.items()} == {
        "accuracy": "linear", "loss": "log",
    }  # fmt: skip


def test_names_of_files_in_another_encoding_are_shown_with_escapes(tmp_path, monkeypatch) -> None:
    """As `os.listdir` has them: nothing can write or draw these characters, nor control characters.
    Other unusual ones are letters.
    """
    letters = "\u0645\u06cc\u200c\u062e\u3000\u72ac\xa0"
    name = os.fsdecode("caf\xe9".encode("latin-1"))
    result = {f"accuracy({name})": 0.5, "confusion_matrix": [[2, 1], [0, 3]],
              "class_names": [name, f"b\n\x01{letters}"]}  # fmt: skip
    folder = finished(tmp_path / "mine", {}, [result])
    given = ["--config", f"@{folder}/experiment.json", "--results", folder, "--output", folder]
    monkeypatch.setattr(sys, "argv", ["aggregate", *map(str, given)])
    aggregate.main()
    shown = r"caf\udce9"
    for file in ("summary.csv", "confusion.csv", "report.html", "figures/confusion.svg"):
        assert shown in (folder / file).read_text()
    ElementTree.parse(folder / "figures/confusion.svg")
    for file in ("report.html", "figures/confusion.svg"):
        assert f"b\\n\\x01{letters}" in (folder / file).read_text()
    assert "\x01" not in (folder / "report.html").read_text()
    experiment = read_record(folder)
    events = RunEvents(folder / "run/events", {})
    events.update(*points_of(experiment, folder)["run"])
    events.close()
    assert [tag for _, tag, _ in events.written] == [rf"result/accuracy({shown})"]
    write_metrics(tmp_path / "metrics.csv", [{"epoch": 1, name: 0.5}])
    assert read_metrics(tmp_path / "metrics.csv") == [{"epoch": 1, shown: 0.5}]


def test_many_classes_stand_without_numbers_in_an_order_that_is_told() -> None:
    names = [str(number) for number in range(150)]
    matrix = confusion("r", names, (np.eye(150, dtype=int) * 5).tolist())
    axes = result_figures.draw_confusion(matrix).axes[0]
    assert not [*axes.get_xticks(), *axes.get_yticks()]
    assert "ordered so that classes that are confused are neighbours" in axes.get_ylabel()
    assert axes.images[0].get_interpolation() == "none"


def test_a_table_has_numbers_to_the_right_and_values_as_in_yaml() -> None:
    frame = pd.DataFrame(
        {"on": [True, False], "lr": [1e12, 1e-9], "loss": ["–", "1.5 (1 of 2 runs)"]}
    )
    html = page.table(frame)
    assert '<tr><td>true</td><td class="n">1e+12</td><td class="n">–</td></tr>' in html
    assert page.table(pd.DataFrame({"x": ["<b>"]})).count("&lt;b&gt;") == 1
    versions = page.table(pd.DataFrame({"version": ["3.12.1", "2.0"], "n": ["1,024.5", "-3e-05"]}))
    assert '<tr><td>3.12.1</td><td class="n">1,024.5</td></tr>' in versions


def test_the_configuration_has_a_row_for_each_parameter() -> None:
    config = {"parameters": {"lr": [0.1, 1e-9], "name": None}, "flip": False,
              "runs": [{"lr": 1, "width": 2}, {"lr": 2, "width": 3}]}  # fmt: skip
    assert page.configuration(config) == [
        ("lr", "0.1, 1e-09"), ("name", "none"), ("flip", "false"),
        ("runs", "2 points of lr, width"),
    ]  # fmt: skip
    assert (page.are_missing(1), page.are_missing(2)) == ("1 run is missing", "2 runs are missing")


def test_data_that_cannot_be_read_leave_out_the_pictures_only(tmp_path: Path, capsys) -> None:
    digits = Experiment.from_config({"experiment": "x", "dataset": {"name": "digits"}})
    (tmp_path / "digits").mkdir()
    # A file that is there, and whose first byte cannot be read.
    (tmp_path / "digits/manifest.json").symlink_to("/proc/self/mem")
    # As in a closed folder, the system does not say whether there is a file.
    for folder in (tmp_path, tmp_path / ("x" * 300)):
        assert aggregate.data_of(digits, folder) == {}
    said = capsys.readouterr().out.splitlines()
    assert [line[:29] for line in said] == ["aggregate: without pictures: "] * 2


def test_a_single_seed_has_no_band_and_a_long_curve_few_points(tmp_path) -> None:
    steps = np.arange(10_000)
    curve = pd.DataFrame({"run": "a", "step": steps, "loss": 2 + np.sin(steps)})
    table = pd.DataFrame({"run": ["a"]})
    figure = draw(curve, table, [], [], [], "日本", False)["loss"]
    assert not figure.axes[0].collections
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (svg, _pdf) = aggregate.write_figures({"loss": figure}, tmp_path)
    assert svg.stat().st_size < 100_000
    # As text, which a reader's fonts may have.
    assert "日本" in svg.read_text()
