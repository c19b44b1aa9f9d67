"""The figures of any program's numbers: metrics by their count, results by each numeric axis, and
a confusion matrix.

Colour shows the axis with the most values; each combination of the others has a panel. Seeds are
averaged, and a band (curves) or a bar (points) shows their range.
"""

import math
import re
import textwrap
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
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
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)

from manynodes.base.errors import drawable
from manynodes.experiment.config import REPEATS
from manynodes.experiment.log_lines import COUNTS
from manynodes.reporting.figures import LONGEST_SIDE, PALETTE, STYLE, colour_of, entitle, label
from manynodes.reporting.measures import unused
from manynodes.reporting.metrics import is_share, telling_first
from manynodes.reporting.predictions import Predictions
from manynodes.reporting.results import VIEWS, counted
from manynodes.reporting.tables import value_words

# Columns `train_loss`, `val_loss` and `test_loss` are one figure, `loss`: legend and style of each.
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("training", {"linestyle": ":"}),
    "": ("", {"linestyle": "-"}),
    "val": ("validation", {"linestyle": "-"}),
    "test": ("test", {"linestyle": "none", "marker": "o"}),
}
# A curve of one point, which a line would not show.
ONE_POINT = {"train": {"marker": "^"}, "": {"marker": "o"}, "val": {"marker": "s"}, "test": {}}
# Of the column that has the name of the metric, beside those of splits, for which it would be taken
# otherwise: Keras writes `loss` and `val_loss`.
BESIDE, BESIDE_ONE = {"linestyle": "--"}, {"marker": "D"}
ROOM_OF_ONE = 0.6  # of an axis with one count, for the points of all settings and splits
# The result from several views.
STAR: dict[str, Any] = {"marker": "*", "markersize": 11, "linestyle": "none"}
# Not drawn: other counts and the time; of the classifier, numbers that only go with others.
NOT_DRAWN = (*COUNTS, "seconds")
OF_CLASSIFIER = ("n", "plain_accuracy", "plain_loss", "balanced_accuracy", "macro_f1")
# Names of figures that are not of a column.
RESERVED = ("confusion", "scaling", "search", "calibration", "ranking")
PANEL_COLUMNS = 3
PANEL_CHARACTERS = 46  # of the title of a panel
MOST_NAMED = 24  # settings in a legend
MOST_PANELS = 24  # of a figure; 240 took minutes to draw
# Inches: of an axis alone, of that with an empty legend, and of several; of a label.
WIDTH, WITHOUT_LEGEND, PANEL_WIDTH, CHARACTER = 5.0, 6.4, 3.2, 0.1
MOST_IN_PANEL = 12  # lines of the legend of one panel, with so many characters in two columns
SHORT = 22
MOST_FIGURES = 24  # of an experiment; a program may write hundreds of columns
BINS = 15  # of the calibration
MOST_NUMBERS = 20  # classes up to which the confusion matrix shows its numbers
MOST_NAMES = 100  # and up to which their names
# Ratio of an axis' largest value to its smallest from which on it is drawn logarithmically, and the
# same of what is measured.
WIDE, WIDE_MEASURED = 8, 1e3
LINE = 0.19  # inches of a line of the legend below a panel
LEGEND_CHARACTERS = 34
# Inches above a legend beside the panels, and of a line of it.
ABOVE_LEGEND, LEGEND_LINE = 0.4, 0.235
MOST_LABELS = 6  # numbers of a scale of a search that are all written
SCALE_CHARACTERS = 14  # of a text there
BESIDE_NAME = 0.2  # inches that are left between the names of two scales
FAINT = 0.35  # a curve where not all of its runs go on
ALL_RUNS = "all runs"  # of which a legend says nothing
# What it says of such a curve, and of runs whose mean is of none.
FEWER, ALONE = "of fewer runs", "each run (no counts in common)"
# Names of numbers of which a lower one is better, and of which a higher one is. Of others it is not
# known.
LOWER = re.compile(
    "loss|error|entropy|perplexity|(^|[^a-z])(bits|bp[bcd]|ppl|[wce]er|ece|s?mape|n?r?mse|mae|nll"
    "|fid|brier|cost|latency)([^a-z]|$)",
    re.I,
)
HIGHER = re.compile(
    "acc|score|precision|recall|reward|(^|[^a-z])(f1|au(ro|pr)?c|bleu|rouge|r2|m?ap|m?iou|psnr|ssim"
    "|dice|top_?[0-9]+)([^a-z]|$)",
    re.I,
)
# A loss that is negated, and a score that is made of a loss, as scikit-learn names them.
RAISED = re.compile("(^|[^a-z])(neg|d2)_", re.I)
MOST_ASIDE = 0.1  # of all of them
ASIDE = 0.025  # of the width of a panel
LEAST_RANGE = 0.02  # of an axis of accuracies
EDGE = 0.03  # of its range


