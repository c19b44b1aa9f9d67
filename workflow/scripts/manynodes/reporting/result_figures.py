"""The figures of any program's numbers: metrics by their count, results by each numeric axis, and
a confusion matrix.

Colour shows the axis with the most values; each combination of the others has a panel. Seeds are
averaged, and a band (curves) or a bar (points) shows their range.
"""

import math
import re
import textwrap
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    Locator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from manynodes.experiment.config import REPEATS
from manynodes.experiment.log_lines import COUNTS
from manynodes.reporting.figures import PALETTE, STYLE, colour_of, entitle, plain
from manynodes.reporting.metrics import is_share
from manynodes.reporting.numbers import unused
from manynodes.reporting.predictions import Predictions
from manynodes.reporting.results import VIEWS

# Columns `train_loss`, `val_loss` and `test_loss` are one figure, `loss`: legend and style of each.
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("training", {"linestyle": ":"}),
    "": ("", {"linestyle": "-"}),
    "val": ("validation", {"linestyle": "-"}),
    "test": ("test", {"linestyle": "none", "marker": "o"}),
}
# A curve of one point, which a line would not show.
ONE_POINT = {"train": {"marker": "^"}, "": {"marker": "o"}, "val": {"marker": "s"}, "test": {}}
# The result from several views.
STAR: dict[str, Any] = {"marker": "*", "markersize": 11, "linestyle": "none"}
# Not drawn: other counts and the time; of the classifier, numbers that only go with others.
NOT_DRAWN = (*COUNTS, "seconds")
OF_CLASSIFIER = ("n", "plain_accuracy", "plain_loss")
# Names of figures that are not of a column.
RESERVED = ("confusion", "scaling", "search", "calibration", "ranking")
PANEL_COLUMNS = 3
PANEL_CHARACTERS = 46  # of the title of a panel
MOST_LINES = 24  # of a legend
MOST_PANELS = 24  # of a figure; 240 took minutes to draw
# Inches: of an axis alone, and of several; of a label.
WIDTH, PANEL_WIDTH, CHARACTER = 5.0, 3.2, 0.1
MOST_IN_PANEL = 12  # lines of the legend of one panel, with so many characters in two columns
SHORT = 22
MOST_FIGURES = 24  # of an experiment; a program may write hundreds of columns
BINS = 15  # of the calibration
MOST_NUMBERS = 20  # classes up to which the confusion matrix shows its numbers
MOST_NAMES = 100  # and up to which their names
LONGEST = 28  # characters of a name in a figure
# Ratio of an axis' largest value to its smallest from which on it is drawn logarithmically.
WIDE = 8
FAINT = 0.35  # a curve where not all of its runs go on
# Names of numbers of which a lower one is better.
LOWER = re.compile(
    "(^|[^a-z])(log)?(loss|error|perplexity|bits|ppl|wer|cer|mse|rmse|mae|nll|fid)([^a-z]|$)", re.I
)
MOST_ASIDE = 0.1  # of all of them
ASIDE = 0.025  # of the width of a panel
LEAST_RANGE = 0.02  # of an axis of accuracies


def draw(
    curves: pd.DataFrame,
    summary: pd.DataFrame,
    axes: Sequence[str],
    numeric: Sequence[str],
    results: Sequence[str],
    title: str,
    built_in: bool,
) -> dict[str, Figure]:
    """All figures, by the names of their files.

    Args:
        axes: of the experiment.
        numeric: those with two or more numbers, except seeds.
        results: columns of the summary.
        built_in: whether the numbers are the classifier's.
    """
    settings = [axis for axis in axes if axis not in REPEATS]

    def planned() -> Iterator[tuple[str, Callable[[], Figure]]]:
        for count, some in by_count(curves, axes):
            for metric, splits in metrics_of(some, count, axes).items():
                yield (
                    metric,
                    partial(
                        draw_metric, some, summary, settings, count, metric, splits, title, built_in
                    ),
                )
        # The classifier's validation has its curve.
        left_out = {*NOT_DRAWN, *((*OF_CLASSIFIER, "val_accuracy") if built_in else ())}
        for column in results if numeric else ():
            if column not in left_out and summary[column].notna().any():
                yield (
                    f"{column}_by_axis",
                    partial(draw_by_axis, summary, settings, numeric, column, title),
                )

    figures: dict[str, Figure] = {}
    with mpl.rc_context(STYLE):
        for column, make in islice(planned(), MOST_FIGURES):
            figures[file_name(column, {*figures, *RESERVED})] = make()
    return figures


