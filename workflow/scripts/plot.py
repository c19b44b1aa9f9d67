"""Draw an experiment's tables: loss.svg and accuracy.svg by epoch, and the summary as a page, summary.html.

Colour shows the axis with the most values, a panel each combination of the others; seeds are averaged, with a band
(validation) or a bar (test) from the lowest to the highest.
"""

import argparse
import html
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ddp import atomic
from ddp.errors import Refusal, told_in_one_line

# Okabe and Ito's colours, which people with any colour vision can tell apart.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
    "font.size": 11,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    # With these the same table gives the same bytes.
    "svg.hashsalt": "ddp",
}
# How each column of curves.csv is drawn, and what it is called in the legend.
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("training", {"linestyle": ":"}),
    "val": ("validation", {"linestyle": "-"}),
    "test": ("test", {"linestyle": "none", "marker": "o"}),
}
PANEL_COLUMNS = 3

PAGE = """<!doctype html>
<meta charset="utf-8"><title>{title}</title>
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222 }}
  table {{ border-collapse: collapse; margin: 0 0 2rem }}
  th, td {{ padding: .35rem .9rem; border-bottom: 1px solid #ddd; text-align: right; font-variant-numeric: tabular-nums }}
  th {{ border-bottom: 2px solid #222 }}
  th:first-child, td:first-child {{ text-align: left }}
</style>
<h1>{title}</h1>
{tables}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", type=Path, required=True, help="summary.csv of the experiment")
    parser.add_argument("--curves", type=Path, required=True, help="curves.csv of the experiment")
    parser.add_argument("--output", type=Path, required=True, help="folder for loss.svg, accuracy.svg and summary.html")
    args = parser.parse_args()
    with told_in_one_line("plot"):
        summary, curves = read(args.summary, "n"), read(args.curves, "epoch")
        axes = list(summary.columns[1 : list(summary.columns).index("n")])
        settings = [axis for axis in axes if axis != "seed"]
        name = args.output.resolve().name
        for metric in ("loss", "accuracy"):
            with atomic.replacing(args.output / f"{metric}.svg") as temporary, mpl.rc_context(STYLE):
                draw(curves, settings, metric, name).savefig(temporary, format="svg", metadata={"Date": None})
        atomic.write_text(args.output / "summary.html", page(summary, settings, name))


def read(path: Path, first_metric: str) -> pd.DataFrame:
    try:
        table = pd.read_csv(path, dtype={"run": str, "commit": str})
        table[["run", first_metric]]
        return table
    except (KeyError, ValueError, pd.errors.ParserError) as error:
        raise Refusal(f"{path} is damaged ({error}); delete it and run snakemake again") from None


def draw(curves: pd.DataFrame, settings: list[str], metric: str, title: str) -> Figure:
    """A figure of one metric by epoch: a panel per combination of the settings that colour does not show."""
    hue = max(settings, key=lambda axis: curves[axis].nunique(), default=None)
    others = [axis for axis in settings if axis != hue and curves[axis].nunique() > 1]
    panels = list(curves.groupby(others)) if others else [((), curves)]
    columns = min(len(panels), PANEL_COLUMNS)
    rows = -(-len(panels) // columns)
    size = (3.4 + 4.2 * columns, 0.9 + 3.4 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex=True, sharey=True, layout="constrained")
    for axes, (values, panel) in zip(grid.flat, panels, strict=False):
        draw_panel(axes, panel, hue, metric)
        axes.set_title("  ".join(f"{axis} {value}" for axis, value in zip(others, values, strict=True)), fontsize=11)
    for unused in grid.flat[len(panels) :]:
        unused.set_visible(False)
    spread = ", mean and range over seeds" if seeds(curves, settings) > 1 else ""
    figure.suptitle(f"{title}: {metric} by epoch{spread}", x=0.02, ha="left", fontweight="bold")
    labelled = {label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labelled.values(), labelled.keys(), loc="outside right center")
    return figure


def draw_panel(axes: Axes, panel: pd.DataFrame, hue: str | None, metric: str) -> None:
    groups: list[tuple[Any, pd.DataFrame]] = list(panel.groupby(hue)) if hue else [(None, panel)]
    for number, (value, group) in enumerate(groups):
        colour = PALETTE[number] if len(groups) <= len(PALETTE) else plt.get_cmap("viridis")(number / (len(groups) - 1))
        axes.plot([], [], color=colour, linewidth=3, label=f"{hue} {value}" if hue else "all runs")
        for split, (_, style) in SPLITS.items():
            by_epoch = group.groupby("epoch")[f"{split}_{metric}"].agg(["mean", "min", "max"]).dropna()
            axes.plot(by_epoch.index, by_epoch["mean"], color=colour, **style)
            if split == "test":
                axes.vlines(by_epoch.index, by_epoch["min"], by_epoch["max"], color=colour)
            if split == "val":
                axes.fill_between(by_epoch.index, by_epoch["min"], by_epoch["max"], color=colour, alpha=0.15, linewidth=0)
    for split, (name, style) in SPLITS.items():
        if panel[f"{split}_{metric}"].notna().any():
            axes.plot([], [], color="grey", label=name, **style)
    axes.set_xlabel("epoch")
    axes.set_ylabel("accuracy" if metric == "accuracy" else "cross-entropy (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if metric == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def seeds(table: pd.DataFrame, settings: list[str]) -> int:
    """The largest number of runs that differ in nothing but their seed."""
    runs = table.drop_duplicates("run")
    return int(runs.groupby(settings).size().max()) if settings else len(runs)


def page(summary: pd.DataFrame, settings: list[str], title: str) -> str:
    """The summary as an HTML page: mean and spread over seeds where there are several, then every run."""
    tables = []
    if seeds(summary, settings) > 1:
        grouped = summary.groupby(settings) if settings else summary.groupby(lambda _: title)
        means = pd.DataFrame(
            {
                "seeds": grouped.size(),
                "accuracy": grouped["accuracy"].agg(lambda a: f"{a.mean():.2%} ± {a.std():.2%}"),
                "loss": grouped["loss"].agg(lambda a: f"{a.mean():.3f} ± {a.std():.3f}"),
                "images/s": grouped["images_per_second"].mean().map("{:,.0f}".format),
            }
        )
        tables += ["<h2>Mean and standard deviation over seeds</h2>", means.reset_index().to_html(index=False, border=0)]
    runs = pd.DataFrame(
        {
            **{axis: summary[axis] for axis in settings + [axis for axis in summary.columns if axis == "seed"]},
            "test images": summary["n"].map("{:,}".format),
            "views": summary["views"],
            "accuracy": summary["accuracy"].map("{:.2%}".format),
            "loss": summary["loss"].map("{:.3f}".format),
            "images/s": summary["images_per_second"].map("{:,.0f}".format),
            "seconds": summary["seconds"].map("{:,.0f}".format),
            "commit": summary["commit"].fillna("none").str[:10] + summary["dirty"].map({True: " + changes"}).fillna(""),
        }
    )
    tables += ["<h2>Every run</h2>", runs.to_html(index=False, border=0)]
    return PAGE.format(title=html.escape(title), tables="\n".join(tables))


if __name__ == "__main__":
    main()
