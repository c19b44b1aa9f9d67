"""The figure of a scaling study: speed-up, efficiency, a map of sizes, accuracy by size."""

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter
from pandas.api.types import is_integer_dtype

from manynodes.experiment.config import Experiment
from manynodes.reporting import intervals, scaling, speed_up
from manynodes.reporting.figures import STYLE, colour_of, entitle, label
from manynodes.reporting.result_figures import LINE, MOST_NAMED, least_range, legend_words, lines_of

PANEL_COLUMNS = 2
MOST_BARS = 16  # sizes whose accuracies are drawn
MOST_LEVEL = 8  # of them with their names side by side
LEAST_MAPPED = 4  # sizes of a map
FEW = 6  # lines of a legend that may stand between the points
SETTING_CHARACTERS = 90  # of the name of a setting
TITLE_CHARACTERS = 60  # of a line of the title of a panel
MOST_ASIDE, ROOM = 0.1, 0.6  # of the room of a size, for a setting and for all of them

Rows = list[dict[str, Any]]
Point = tuple[int, float, str]  # place, height, name


@mpl.rc_context(STYLE)
def draw(
    experiment: Experiment, table: pd.DataFrame, images: Mapping[str, int], title: str
) -> Figure:
    """The panels for which the sizes suffice.

    Args:
        table: as `scaling.sizes` returns it.
        images: of each run's test split.
    """
    rows = scaling.rows_of(table)
    settings = scaling.by_setting(experiment, rows)

    def named(find: Callable[[Rows], list[Rows]], form: str) -> dict[str, Rows]:
        return {
            "  ".join(filter(None, (setting, form.format(**study[0])))): study
            for setting, mine in settings.items()
            for study in find(mine)
        }

    for row in rows:
        row["share"] = row["global_batch_size"] // row["processes"]
    strong = named(scaling.strong, "batch {global_batch_size}")
    weak = named(scaling.weak, "{share} images per process")
    panels: list[Callable[[Axes], None]] = []
    # Sizes that divide the same CPUs differently would be one point.
    growing = {
        name: study for name, study in strong.items() if len(set(map(scaling.units, study))) > 1
    }
    if growing:
        panels.append(lambda axes: draw_strong(axes, growing))
    if weak:
        panels.append(lambda axes: draw_weak(axes, weak))
    of, mapped = max(strong.items(), key=lambda item: len(item[1]), default=("", []))
    # Of fewer sizes the table says as much.
    if len(mapped) >= LEAST_MAPPED and all(
        len({row[key] for row in mapped}) > 1 for key in ("threads", "processes")
    ):
        panels.append(lambda axes: draw_map(axes, mapped, of))
    panels.append(lambda axes: draw_accuracy(axes, settings, images))
    columns = min(PANEL_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    high = 4.4 + max(below(growing), below(weak), below(settings, few=0))
    figure = plt.figure(figsize=(6.2 * columns, high * lines), layout="constrained")
    for number, panel in enumerate(panels, 1):
        panel(figure.add_subplot(lines, columns, number))
    drawn = [" ".join(axes.get_title(loc="left").split("\n")) for axes in figure.axes]
    entitle(figure, f"{title}: scaling", f"{'; '.join(drawn)}.")
    return figure


@mpl.rc_context(STYLE)
def draw_programs(experiment: Experiment, table: pd.DataFrame, title: str) -> Figure:
    """Speed-up by processes, or by CPUs if their number varies, with the ideal.

    Args:
        table: as `speed_up.sizes` returns it.
    """
    settings = speed_up.by_setting(experiment, table)
    on_gpus = experiment.runs[table["run"].iloc[0]].device == "cuda"
    cpus = table["cpus_per_proc"]
    by_cpus = cpus.nunique() > 1 and is_integer_dtype(cpus) and not on_gpus

    def units(row: Mapping[str, Any]) -> int:
        return int(row["processes"] * (row["cpus_per_proc"] if by_cpus else 1))

    figure, axes = plt.subplots(figsize=(7, 4.4 + below(settings)), layout="constrained")
    labels, points = labels_of(settings), list[Point]()
    for number, (name, rows) in enumerate(settings.items()):
        colour = colour_of(number, len(settings))
        known = [row for row in rows if pd.notna(row["speed_up"])]
        at = [units(row) for row in known]
        reached = [row["speed_up"] for row in known]
        axes.plot(at, reached, "o", color=colour, label=labels.get(name))
        keys = ["nodes", "nproc_per_node", *["cpus_per_proc"] * by_cpus]
        names = ["x".join(str(row[key]) for key in keys) for row in known]
        points += zip(at, reached, names, strict=True)
        ideal = [units(row) / units(rows[0]) for row in rows]
        axes.plot([*map(units, rows)], ideal, "--", color="grey", linewidth=1)
    label_points(axes, points)
    axes.plot([], [], "--", color="grey", label="ideal")
    by = "CPUs" if by_cpus else "processes"
    axes.set_xlabel(by)
    ticks(axes, [units(row) for rows in settings.values() for row in rows])
    speed_up_axis(axes)
    explain(axes, labels)
    drawn = f"Points of the speed-up by {by}, beside the ideal."
    entitle(figure, f"{title}: scaling{unnamed(labels)}", drawn)
    return figure


def draw_strong(axes: Axes, studies: dict[str, Rows]) -> None:
    """Speed-up by CPUs or GPUs, with the ideal and the model."""
    labels, points = labels_of(studies), list[Point]()
    for number, (name, study) in enumerate(studies.items()):
        base = scaling.smallest(study)
        colour = colour_of(number, len(studies))
        ordered = sorted(study, key=scaling.units)
        units = [scaling.units(row) for row in ordered]
        reached = [row["strong_speed_up"] for row in ordered]
        axes.plot(units, reached, "o", color=colour, label=labels.get(name))
        points += zip(units, reached, map(size, ordered), strict=True)
        for row, at in zip(ordered, units, strict=True):
            if pd.notna(row["model_images_per_second"]):
                modelled = row["model_images_per_second"] / base["images_per_second"]
                axes.plot([at], [modelled], "x", color=colour, markersize=9)
        axes.plot(units, [at / units[0] for at in units], "--", color="grey", linewidth=1)
    label_points(axes, points)
    axes.plot([], [], "--", color="grey", label="ideal")
    if any(pd.notna(row["model_images_per_second"]) for row in chain(*studies.values())):
        axes.plot([], [], "x", color="grey", markersize=9, label="model")
    name_panel(axes, f"Strong scaling: the same global batch{unnamed(labels)}")
    by_units(axes, list(chain(*studies.values())))
    speed_up_axis(axes)
    explain(axes, labels)


def labels_of(settings: Iterable[str]) -> dict[str, str]:
    """What a legend says of each setting; empty if they are too many for one."""
    words = {name: legend_words(label(name, SETTING_CHARACTERS)) for name in settings}
    return words if len(words) <= MOST_NAMED else {}


def unnamed(labels: Mapping[str, str]) -> str:
    """What a title says of settings that are too many for a legend."""
    return "" if labels else ", a colour per setting"


def below(settings: Iterable[str], few: int = FEW) -> float:
    """Inches below a panel for its legend, if that has more than a few lines."""
    lines = lines_of(labels_of(settings).values())
    return LINE * (1 + lines / 2) if lines > few else 0


def explain(axes: Axes, labels: Mapping[str, str], few: int = FEW, pad: float = 5.5) -> None:
    """A legend, in the panel if it has a few lines, otherwise below it.

    Args:
        pad: from the panel, in heights of its letters.
    """
    if below(labels, few):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=pad, fontsize=8,
                    ncols=2)  # fmt: skip
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9)