def by_count(curves: pd.DataFrame, axes: Collection[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The curves of the runs with the same first column, for each such column."""
    groups: dict[str, list[pd.DataFrame]] = {}
    for _, run in curves.groupby("run", sort=False):
        columns = [
            column
            for column in run.columns
            if column not in ("run", *axes) and run[column].notna().any()
        ]
        if columns:
            groups.setdefault(columns[0], []).append(run)
    for count, runs in groups.items():
        yield count, pd.concat(runs)


def metrics_of(
    curves: pd.DataFrame, count: str, axes: Collection[str]
) -> dict[str, dict[str, str]]:
    """The metrics, each with its column for each split; accuracy first, then what has several."""
    found: dict[str, dict[str, str]] = {}
    for column in curves.columns:
        if column in ("run", count, *axes, *NOT_DRAWN) or not curves[column].notna().any():
            continue
        split, _, metric = column.partition("_")
        known = bool(split in SPLITS and metric)
        found.setdefault(metric if known else column, {})[split if known else ""] = column
    return dict(sorted(found.items(), key=lambda item: (item[0] != "accuracy", len(item[1]) == 1)))


def file_name(column: str, taken: Container[str]) -> str:
    """A name of a file for a column."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in column)[:100]
    number = 2
    while (unique := name if number == 2 else f"{name}-{number - 1}") in taken:
        number += 1
    return unique


def draw_metric(
    curves: pd.DataFrame,
    summary: pd.DataFrame,
    settings: Sequence[str],
    count: str,
    metric: str,
    splits: dict[str, str],
    title: str,
    built_in: bool,
) -> Figure:
    """A metric by its count, with a panel per combination of all axes but one; of too many, all
    settings in one.
    """
    hue = max(settings, key=lambda axis: curves[axis].nunique(), default=None)
    others = [axis for axis in settings if axis != hue and curves[axis].nunique() > 1]
    panels = list(curves.groupby(others)) if others else [((), curves)]
    if len(panels) > MOST_PANELS:
        hue, others = unused("setting", "all", curves.columns), []
        curves = curves.assign(**{hue: curves.groupby(list(settings)).ngroup()})
        panels = [((), curves)]
    figure, grid = panel_grid(len(panels), sharex=True)
    values = [value for value, _ in curves.groupby(hue)] if hue else [None]
    for axes, (place, panel) in zip(grid.flat, panels, strict=False):
        of_panel = summary[summary["run"].isin(panel["run"])]
        result = unused(metric, "test", settings)
        draw_panel(axes, panel, of_panel, hue, values, count, metric, splits, result, built_in)
        axes.set_title(textwrap.fill(named(others, place), PANEL_CHARACTERS), fontsize=11)
    if hue in settings and len(values) > MOST_LINES:
        colour_bar(figure, grid, str(hue), values)
    words = f"{title}: {metric} by {count}{spread_words(summary, settings)}"
    finish(figure, grid, len(panels), words)
    return figure


def colour_bar(figure: Figure, grid: Any, hue: str, values: Sequence[Any]) -> None:
    """What the colours mean where a legend would be too long: the first, middle and last value."""
    several = len(values)
    shade = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, several - 1), "viridis")
    bar = figure.colorbar(shade, ax=grid.ravel().tolist(), label=plain(hue))
    named_ones = [0, several // 2, several - 1]
    bar.set_ticks(named_ones, labels=[shortened(str(values[number])) for number in named_ones])


def draw_panel(
    axes: Axes,
    panel: pd.DataFrame,
    summary: pd.DataFrame,
    hue: str | None,
    values: Sequence[Any],
    count: str,
    metric: str,
    splits: dict[str, str],
    result: str,
    built_in: bool,
) -> None:
    """Draw one panel.

    Args:
        values: all that have a colour, in all panels; one None without `hue`.
        result: the column of the summary with the metric on the test split.
    """
    groups: list[tuple[Any, pd.DataFrame]] = list(panel.groupby(hue)) if hue else [(None, panel)]
    single = panel[count].nunique() == 1
    style = {split: SPLITS[split][1] | (ONE_POINT[split] if single else {}) for split in splits}
    views = [*{*summary["views"]} - {"plain"}] if built_in and "test" in splits else []
    faint, room = False, room_for(panel, count, splits.get("test"), len(values))
    for value, group in groups:
        number = values.index(value)
        colour = colour_of(number, len(values))
        if len(values) <= MOST_LINES:
            axes.plot([], [], color=colour, linewidth=3,
                      label=named([hue], [value]) if hue else "all runs")  # fmt: skip
        # Points of several colours at the same place stand side by side.
        aside = (number - (len(values) - 1) / 2) * room
        for split, column in splits.items():
            points = group.groupby(count)[column].agg(["mean", "min", "max"]).dropna()
            if split == "test":
                points.index += aside
                axes.plot(points.index, points["mean"], color=colour, **style[split])
                axes.vlines(points.index, points["min"], points["max"], color=colour)
                continue
            end = group[group[column].notna()].groupby("run")[count].max().min()
            faint |= draw_curve(axes, points, end, {"color": colour} | style[split])
            if split != "train":
                axes.fill_between(points.index, points["min"], points["max"], color=colour,
                                  alpha=0.15, linewidth=0)  # fmt: skip
        if views:
            final = summary[summary["run"].isin(group["run"])][result].mean()
            last = last_count(group, count, splits["test"])
            axes.plot([last + aside], [final], color=colour, **STAR)
    for split in filter(None, splits):
        text = SPLITS[split][0] + (", one view" if split == "test" and views else "")
        axes.plot([], [], color="grey", label=text, **style[split])
    if faint:
        axes.plot([], [], color="grey", alpha=FAINT, label="of fewer runs")
    for name in views:
        axes.plot([], [], color="grey", label=f"test, {VIEWS.get(name, name)}", **STAR)
    axes.set_xlabel(plain(count))
    axes.set_ylabel(plain(metric))
    if is_share(metric, panel[list(splits.values())].to_numpy(dtype=float).flat):
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if locator := count_locator(panel[count]):
        axes.xaxis.set_major_locator(locator)


def last_count(group: pd.DataFrame, count: str, column: str) -> float:
    """The last count with a number in a column, or of all if there is none."""
    counts = group.loc[group[column].notna(), count]
    return float(counts.max() if len(counts) else group[count].max())


def room_for(panel: pd.DataFrame, count: str, tested: str | None, groups: int) -> float:
    """By how much of the count the points of two groups are apart: neighbouring counts stay so.

    Args:
        tested: the column with the points, if there are any.
    """
    if tested is None or groups > MOST_LINES:
        return 0.0
    counts = np.unique(panel.loc[panel[tested].notna(), count].to_numpy(dtype=float))
    nearest = float(np.diff(counts).min(initial=np.inf)) / 2
    whole = max(float(np.ptp(panel[count])), 1.0)
    return min(ASIDE * whole, MOST_ASIDE * whole / groups, nearest / groups)


def count_locator(counts: pd.Series) -> Locator | None:
    """Where an axis of counts has its ticks; None for matplotlib's choice."""
    if counts.nunique() == 1:
        return FixedLocator([counts.max()])
    return MaxNLocator(integer=True) if (counts % 1 == 0).all() else None


def draw_curve(axes: Axes, points: pd.DataFrame, end: float, style: dict[str, Any]) -> bool:
    """Draw the mean of some runs; returns whether a part of it is of fewer of them, and faint.

    Args:
        points: with `mean`, by their count.
        end: the last count of the run that has ended first.
    """
    common, rest = points[points.index <= end], points[points.index >= end]
    axes.plot(common.index, common["mean"], **style)
    if len(rest) > 1:
        axes.plot(rest.index, rest["mean"], alpha=FAINT, **style)
    return len(rest) > 1


def draw_by_axis(
    summary: pd.DataFrame,
    settings: Sequence[str],
    numeric: Sequence[str],
    column: str,
    title: str,
) -> Figure:
    """A result against each numeric axis, one line per combination of the other settings."""
    figure, grid = panel_grid(len(numeric), sharex=False)
    for axes, axis in zip(grid.flat, numeric, strict=False):
        others = [name for name in settings if name != axis and summary[name].nunique() > 1]
        groups = list(summary.groupby(others)) if others else [((), summary)]
        for number, (setting, group) in enumerate(groups):
            points = group.groupby(axis)[column].agg(["mean", "min", "max"]).dropna()
            colour = colour_of(number, len(groups))
            label = named(others, setting) or "all runs"
            axes.plot(points.index, points["mean"], color=colour, marker="o",
                      label=label if len(groups) <= MOST_LINES else None)  # fmt: skip
            axes.vlines(points.index, points["min"], points["max"], color=colour)
        if others and len(numeric) > 1 and len(groups) <= MOST_IN_PANEL:
            # A colour is another setting in each panel.
            short = max(len(named(others, setting)) for setting, _ in groups) <= SHORT
            # Below the name of the axis, however high the panel is.
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=5.5,
                        fontsize=8, ncols=2 if short else 1)  # fmt: skip
        values = sorted(map(float, summary[axis].unique()))
        scale_of_values(axes, values, WIDTH if len(numeric) == 1 else PANEL_WIDTH)
        axes.set_xlabel(plain(axis))
        axes.set_ylabel(plain(column))
        share = is_share(column, summary[column].to_numpy(dtype=float))
        if share:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        least_range(axes, share)
    words = f"{title}: {column} by setting{spread_words(summary, settings)}"
    finish(figure, grid, len(numeric), words, legend=len(numeric) == 1)
    return figure