@dataclass(frozen=True)
class FigureData:
    """What the figures of an experiment are drawn from.

    Attributes:
        curves: the rows of all runs.
        summary: a row per run.
        axes: of the experiment.
        numeric: those with two or more numbers, except seeds.
        results: columns of the summary with measured numbers.
        title: of all figures.
        built_in: whether the numbers are the classifier's.
        counts: the column that counts in each run; without it, the first one with numbers.
        searched: settings that vary together, as points of a search; empty for none.
    """

    curves: pd.DataFrame
    summary: pd.DataFrame
    axes: Sequence[str]
    numeric: Sequence[str]
    results: Sequence[str]
    title: str
    built_in: bool
    counts: Mapping[str, str] = field(default_factory=dict)
    searched: Sequence[str] = ()

    @property
    def settings(self) -> list[str]:
        return [axis for axis in self.axes if axis not in REPEATS]

    @property
    def measured(self) -> list[str]:
        """The results that are figures of their own."""
        left_out = {*NOT_DRAWN, *(OF_CLASSIFIER if self.built_in else ())}
        return [key for key in self.results
                if key not in left_out and self.summary[key].notna().any()]  # fmt: skip


def draw(data: FigureData) -> tuple[dict[str, Figure], list[str]]:
    """The figures by the names of their files, first those that say how good a network is; and the
    names of those that are not drawn, because there are too many.
    """
    plan = telling_first(planned(data), by=lambda each: each[0])
    figures: dict[str, Figure] = {}
    for name, make in plan[:MOST_FIGURES]:
        figures[file_name(name, {*figures, *RESERVED})] = make()
    ranked = next((key for key in ("val_accuracy", *data.measured) if key in data.measured), None)
    if data.searched and ranked:
        figures["search"] = draw_search(data, ranked)
    return figures, [drawable(name) for name, _ in plan[MOST_FIGURES:]]


def planned(data: FigureData) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """The name of each figure and what draws it."""
    for count, curves in by_count(data):
        for metric, splits in metrics_of(curves, count, data.axes).items():
            yield metric, partial(draw_metric, data, curves, metric, count, splits)
    for column in data.measured if data.numeric else ():
        # The classifier's validation has its curve.
        if not (data.built_in and column == "val_accuracy"):
            yield f"{column}_by_axis", partial(draw_by_axis, data, column)


