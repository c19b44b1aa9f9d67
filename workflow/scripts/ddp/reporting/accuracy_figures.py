"""The figures of a classifier's experiment: accuracy and loss by epoch, accuracy by setting, and
the confusion matrix.

Colour shows the axis with the most values; each combination of the others has a panel. Seeds are
averaged, and a band (validation) or a bar (test) shows their range.
"""

from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
    ScalarFormatter,
)

from ddp.reporting import page
from ddp.reporting.figures import PALETTE, STYLE, colour_of
from ddp.reporting.results import VIEWS

# Style and legend of each column of curves.csv.
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("training", {"linestyle": ":"}),
    "val": ("validation", {"linestyle": "-"}),
    "test": ("test", {"linestyle": "none", "marker": "o"}),
}
# A curve of one epoch is a point, which a line would not show.
ONE_EPOCH: dict[str, dict[str, Any]] = {
    "train": {"marker": "^"},
    "val": {"marker": "s"},
    "test": {},
}
PANEL_COLUMNS = 3
MOST_NUMBERS = 20  # classes up to which the confusion matrix shows its numbers
WIDE = (
    8  # ratio of an axis' largest value to its smallest from which on it is drawn logarithmically
)


def draw(
    curves: pd.DataFrame, summary: pd.DataFrame, settings: list[str], metric: str, title: str
) -> Figure:
    """A figure of one metric by epoch, with a panel per combination of the other settings."""
    with mpl.rc_context(STYLE):
        hue = max(settings, key=lambda axis: curves[axis].nunique(), default=None)
        others = [axis for axis in settings if axis != hue and curves[axis].nunique() > 1]
        panels = list(curves.groupby(others)) if others else [((), curves)]
        figure, grid = panel_grid(len(panels), sharex=True)
        for axes, (values, panel) in zip(grid.flat, panels, strict=False):
            draw_panel(axes, panel, summary[summary["run"].isin(panel["run"])], hue, metric)
            axes.set_title(
                "  ".join(f"{axis} {value}" for axis, value in zip(others, values, strict=True)),
                fontsize=11,
            )
        finish(
            figure,
            grid,
            len(panels),
            f"{title}: {metric} by epoch{spread_words(summary, settings)}",
        )
        return figure


def panel_grid(panels: int, sharex: bool) -> tuple[Figure, Any]:
    columns = min(panels, PANEL_COLUMNS)
    rows = -(-panels // columns)
    size = (3.6 + 4.4 * columns, 0.9 + 3.6 * rows)
    return plt.subplots(
        rows, columns, figsize=size, squeeze=False, sharex=sharex, sharey=True, layout="constrained"
    )


def finish(figure: Figure, grid: Any, panels: int, title: str) -> None:
    for unused in grid.flat[panels:]:
        unused.set_visible(False)
    figure.suptitle(title, x=0.02, ha="left", fontweight="bold")
    labelled = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled.keys(), loc="outside right center")


def draw_panel(
    axes: Axes, panel: pd.DataFrame, summary: pd.DataFrame, hue: str | None, metric: str
) -> None:
    groups: list[tuple[Any, pd.DataFrame]] = list(panel.groupby(hue)) if hue else [(None, panel)]
    markers: dict[str, dict[str, Any]] = (
        ONE_EPOCH if panel["epoch"].nunique() == 1 else {split: {} for split in SPLITS}
    )
    views = [name for name in summary["views"].unique() if name != "plain"]
    for number, (value, group) in enumerate(groups):
        colour = colour_of(number, len(groups))
        axes.plot([], [], color=colour, linewidth=3, label=f"{hue} {value}" if hue else "all runs")
        for split, (_, style) in SPLITS.items():
            by_epoch = (
                group.groupby("epoch")[f"{split}_{metric}"].agg(["mean", "min", "max"]).dropna()
            )
            axes.plot(by_epoch.index, by_epoch["mean"], color=colour, **style, **markers[split])
            if split == "test":
                axes.vlines(by_epoch.index, by_epoch["min"], by_epoch["max"], color=colour)
            if split == "val":
                axes.fill_between(
                    by_epoch.index,
                    by_epoch["min"],
                    by_epoch["max"],
                    color=colour,
                    alpha=0.15,
                    linewidth=0,
                )
        if views:
            final = summary[summary["run"].isin(group["run"])][metric]
            axes.plot(
                [group["epoch"].max()],
                [final.mean()],
                color=colour,
                marker="*",
                markersize=11,
                linestyle="none",
            )
    for split, (name, style) in SPLITS.items():
        if panel[f"{split}_{metric}"].notna().any():
            axes.plot(
                [],
                [],
                color="grey",
                label=f"{name}, one view" if split == "test" and views else name,
                **style,
                **markers[split],
            )
    for name in views:
        axes.plot(
            [],
            [],
            color="grey",
            label=f"test, {VIEWS.get(name, name)}",
            marker="*",
            markersize=11,
            linestyle="none",
        )
    axes.set_xlabel("epoch")
    axes.set_ylabel("accuracy" if metric == "accuracy" else "cross-entropy (nats)")
    axes.xaxis.set_major_locator(
        FixedLocator([panel["epoch"].max()]) if markers is ONE_EPOCH else MaxNLocator(integer=True)
    )
    if metric == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1))