def scale_of_values(axes: Axes, values: Sequence[float], inches: float) -> None:
    """An axis with the values of the runs as ticks, as far as their labels leave room for each
    other; logarithmic if they are far apart.

    Args:
        values: in their order.
        inches: how wide the axis is.
    """
    positive = [value for value in values if value > 0]
    if positive and values[0] >= 0 and positive[-1] / positive[0] >= WIDE:
        if values[0] > 0:
            axes.set_xscale("log")
        else:
            # From zero to the next value it is linear.
            axes.set_xscale("symlog", linthresh=positive[0])
    places = axes.xaxis.get_transform().transform(np.asarray(values))
    # Each to its own last digit: 0.9999 is not 1.
    texts = [f"{value:.6g}" for value in values]
    wide = CHARACTER * (1 + max(map(len, texts)))
    least = float(np.ptp(places)) * wide / inches
    kept: list[int] = []
    for number, place in enumerate(places):
        if not kept or place - places[kept[-1]] >= least:
            kept.append(number)
    if len(kept) > 1:
        # The last one rather than its neighbour.
        kept[-1] = len(values) - 1
    ticks = [values[number] for number in kept]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FixedFormatter([texts[number] for number in kept]))


def draw_search(summary: pd.DataFrame, keys: Sequence[str], result: str, title: str) -> Figure:
    """Every run as a line through its values of some keys, in the colour of its result (parallel
    coordinates).

    Args:
        keys: axes in which the runs vary together.
        result: a column of numbers.
    """
    values = summary[result].to_numpy(dtype=float)
    values = np.where(np.isfinite(values), values, np.nan)
    # The best ones on top.
    order = np.argsort(-values if LOWER.search(result) else values)
    with mpl.rc_context(STYLE | {"axes.grid": False, "axes.spines.left": False}):
        figure, axes = plt.subplots(figsize=(max(7.2, 1.8 * len(keys)), 4.6), layout="constrained")
        heights = np.column_stack(
            [draw_scale(axes, at, summary[key]) for at, key in enumerate(keys)]
        )
        shade = mpl.cm.ScalarMappable(
            mpl.colors.Normalize(np.nanmin(values), np.nanmax(values)), "viridis"
        )
        for row in order[np.isfinite(values[order])]:
            axes.plot(range(len(keys)), heights[row], color=shade.to_rgba(values[row]), alpha=0.9)
        axes.set_xticks(range(len(keys)), [plain(key) for key in keys])
        axes.set_yticks([])
        axes.set_xlim(-0.3, len(keys) - 0.6)
        form = PercentFormatter(1) if is_share(result, values) else None
        figure.colorbar(shade, ax=axes, format=form, label=plain(result))
        entitle(figure, f"{title}: {result} by setting")
    return figure