def by_count(data: FigureData) -> Iterator[tuple[str, pd.DataFrame]]:
    """The curves of the runs with the same count, for each such column."""
    groups: dict[str, list[pd.DataFrame]] = {}
    for name, run in data.curves.groupby("run", sort=False):
        columns = [
            column
            for column in run.columns
            if column not in ("run", *data.axes) and run[column].notna().any()
        ]
        if columns:
            count = data.counts.get(str(name))
            groups.setdefault(count if count in columns else columns[0], []).append(run)
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
    """A name of a file for a column; of at most 255 bytes with what is added to it."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in column)[:100]
    name = name.encode()[:200].decode(errors="ignore")
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name}-{number}", number + 1
    return unique


@dataclass(frozen=True)
class Metric:
    """A metric by its count, as all panels of a figure show it.

    Attributes:
        splits: its column for each split.
        hue: the axis whose values have the colours; None if all runs have one.
        values: all of that axis, in all panels; a single None without it.
    """

    name: str
    count: str
    splits: Mapping[str, str]
    hue: str | None
    values: Sequence[Any]

    @property
    def has_legend(self) -> bool:
        """Whether the values are few enough to be named."""
        return len(self.values) <= MOST_NAMED


@mpl.rc_context(STYLE)
def draw_metric(
    data: FigureData, curves: pd.DataFrame, name: str, count: str, splits: Mapping[str, str]
) -> Figure:
    """A metric by its count, with a panel per combination of all axes but one; of too many, all
    settings in one.
    """
    settings = data.settings
    hue = max(settings, key=lambda axis: curves[axis].nunique(), default=None)
    others = [axis for axis in settings if axis != hue and curves[axis].nunique() > 1]
    panels = list(curves.groupby(others)) if others else [((), curves)]
    each = ""
    if len(panels) > MOST_PANELS:
        hue, others = unused("setting", "all", curves.columns), []
        curves = curves.assign(**{hue: curves.groupby(settings).ngroup()})
        panels, each = [((), curves)], ", a line per setting"
    values = [value for value, _ in curves.groupby(hue)] if hue else [None]
    metric = Metric(name, count, splits, hue, values)
    figure, grid = panel_grid(len(panels), sharex=True)
    # Of all panels, which share their axes.
    scale_of_results(grid[0, 0], curves[list(splits.values())], name)
    for axes, (place, panel) in zip(grid.flat, panels, strict=False):
        draw_panel(axes, panel, data, metric)
        axes.set_title(textwrap.fill(named(others, place), PANEL_CHARACTERS), fontsize=11)
    scale_of_counts(grid[0, 0], curves[count])
    if not each and not metric.has_legend:
        colour_bar(figure, grid, metric)
    words = f"{name} by {count}{each}{spread_words(data.summary, settings)}"
    finish(figure, grid, len(panels))
    entitle(figure, f"{data.title}: {words}", f"Curves of {words}.")
    return figure


def colour_bar(figure: Figure, grid: Any, metric: Metric) -> None:
    """What the colours mean where a legend would be too long: the first, middle and last value."""
    several = len(metric.values)
    shade = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, several - 1), "viridis")
    # As wide beside several rows as beside one.
    words = label(str(metric.hue), LONGEST_SIDE)
    bar = figure.colorbar(shade, ax=grid.ravel().tolist(), label=words, aspect=20 * grid.shape[0])
    named_ones = [0, several // 2, several - 1]
    bar.set_ticks(named_ones, labels=[in_legend(metric.values[number]) for number in named_ones])


def draw_panel(axes: Axes, panel: pd.DataFrame, data: FigureData, metric: Metric) -> None:
    """Draw the curves of some runs."""
    count, splits, values = metric.count, metric.splits, metric.values
    groups = list(panel.groupby(metric.hue)) if metric.hue else [(None, panel)]
    summary = data.summary[data.summary["run"].isin(panel["run"])]
    single = panel[count].nunique() == 1
    line, point = styles(splits)
    style = {split: line[split] | (point[split] if single else {}) for split in splits}
    views = [*{*summary["views"]} - {"plain"}] if data.built_in and "test" in splits else []
    result = unused(metric.name, "test", data.settings)
    said, room = set[str](), 0.0
    # With one count, ranges would stand on each other.
    ranges = single and any(len(group) > 1 for _, group in groups)
    if ranges:
        room = min(MOST_ASIDE, ROOM_OF_ONE / (len(values) * len(splits)))
    elif (tested := splits.get("test")) and metric.has_legend:
        counts = panel.loc[panel[tested].notna(), count].to_numpy(dtype=float)
        room = room_for(counts, max(float(np.ptp(panel[count])), 1.0), len(values))
    if metric.has_legend:
        name_colours(axes, metric)
    for value, group in groups:
        number = values.index(value)
        colour = colour_of(number, len(values))
        # Points of several colours at the same place stand side by side.
        aside = (number - (len(values) - 1) / 2) * room
        for place, (split, column) in enumerate(splits.items()):
            if ranges:
                each = number * len(splits) + place
                aside = (each - (len(values) * len(splits) - 1) / 2) * room
            if split == "test" or ranges:
                points = group.groupby(count)[column].agg(["mean", "min", "max"]).dropna()
                points.index += aside
                axes.plot(points.index, points["mean"], color=colour, **style[split])
                axes.vlines(points.index, points["min"], points["max"], color=colour)
                continue
            said |= draw_runs(axes, group, count, column, {"color": colour} | style[split],
                              point[split], band=split != "train" or len(splits) == 1)  # fmt: skip
        if views:
            final = summary[summary["run"].isin(group["run"])]
            # Of the best weights, which may not be the last ones.
            at = final["epoch"].mean() if count == "epoch" and "epoch" in final else math.nan
            at = last_count(group, count, splits["test"]) if math.isnan(at) else at
            axes.plot([at + aside], [final[result].mean()], color=colour, **STAR)
    for split, column in splits.items() if [*splits] != [""] else ():
        text = SPLITS[split][0] or label(column, LEGEND_CHARACTERS)
        text += ", one view" if split == "test" and views else ""
        axes.plot([], [], color="grey", label=text, **style[split])
    for text in sorted(said):
        axes.plot([], [], color="grey", alpha=FAINT if text == FEWER else None, label=text)
    for name in views:
        axes.plot([], [], color="grey", label=f"test, {VIEWS.get(name, name)}", **STAR)
    axes.set(xlabel=label(count, LONGEST_SIDE), ylabel=label(metric.name, LONGEST_SIDE))


def styles(
    splits: Collection[str],
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Of the column of each split, the style of its curve, and that of a curve of one point."""
    line = {split: SPLITS[split][1] for split in splits}
    point: dict[str, dict[str, Any]] = {split: ONE_POINT[split] for split in splits}
    if "" in line and len(line) > 1:
        line[""], point[""] = BESIDE, BESIDE_ONE
    return line, point