def draw_axes(summary: pd.DataFrame, settings: list[str], numeric: list[str], title: str) -> Figure:
    """Test accuracy against each numeric axis, one line per combination of the other settings."""
    with mpl.rc_context(STYLE):
        figure, grid = panel_grid(len(numeric), sharex=False)
        for axes, axis in zip(grid.flat, numeric, strict=False):
            others = [name for name in settings if name != axis and summary[name].nunique() > 1]
            groups = list(summary.groupby(others)) if others else [((), summary)]
            for number, (setting, group) in enumerate(groups):
                by_value = group.groupby(axis)["accuracy"].agg(["mean", "min", "max"])
                colour = colour_of(number, len(groups))
                label = (
                    "  ".join(
                        f"{name} {value}" for name, value in zip(others, setting, strict=True)
                    )
                    or "all runs"
                )
                axes.plot(
                    by_value.index,
                    by_value["mean"],
                    color=colour,
                    marker="o",
                    label=label if len(groups) <= len(PALETTE) else None,
                )
                axes.vlines(by_value.index, by_value["min"], by_value["max"], color=colour)
            values = sorted(map(float, summary[axis].unique()))
            if min(values) > 0 and max(values) / min(values) >= WIDE:
                axes.set_xscale("log")
            axes.xaxis.set_major_locator(FixedLocator(values))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.set_xlabel(axis)
            axes.set_ylabel(f"test accuracy, {page.views_of(summary)}")
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        finish(
            figure,
            grid,
            len(numeric),
            f"{title}: accuracy by setting{spread_words(summary, settings)}",
        )
        return figure


def draw_confusion(confused: pd.DataFrame) -> Figure:
    """The confusion matrix of one run; colour is the share of the true class."""
    run = str(confused["run"].iloc[0])
    matrix = confused.pivot(
        index="true_class", columns="predicted_class", values="images"
    ).to_numpy()
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    classes = len(matrix)
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots(figsize=(7.2, 6.4), layout="constrained")
        picture = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
        if classes <= MOST_NUMBERS:
            for (row, column), images in np.ndenumerate(matrix):
                colour = "white" if share[row, column] > 0.5 else "#222"
                axes.text(
                    column,
                    row,
                    f"{images:.0f}" if images else "",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color=colour,
                )
            names = confused.drop_duplicates("true_class").sort_values("true_class")["true_name"]
            # Between two dollar signs matplotlib reads a formula.
            labels = [name.replace("$", r"\$") for name in names]
            axes.set_xticks(range(classes), labels, rotation=45, ha="right")
            axes.set_yticks(range(classes), labels)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        figure.colorbar(
            picture, format=PercentFormatter(1), label="share of the true class", shrink=0.8
        )
        figure.suptitle(f"Test images of {run}", x=0.02, ha="left", fontweight="bold")
        return figure


def spread_words(summary: pd.DataFrame, settings: list[str]) -> str:
    seeds = page.seeds(summary, settings)
    return f", mean and range over {seeds} seeds" if seeds > 1 else " (a single seed)"