def draw_scale(axes: Axes, at: int, column: pd.Series) -> np.ndarray:
    """A vertical scale with labels; returns the height of each value, 0 to 1."""
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        low, high = float(column.min()), float(column.max())
        wide = low > 0 and high / low >= WIDE
        numbers = np.log(column.to_numpy(dtype=float)) if wide else column.to_numpy(dtype=float)
        middle = math.sqrt(low * high) if wide else (low + high) / 2
        labels = [(0.0, low), (0.5, middle), (1.0, high)] if high > low else [(0.5, low)]
        spread = max(float(np.ptp(numbers)), 1e-12)
        heights = (numbers - numbers.min()) / spread if high > low else np.full(len(column), 0.5)
        texts = [(height, f"{value:.3g}") for height, value in labels]
    else:
        names = sorted(map(str, column.unique()), key=as_number)
        place = {name: number / max(1, len(names) - 1) for number, name in enumerate(names)}
        heights = np.array([place[str(value)] for value in column])
        texts = [(height, shortened(name)) for name, height in place.items()]
    axes.axvline(at, color="#999", linewidth=1, zorder=0)
    for height, text in texts:
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axes.text(at - 0.03, height, text, ha="right", va="center", fontsize=9, bbox=box)
    return heights


def as_number(name: str) -> tuple[float, str]:
    """By which texts are sorted: numbers by their value, before others, such as `none`."""
    try:
        return float(name), name
    except ValueError:
        return math.inf, name