def name_colours(axes: Axes, metric: Metric) -> None:
    """The values for a legend in their order, whichever of them this panel has."""
    for number, value in enumerate(metric.values):
        axes.plot([], [], color=colour_of(number, len(metric.values)), linewidth=3,
                  label=named([metric.hue], [value]) if metric.hue else ALL_RUNS)  # fmt: skip


def draw_runs(
    axes: Axes,
    group: pd.DataFrame,
    count: str,
    column: str,
    style: dict[str, Any],
    point: dict[str, Any],
    band: bool,
) -> set[str]:
    """Draw the mean of some runs, or each run if they have no counts in common; returns what the
    legend says of it.

    Args:
        point: the style of a curve of one point.
        band: whether their range is drawn too.
    """
    known = group[group[column].notna()]
    points = of_all_runs(known, count, column)
    end = known.groupby("run")[count].max().min()  # of the run that has ended first
    common, rest = points[points.index <= end], points[points.index >= end]
    if len(common) < 2 and known[count].nunique() > 1:
        for _, run in known.groupby("run"):
            axes.plot(run[count], run[column], **(style if len(run) > 1 else style | point))
        return {ALONE} if known["run"].nunique() > 1 else set()
    lone = len(points) == 1
    axes.plot(common.index, common["mean"], **(style | point if lone else style))
    if len(rest) > 1:
        axes.plot(rest.index, rest["mean"], alpha=FAINT, **style)
    if band and (points["min"] < points["max"]).any():
        if lone:
            axes.vlines(points.index, points["min"], points["max"], color=style["color"])
        else:
            axes.fill_between(points.index, points["min"], points["max"], color=style["color"],
                              alpha=0.15, linewidth=0)  # fmt: skip
    return {FEWER} if len(rest) > 1 else set()


def of_all_runs(known: pd.DataFrame, count: str, column: str) -> pd.DataFrame:
    """Mean, least and largest number of some runs by their count, without counts that a run has
    left out which goes on later: a mean of other runs at each of them would jump.

    Args:
        known: the rows that have a number.
    """
    ends = known.groupby("run")[count].max().to_numpy()
    points = known.groupby(count)[column].agg(["mean", "min", "max", "size"])
    reach = (ends[:, None] >= points.index.to_numpy()).sum(axis=0)
    return points[points["size"] == reach]


def last_count(group: pd.DataFrame, count: str, column: str) -> float:
    """The last count with a number in a column, or of all if there is none."""
    counts = group.loc[group[column].notna(), count]
    return float(counts.max() if len(counts) else group[count].max())