def name_panel(axes: Axes, words: str) -> None:
    axes.set_title(textwrap.fill(words, TITLE_CHARACTERS), loc="left", fontsize=11)


def label_points(axes: Axes, points: Sequence[Point]) -> None:
    """The names of the points of all settings, at the highest of those above each other."""
    found = defaultdict(list)
    for place, height, name in points:
        found[place].append((height, name))
    for place, here in found.items():
        axes.annotate(
            ", ".join(dict.fromkeys(name for _, name in here)),
            (place, max(height for height, _ in here)), (5, 2),
            textcoords="offset points", fontsize=7, color="#444",
        )  # fmt: skip


def speed_up_axis(axes: Axes) -> None:
    """With the scale of the sizes, so that the ideal is a straight line."""
    axes.set_ylabel("times as fast as the smallest")
    if axes.get_xscale() == "log":
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(ScalarFormatter())
    else:
        axes.set_ylim(bottom=0)


def size(row: dict[str, Any]) -> str:
    return f"{row['nodes']}x{row['nproc_per_node']}x{row['threads']}"


def draw_weak(axes: Axes, studies: dict[str, Rows]) -> None:
    """Efficiency by CPUs or GPUs."""
    labels = labels_of(studies)
    for number, (name, study) in enumerate(studies.items()):
        ordered = sorted(study, key=scaling.units)
        axes.plot(
            [scaling.units(row) for row in ordered],
            [row["weak_efficiency"] for row in ordered],
            "o-", color=colour_of(number, len(studies)), label=labels.get(name),
        )  # fmt: skip
    axes.axhline(1, color="grey", linestyle="--", linewidth=1, label="ideal")
    name_panel(axes, f"Weak scaling: the same batch per process{unnamed(labels)}")
    axes.set_ylabel("efficiency")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    by_units(axes, list(chain(*studies.values())))
    explain(axes, labels)