def draw_confusion(confused: pd.DataFrame) -> Figure:
    """The confusion matrix of one run; colour is the share of the true class.

    More classes than MOST_NUMBERS stand so that those that are often confused are neighbours.
    """
    run = str(confused["run"].iloc[0])
    matrix = confused.pivot(
        index="true_class", columns="predicted_class", values="images"
    ).to_numpy()
    names = confused.drop_duplicates("true_class").sort_values("true_class")["true_name"]
    labels = [shortened(name) for name in names]
    few = len(matrix) <= MOST_NUMBERS
    if not few:
        order = by_similarity(matrix)
        matrix, labels = matrix[np.ix_(order, order)], [labels[row] for row in order]
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    named_ones = len(matrix) <= MOST_NAMES
    size = 6.4 if few or not named_ones else min(18, 3 + 0.16 * len(matrix))
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots(figsize=(size + 0.8, size), layout="constrained")
        picture = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
        if few:
            for (row, column), images in np.ndenumerate(matrix):
                colour = "white" if share[row, column] > 0.5 else "#222"
                axes.text(column, row, f"{images:.0f}" if images else "", ha="center", va="center",
                          fontsize=9, color=colour)  # fmt: skip
        if named_ones:
            font = None if few else 7
            axes.set_xticks(range(len(matrix)), labels, rotation=45 if few else 90,
                            ha="right" if few else "center", fontsize=font)  # fmt: skip
            axes.set_yticks(range(len(matrix)), labels, fontsize=font)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        figure.colorbar(picture, format=PercentFormatter(1), label="share of the true class",
                        shrink=0.8)  # fmt: skip
        entitle(figure, f"Test images of {run}")
        return figure