def room_for(places: np.ndarray, whole: float, groups: int) -> float:
    """By how much the points of two groups at one place are apart: neighbouring places stay so.

    Args:
        whole: length of the axis.
    """
    nearest = float(np.diff(np.unique(places)).min(initial=np.inf)) / 2
    return min(ASIDE * whole, MOST_ASIDE * whole / groups, nearest / groups)


def scale_of_counts(axes: Axes, counts: pd.Series) -> None:
    """Ticks at whole numbers; a single count in the middle of an axis of length 1, by which
    `draw_panel` sets points aside.
    """
    if counts.nunique() == 1:
        only = counts.iloc[0]
        axes.set_xlim(only - 0.5, only + 0.5)
        axes.xaxis.set_major_locator(FixedLocator([only]))
    elif (counts % 1 == 0).all():
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


@mpl.rc_context(STYLE)
def draw_by_axis(data: FigureData, column: str) -> Figure:
    """A result against each numeric axis, one line per combination of the other settings."""
    summary, numeric = data.summary, data.numeric
    groups_of = [groups_without(data, axis) for axis in numeric]
    alone, most = len(numeric) == 1, max(map(len, groups_of))
    explained = most <= (MOST_NAMED if alone else MOST_IN_PANEL)
    below = 0 if alone or not explained else LINE * most
    figure, grid = panel_grid(len(numeric), sharex=False, below=below)
    share = scale_of_results(grid[0, 0], summary[[column]], column)
    partly = False
    for axes, axis, groups in zip(grid.flat, numeric, groups_of, strict=False):
        values = sorted(map(float, summary[axis].unique()))
        scale_of_values(axes, values, width_beside(groups) if alone else PANEL_WIDTH)
        partly |= draw_groups(axes, groups, axis, column, explained)
        if not alone and explained and len(groups) > 1:
            # A colour is another setting in each panel.
            short = max(len(name) for name, _ in groups) <= SHORT
            # Below the name of the axis, however high the panel is.
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=5.5,
                        fontsize=8, ncols=2 if short else 1)  # fmt: skip
        axes.set_xlabel(label(axis, LONGEST_SIDE))
        axes.set_ylabel(label(column, LONGEST_SIDE))
        least_range(axes, share)
    each = "" if explained else ", a line per setting of the others"
    words = f"{each}{spread_words(summary, data.settings)}"
    words += ", open: of those that have a number" if partly else ""
    finish(figure, grid, len(numeric), legend=alone)
    entitle(figure, f"{data.title}: {column} by setting{words}",
            f"Points of {column} by {' and by '.join(numeric)}{words}.")  # fmt: skip
    return figure


def width_beside(groups: Sequence[tuple[str, pd.DataFrame]]) -> float:
    """Inches of an axis beside a legend with the names of these groups."""
    longest = max(len(line) for name, _ in groups for line in legend_words(name).splitlines())
    return min(WIDTH, WITHOUT_LEGEND - CHARACTER * longest)


def groups_without(data: FigureData, axis: str) -> list[tuple[str, pd.DataFrame]]:
    """The name and the runs of each setting of all axes but one."""
    summary = data.summary
    others = [name for name in data.settings if name != axis and summary[name].nunique() > 1]
    if not others:
        return [(ALL_RUNS, summary)]
    return [(named(others, setting), group) for setting, group in summary.groupby(others)]


def draw_groups(
    axes: Axes,
    groups: Sequence[tuple[str, pd.DataFrame]],
    axis: str,
    column: str,
    explained: bool,
) -> bool:
    """A line for each group, with a gap where no number is finite; the ranges at the same place
    stand side by side. A point is open if not all of its runs have a number, as after a training
    that has diverged.

    Returns:
        Whether there is such a point.
    """
    partly = False
    scale = axes.xaxis.get_transform()
    places = scale.transform(np.concatenate([group[axis].to_numpy(float) for _, group in groups]))
    several = any(group[axis].duplicated().any() for _, group in groups)
    room = several * room_for(places, float(np.ptp(places)), len(groups))
    for number, (name, group) in enumerate(groups):
        points = group.groupby(axis)[column].agg(["mean", "min", "max", "count", "size"])
        aside = (number - (len(groups) - 1) / 2) * room
        at = scale.inverted().transform(scale.transform(points.index.to_numpy(float)) + aside)
        colour = colour_of(number, len(groups))
        axes.plot(at, points["mean"], color=colour, marker="o", label=name if explained else None)
        axes.vlines(at, points["min"], points["max"], color=colour)
        few = ((points["count"] > 0) & (points["count"] < points["size"])).to_numpy()
        if few.any():
            partly = True
            axes.plot(at[few], points["mean"][few], color=colour, marker="o", linestyle="none",
                      markerfacecolor="white")  # fmt: skip
    return partly