def by_units(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    ticks(axes, [scaling.units(row) for row in rows])
    axes.set_xlabel("GPUs" if rows[0]["gpus"] else "CPUs")


def ticks(axes: Axes, units: Sequence[int]) -> None:
    found = sorted(set(units))
    if found[-1] > 4 * found[0]:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(found))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())


def draw_map(axes: Axes, study: Rows, name: str) -> None:
    """Images per second by processes and threads of each; the fastest of several sizes."""
    fastest = pd.DataFrame(study).pivot_table(
        "images_per_second", index="threads", columns="processes", aggfunc="max"
    )
    axes.grid(visible=False)
    axes.imshow(fastest, cmap="viridis", origin="lower", aspect="auto")
    middle = (fastest.min().min() + fastest.max().max()) / 2
    for line, (_, values) in enumerate(fastest.iterrows()):
        for column, value in enumerate(values):
            if pd.notna(value):
                colour = "black" if value > middle else "white"
                axes.text(column, line, f"{value:,.0f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(fastest.columns)), [str(each) for each in fastest.columns])
    axes.set_yticks(range(len(fastest.index)), [str(each) for each in fastest.index])
    axes.set_xlabel("processes")
    axes.set_ylabel("threads per process")
    name_panel(axes, f"Images per second, {label(name, SETTING_CHARACTERS)}")


def draw_accuracy(axes: Axes, settings: Mapping[str, Rows], images: Mapping[str, int]) -> None:
    """Test accuracy of each size: mean over its runs, and the 95 % interval of the share of their
    test images (Wilson's). Settings of one size stand side by side.
    """
    sizes = [*dict.fromkeys(map(size_and_batch, chain(*settings.values())))]
    shown = sizes[:MOST_BARS]
    labels = labels_of(settings)
    room = min(MOST_ASIDE, ROOM / len(settings))
    counts = set()
    for number, (name, rows) in enumerate(settings.items()):
        colour = colour_of(number, len(settings))
        if len(settings) > 1:
            axes.plot([], [], "o", color=colour, label=labels.get(name))
        for row in rows:
            if (each := size_and_batch(row)) not in shown:
                continue
            at = shown.index(each) + (number - (len(settings) - 1) / 2) * room
            n = images[row["run"]]
            counts.add(n)
            low, high = intervals.of_share(round(row["accuracy"] * n), n)
            axes.plot([at], [row["accuracy"]], "o", color=colour)
            axes.vlines([at], low, high, color=colour)
    least_range(axes, share=True)
    turned = 90 if len(shown) > MOST_LEVEL else 0
    axes.set_xticks(range(len(shown)), shown, fontsize=8, rotation=turned)
    axes.set_xlabel("nodes x processes per node x threads, and global batch")
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    more = "" if len(shown) == len(sizes) else f" (the first {len(shown)} of {len(sizes)} sizes)"
    of = f"{min(counts):,}" if len(counts) == 1 else "their test"
    name_panel(axes, f"Accuracy by size{more}, 95% interval of {of} images{unnamed(labels)}")
    # Points are everywhere.
    explain(axes, labels, few=0, pad=9 if turned else 5.5)


def size_and_batch(row: dict[str, Any]) -> str:
    return f"{size(row)}\n{row['global_batch_size']}"