def by_similarity(matrix: np.ndarray) -> np.ndarray:
    """An order of the classes in which those that are often confused are near each other.

    Args:
        matrix: images by true and predicted class, (classes, classes).

    Source: average linkage with optimal leaf ordering (Bar-Joseph et al., "Fast optimal leaf
        ordering for hierarchical clustering", 2001), of one minus the share that is confused.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    far = 1 - np.minimum((share + share.T) / 2, 1)
    np.fill_diagonal(far, 0)
    linked = hierarchy.linkage(squareform(far, checks=False), "average", optimal_ordering=True)
    return hierarchy.leaves_list(linked)


def draw_predictions(run: str, predicted: Predictions) -> dict[str, Figure]:
    """How much the probabilities of a run are worth; of two classes, how well they rank images."""
    right = (predicted.table["true_class"] == predicted.table["predicted_class"]).to_numpy()
    bins = calibration(right, predicted.table["probability"].to_numpy())
    found = {"calibration": draw_calibration(run, bins)}
    true = predicted.table["true_class"].to_numpy()
    if len(predicted.class_names) == 2 == len(np.unique(true)):
        # By the odds, as evaluation.json: of the probabilities, many are 1 to nine digits.
        with np.errstate(divide="ignore"):
            first, second = np.log(predicted.table.iloc[:, -2:].to_numpy(dtype=float)).T
        score = second - first
        ranked = [ranking(true == 0, -score), ranking(true == 1, score)]
        found["ranking"] = draw_ranking(run, ranked, predicted.class_names)
    return found


def calibration(right: np.ndarray, probability: np.ndarray) -> pd.DataFrame:
    """Predictions in 15 bins of equal width (left, right] by their probability, as for the expected
    calibration error: `left`, `images`, mean `probability` and `accuracy` of each that has any.

    Args:
        right: whether each is right, bool (n,).
        probability: of each, float (n,).
    """
    number = np.clip(np.ceil(probability * BINS).astype(int) - 1, 0, BINS - 1)
    frame = pd.DataFrame({"bin": number, "probability": probability, "accuracy": right})
    found = frame.groupby("bin").mean()
    found.insert(0, "images", frame.groupby("bin").size())
    found.insert(0, "left", found.index / BINS)
    return found.reset_index(drop=True)


def ranking(positive: np.ndarray, score: np.ndarray) -> pd.DataFrame:
    """At each score, of the images with at least that score: the shares of all positive ones
    (`recall`) and of all others (`false`) that they are, and the share of positive ones among them
    (`precision`).

    Args:
        positive: bool (n,).
        score: float (n,).
    """
    found = pd.DataFrame({"true": positive, "false": ~positive, "score": score})
    counts = found.groupby("score")[["true", "false"]].sum().sort_index(ascending=False).cumsum()
    return pd.DataFrame(
        {
            "recall": counts["true"] / positive.sum(),
            "false": counts["false"] / (~positive).sum(),
            "precision": counts["true"] / (counts["true"] + counts["false"]),
        }
    )


def draw_calibration(run: str, bins: pd.DataFrame) -> Figure:
    """Accuracy by probability (Guo et al., 2017), above the share of the images with it."""
    with mpl.rc_context(STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(6.2, 5.4), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        n = bins["images"].sum()
        error = (bins["images"] * (bins["accuracy"] - bins["probability"]).abs()).sum() / n
        above.bar(bins["left"], bins["accuracy"], 1 / BINS, align="edge", color=PALETTE[0],
                  edgecolor="white", label="accuracy")  # fmt: skip
        above.plot([0, 1], [0, 1], color="#222", linestyle="--", label="perfectly calibrated")
        above.set_ylim(0, 1)
        above.set_ylabel("accuracy")
        below.bar(bins["left"], bins["images"] / n, 1 / BINS, align="edge", color="grey",
                  edgecolor="white")  # fmt: skip
        below.set_ylabel("images")
        below.set_xlabel("probability of the predicted class")
        below.set_xlim(0, 1)
        for axis in (above.yaxis, below.yaxis, below.xaxis):
            axis.set_major_formatter(PercentFormatter(1, decimals=0))
        figure.legend(loc="outside lower center", ncols=2)
        entitle(figure, f"Calibration of {run}, expected error {error:.2%}")
        return figure


def draw_ranking(run: str, ranked: Sequence[pd.DataFrame], names: Sequence[str]) -> Figure:
    """The ROC curve, and precision by recall, of each class against the other."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4.6), layout="constrained")
        for curve, name, colour in zip(ranked, names, PALETTE, strict=False):
            label = f"{shortened(name)} found by its probability"
            left.plot([0, *curve["false"]], [0, *curve["recall"]], color=colour, label=label)
            right.step([0, *curve["recall"]], [1, *curve["precision"]], color=colour)
        left.plot([0, 1], [0, 1], color="grey", linestyle="--")
        left.set_xlabel("false positive rate")
        left.set_ylabel("true positive rate")
        right.set_xlabel("recall")
        right.set_ylabel("precision")
        for axes in (left, right):
            axes.set_xlim(-0.01, 1.01)
            axes.set_ylim(-0.01, 1.01)
            axes.set_aspect("equal")
            axes.xaxis.set_major_formatter(PercentFormatter(1))
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        figure.legend(loc="outside lower center", ncols=2)
        entitle(figure, f"Images of each class of {run}, by their probability")
        return figure