def scale_of_results(axes: Axes, numbers: pd.DataFrame, name: str) -> bool:
    """A height in percent for shares, and logarithmic for other numbers that are far apart; returns
    whether they are shares.
    """
    values = numbers.to_numpy(dtype=float)
    values = values[np.isfinite(values)]
    share = is_share(name, values)
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    elif len(values) and values.min() > 0 and values.max() / values.min() >= WIDE_MEASURED:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        # It would write TeX, which is not parsed.
        axes.yaxis.set_minor_formatter(NullFormatter())
    return share


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


@mpl.rc_context(STYLE | {"axes.grid": False, "axes.spines.left": False})
def draw_search(data: FigureData, result: str) -> Figure:
    """Every setting as a line through its values, in the colour of its result (parallel
    coordinates); of several runs, which differ only in their seed or fold, in that of their mean.

    Args:
        result: a column of numbers.
    """
    summary = data.summary
    keys = [axis for axis in data.settings if axis in data.searched or summary[axis].nunique() > 1]
    numbers = summary[result].astype(float)
    numbers = numbers.where(np.isfinite(numbers))
    missing = int(numbers.isna().sum())
    points = summary.drop_duplicates(keys)
    # In the same order.
    runs = numbers.groupby([summary[key] for key in keys], sort=False).agg(
        ["mean", "count", "size"]
    )
    values = runs["mean"].to_numpy()
    # The best ones on top, if it is known which they are.
    lower = LOWER.search(result) and not RAISED.search(result)
    order = np.argsort(-values if lower else values)
    width = max(7.2, 1.8 * len(keys))
    figure, axes = plt.subplots(figsize=(width, 4.6), layout="constrained")
    heights = np.column_stack([draw_scale(axes, at, points[key]) for at, key in enumerate(keys)])
    shade = mpl.cm.ScalarMappable(
        mpl.colors.Normalize(np.nanmin(values), np.nanmax(values)), "viridis"
    )
    shown = order[np.isfinite(values[order])]
    for row in shown:
        axes.plot(range(len(keys)), heights[row], color=shade.to_rgba(values[row]), alpha=0.9)
    room = int((width / len(keys) - BESIDE_NAME) / CHARACTER)
    axes.set_xticks(range(len(keys)), [label(key, room) for key in keys])
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(keys) - 0.6)
    form = PercentFormatter(1) if is_share(result, values) else None
    each, its = ("point", f"mean {result}") if runs["size"].max() > 1 else ("run", result)
    figure.colorbar(shade, ax=axes, format=form, label=label(its, LONGEST_SIDE))
    words = f", without {missing} of {len(numbers)} runs that have no number" if missing else ""
    known = LOWER.search(result) or HIGHER.search(result)
    first = "the best" if known else "the highest"
    best = []
    # One of which all runs have a number.
    for row in shown[(runs["count"] == runs["size"]).to_numpy()[shown]][-1:]:
        of = f" mean of {counted(runs['size'].iloc[row], 'run')}" if each == "point" else ""
        best = [f", {first}{of} with {named(keys, [*points[keys].iloc[row]])}"]
    drawn = f"A line per {each} through its {', '.join(keys)}, in the colour of its {its}."
    entitle(figure, "".join([f"{data.title}: {result} by setting", *best, words]), drawn)
    return figure