def least_range(axes: Axes, share: bool) -> None:
    """Do not magnify small differences to the whole height.

    Args:
        share: whether accuracies are drawn; of other numbers a tenth of the largest is small.
    """
    bottom, top = axes.get_ylim()
    least = LEAST_RANGE if share else max(abs(bottom), abs(top)) / 10
    if (room := least - (top - bottom)) > 0:
        axes.set_ylim(bottom - room / 2, top + room / 2)


def panel_grid(panels: int, sharex: bool) -> tuple[Figure, Any]:
    columns = min(panels, PANEL_COLUMNS)
    rows = -(-panels // columns)
    size = (3.6 + 4.4 * columns, 0.9 + 3.6 * rows)
    return plt.subplots(
        rows, columns, figsize=size, squeeze=False, sharex=sharex, sharey=True, layout="constrained"
    )


def finish(figure: Figure, grid: Any, panels: int, title: str, legend: bool = True) -> None:
    for empty in grid.flat[panels:]:
        empty.set_visible(False)
    entitle(figure, title)
    labelled = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if legend and labelled and set(labelled) != {"all runs"}:
        figure.legend(labelled.values(), labelled.keys(), loc="outside right center")


def named(axes: Sequence[str], values: Sequence[Any]) -> str:
    pairs = zip(axes, values, strict=True)
    return "  ".join(f"{plain(axis)} {shortened(str(value))}" for axis, value in pairs)


def shortened(text: str) -> str:
    """Without the middle of a long name."""
    half = LONGEST // 2
    return plain(text if len(text) <= LONGEST else f"{text[:half]}…{text[1 - half :]}")


def spread_words(summary: pd.DataFrame, settings: Sequence[str]) -> str:
    """Over how many runs that differ only in their seed or fold."""
    found = int(summary.groupby(list(settings)).size().max()) if settings else len(summary)
    several = "folds" if "fold" in summary else "seeds"
    several = "runs" if {"fold", "seed"} <= {*summary} else several
    # Runs may be missing.
    least = int(summary.groupby(list(settings)).size().min()) if settings else found
    words = f"{found}" if least == found else f"{least} to {found}"
    return f", mean and range over {words} {several}" if found > 1 else " (a single seed)"