def draw_scale(axes: Axes, at: int, column: pd.Series) -> np.ndarray:
    """A vertical scale with labels; returns the height of each value, 0 to 1."""
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        low, high = float(column.min()), float(column.max())
        wide = low > 0 and high / low >= WIDE
        numbers = np.log(column.to_numpy(dtype=float)) if wide else column.to_numpy(dtype=float)
        middle = math.sqrt(low * high) if wide else (low + high) / 2
        spread = max(float(np.ptp(numbers)), 1e-12)
        heights = (numbers - numbers.min()) / spread if high > low else np.full(len(column), 0.5)
        labels = dict(zip(map(float, column), map(float, heights), strict=True))
        if len(labels) > MOST_LABELS:
            labels = {low: 0.0, middle: 0.5, high: 1.0}
        texts = [(height, f"{value:.3g}") for value, height in labels.items()]
    else:
        names = sorted(map(value_words, column.unique()), key=as_number)
        place = {name: number / max(1, len(names) - 1) for number, name in enumerate(names)}
        heights = np.array([place[value_words(value)] for value in column])
        texts = [(height, label(name, SCALE_CHARACTERS)) for name, height in place.items()]
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


@mpl.rc_context(STYLE | {"axes.grid": False})
def draw_confusion(confused: pd.DataFrame, of: str = "the run") -> Figure:
    """The confusion matrix of one run; colour is the share of the true class.

    More classes than MOST_NUMBERS stand so that those that are often confused are neighbours.

    Args:
        of: what it is of, in words.
    """
    matrix = confused.pivot(
        index="true_class", columns="predicted_class", values="images"
    ).to_numpy()
    names = confused.drop_duplicates("true_class").sort_values("true_class")["true_name"]
    labels = [label(name) for name in names]
    few = len(matrix) <= MOST_NUMBERS
    if not few:
        order = by_similarity(matrix)
        matrix, labels = matrix[np.ix_(order, order)], [labels[row] for row in order]
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    named_ones = len(matrix) <= MOST_NAMES
    size = 6.4 if few else min(18 if named_ones else 12, 3 + 0.16 * len(matrix))
    figure, axes = plt.subplots(figsize=(size + 0.8, size), layout="constrained")
    # Every class has its own pixel in the file, however many there are.
    picture = axes.imshow(share, cmap="Blues", vmin=0, vmax=1, interpolation="none")
    if few:
        for (row, column), images in np.ndenumerate(matrix):
            colour = "white" if share[row, column] > 0.5 else "#222"
            axes.text(column, row, f"{images:.0f}" if images else "", ha="center", va="center",
                      fontsize=9, color=colour)  # fmt: skip
    if named_ones:
        font = None if few else 7
        # By its end, however wide another font makes it.
        axes.set_xticks(range(len(matrix)), labels, rotation=45 if few else 90, ha="right",
                        va="center", rotation_mode="anchor", fontsize=font)  # fmt: skip
        axes.set_yticks(range(len(matrix)), labels, fontsize=font)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    neighbours = "" if few else ", ordered so that classes that are confused are neighbours"
    axes.set_xlabel("predicted class")
    axes.set_ylabel(f"true class{neighbours}")
    figure.colorbar(picture, format=PercentFormatter(1), label="share of the true class",
                    shrink=0.8)  # fmt: skip
    words = f"Test images of {of}"
    entitle(figure, words, f"{words}, by true and by predicted class.")
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
        # Their ranks, as odds may be infinite.
        score = np.unique(second - first, return_inverse=True)[1]
        found["ranking"] = draw_ranking(run, true, score, predicted.class_names)
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


@mpl.rc_context(STYLE)
def draw_calibration(run: str, bins: pd.DataFrame) -> Figure:
    """Accuracy by probability (Guo et al., 2017), above the share of the images with it."""
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
    drawn = (
        "Bars of the accuracy by the probability of the predicted class; below them the share of "
        "the images with it."
    )
    entitle(figure, f"Calibration of {run}, expected error {error:.2%}", drawn)
    return figure


@mpl.rc_context(STYLE)
def draw_ranking(run: str, true: np.ndarray, score: np.ndarray, names: Sequence[str]) -> Figure:
    """The ROC curve, and precision by recall, of each class against the other.

    Args:
        true: the class of each image, 0 or 1, int (n,).
        score: of each, higher for the second class, finite (n,).
    """
    # Few experiments have two classes, and importing it takes 0.7 CPU seconds.
    from sklearn.metrics import precision_recall_curve, roc_curve

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4.6), layout="constrained")
    for number, sign in enumerate((-1, 1)):
        name, colour = label(names[number]), PALETTE[number]
        false, recall, _ = roc_curve(true == number, sign * score, drop_intermediate=False)
        left.plot(false, recall, color=colour, label=f"{name} found by its probability")
        precision, recall, _ = precision_recall_curve(true == number, sign * score)
        right.step(recall[::-1], precision[::-1], color=colour)
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
    drawn = "Curves of true by false positive rate, and of precision by recall, of each class."
    entitle(figure, f"Images of each class of {run}, by their probability", drawn)
    return figure


def least_range(axes: Axes, share: bool) -> None:
    """Do not magnify small differences to the whole height.

    Args:
        share: whether accuracies are drawn; of other numbers a tenth of the largest is small.
    """
    bottom, top = axes.get_ylim()
    least = LEAST_RANGE if share else max(abs(bottom), abs(top)) / 10
    room = max(0.0, least - (top - bottom)) / 2
    bottom, top = bottom - room, top + room
    # A little more than all and less than none, for the whole of a point there.
    edge = EDGE * (top - bottom) if share else math.inf
    axes.set_ylim(max(bottom, -edge), min(top, 1 + edge))


def panel_grid(panels: int, sharex: bool, below: float = 0) -> tuple[Figure, Any]:
    """Axes for panels.

    Args:
        below: inches below each, for its legend.
    """
    columns = min(panels, PANEL_COLUMNS)
    rows = -(-panels // columns)
    size = (3.6 + 4.4 * columns, 0.9 + (3.6 + below) * rows)
    return plt.subplots(
        rows, columns, figsize=size, squeeze=False, sharex=sharex, sharey=True, layout="constrained"
    )


def finish(figure: Figure, grid: Any, panels: int, legend: bool = True) -> None:
    """Hide what no panel is drawn on, and give all panels one legend: beside them, or below them
    if it would be higher than they are.
    """
    for empty in grid.flat[panels:]:
        empty.set_visible(False)
    for column in grid.T:
        lowest = [axes for axes in column if axes.get_visible()][-1]
        lowest.tick_params(labelbottom=True)
    labelled = {
        words: handle
        for axes in grid.flat
        for handle, words in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if legend and labelled and set(labelled) != {ALL_RUNS}:
        names = [*map(legend_words, labelled)]
        lines, high = lines_of(labelled), figure.get_figheight()
        if ABOVE_LEGEND + LEGEND_LINE * lines <= high:
            figure.legend(labelled.values(), names, loc="outside right center")
        else:
            figure.set_figheight(high + LINE * (1 + lines / 2))
            figure.legend(labelled.values(), names, loc="outside lower center", ncols=2, fontsize=8)


def legend_words(text: str) -> str:
    """In so many lines that it leaves room for the panels."""
    return textwrap.fill(text, LEGEND_CHARACTERS, break_on_hyphens=False)


def lines_of(names: Iterable[str]) -> int:
    """How many lines a legend has of these names."""
    return sum(len(legend_words(name).splitlines()) for name in names)


def named(axes: Sequence[str], values: Sequence[Any]) -> str:
    pairs = zip(axes, values, strict=True)
    return "  ".join(f"{axis} {in_legend(value)}" for axis, value in pairs)


def in_legend(value: Any) -> str:
    return label(value_words(value, 6))


def spread_words(summary: pd.DataFrame, settings: Sequence[str]) -> str:
    """Over how many runs that differ only in their seed or fold."""
    sizes = summary.groupby(list(settings)).size() if settings else pd.Series([len(summary)])
    # Runs may be missing.
    least, found = int(sizes.min()), int(sizes.max())
    several = "folds" if "fold" in summary else "seeds"
    several = "runs" if {"fold", "seed"} <= {*summary} else several
    words = f"{found}" if least == found else f"{least} to {found}"
    return f", mean and range over {words} {several}" if found > 1 else " (a single seed)"
