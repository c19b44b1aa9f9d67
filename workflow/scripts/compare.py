"""Tables, figures and page of an experiment with a user's program.

summary.csv has one row per run, with the numbers of result.json and evaluation.json; curves.csv
one per run and row of metrics.csv; incidents.csv what interrupted the runs. figures/ has one figure
per number.
"""

import argparse
import shutil
from collections.abc import Collection, Container, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddp.base import atomic
from ddp.base.errors import Refusal, told_in_one_line
from ddp.experiment.config import parse_option
from ddp.experiment.programs import COLUMNS, ProgramExperiment, read_experiment
from ddp.reporting import page, sums
from ddp.reporting.figures import STYLE, colour_of
from ddp.reporting.measures import Measured, read_measured
from ddp.reporting.results import read_missing
from ddp.reporting.tables import incident_table, refuse_mixture, write_table

# Figures of an experiment; a program may write hundreds of columns.
MOST_FIGURES = 24
AGAIN = "run the same command again"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", required=True, metavar="JSON", help="the configuration")
    add("--results", type=Path, required=True, help="folder of the experiment's results")
    add("--missing", type=Path, metavar="FILE", help="table of runs to leave out: they failed")
    add("--output", type=Path, required=True, metavar="FOLDER", help="for tables and figures")
    args = parser.parse_args()
    with told_in_one_line("compare"):
        experiment = read_experiment(parse_option("--config", args.config), own=True)
        assert isinstance(experiment, ProgramExperiment)
        missing = read_missing(args.missing) if args.missing else None
        left_out = set(missing["run"]) if missing is not None else set()
        names = [name for name in experiment.runs if name not in left_out]
        measured = {name: read_run(experiment, name, args.results / name) for name in names}
        refuse_mixture({name: each.about for name, each in measured.items()})
        summary = pd.DataFrame([row_of(experiment, *each) for each in measured.items()])
        curve: pd.DataFrame = pd.concat(
            [curves_of(experiment, *each) for each in measured.items()], ignore_index=True
        )
        incident: pd.DataFrame = pd.concat(
            [incident_table(name, each.about) for name, each in measured.items()],
            ignore_index=True,
        )
        settings = [axis for axis in experiment.axes if axis != "seed"]
        figures = draw(experiment, summary, curve, settings)
        made = []
        for name, table in (("summary", summary), ("curves", curve), ("incidents", incident)):
            made.append(args.output / f"{name}.csv")
            write_table(table, made[-1])
        folder = args.output / "figures"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, figure in figures.items():
            made.append(folder / f"{name}.svg")
            with mpl.rc_context(STYLE):
                figure.savefig(made[-1], format="svg", metadata={"Date": None})
        images = {name: (folder / f"{name}.svg").read_bytes() for name in figures}
        text = page.of_program(experiment, summary, numbers_of(summary, experiment), settings,
                               missing, images, incident)  # fmt: skip
        made.append(args.output / "report.html")
        atomic.write_text(made[-1], text)
        sources = {
            args.results / name / file: sha256
            for name, each in measured.items()
            for file, sha256 in each.sums.items()
        }
        sums.write(args.output, made, sources)


def read_run(experiment: ProgramExperiment, name: str, folder: Path) -> Measured:
    """The numbers of a run.

    Raises:
        Refusal: a file of the run is missing, damaged, or of another run.
    """
    try:
        return read_measured(folder, experiment.runs[name], bool(experiment.evaluation))
    except FileNotFoundError as error:
        raise Refusal(f"{error.filename} is not there; {AGAIN}") from None


def row_of(experiment: ProgramExperiment, name: str, measured: Measured) -> dict[str, Any]:
    """A run's row of the summary."""
    about = measured.about
    row = dict(experiment.axis_values(name))
    for origin, numbers in (("result", measured.result), ("evaluated", measured.evaluation)):
        for key, value in numbers.items():
            row[unused(key, origin, [*row, *COLUMNS])] = value
    return row | {
        "seconds": about["seconds"],
        "attempts": len(about["attempts"]),
        "commit": about["git"]["commit"],
        "dirty": about["git"]["dirty"],
        "sources_sha256": about["sources_sha256"],
        "data_sha256": about["data_sha256"],
        "files_sha256": about["files_sha256"],
        "run_sha256": measured.sums["run.json"],
        "evaluation_sha256": measured.sums.get("evaluation.json"),
    }


def curves_of(experiment: ProgramExperiment, name: str, measured: Measured) -> pd.DataFrame:
    """A run's rows of the curves."""
    axes = experiment.axis_values(name)
    curves = pd.DataFrame(measured.metrics)
    for position, (key, value) in enumerate(axes.items()):
        if key in curves.columns:
            own = unused(key, "measured", [*axes, *curves.columns])
            curves = curves.rename(columns={key: own})
        curves.insert(position, key, value)
    return curves


def unused(name: str, origin: str, taken: Collection[str]) -> str:
    """The name of a column of the user's; if it is taken, with where the numbers come from."""
    while name in taken:
        name = f"{name} ({origin})"
    return name


def numbers_of(summary: pd.DataFrame, experiment: ProgramExperiment) -> list[str]:
    """The columns of the summary that are results."""
    return [
        column
        for column in summary.columns
        if column not in ("run", *experiment.axes, *COLUMNS) or column == "seconds"
    ]


def draw(
    experiment: ProgramExperiment, summary: pd.DataFrame, curves: pd.DataFrame, settings: list[str]
) -> dict[str, Figure]:
    """A figure of each measured column by its count, and of each result by each numeric axis."""
    figures: dict[str, Figure] = {}
    for count, some in by_count(experiment, curves):
        for column in some.columns:
            if column not in ("run", count, *experiment.axes) and some[column].notna().any():
                name = file_name(column, figures)
                figures[name] = draw_curves(experiment, some, count, column, settings)
    for axis in experiment.numeric_axes:
        for column in numbers_of(summary, experiment):
            if not summary[column].notna().any():
                continue
            name = file_name(f"{column}_by_{axis}", figures)
            figures[name] = draw_axis(experiment, summary, axis, column, settings)
    return dict(list(figures.items())[:MOST_FIGURES])


def by_count(
    experiment: ProgramExperiment, curves: pd.DataFrame
) -> Iterator[tuple[str, pd.DataFrame]]:
    """The curves of the runs with the same first column, for each such column."""
    groups: dict[str, list[pd.DataFrame]] = {}
    for _, run in curves.groupby("run", sort=False):
        columns = [
            column
            for column in run.columns
            if column not in ("run", *experiment.axes) and run[column].notna().any()
        ]
        if columns:
            groups.setdefault(columns[0], []).append(run)
    for count, runs in groups.items():
        yield count, pd.concat(runs)


def file_name(column: str, taken: Container[str]) -> str:
    """A name of a file for a column."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in column)[:100]
    number = 2
    while (unique := name if number == 2 else f"{name}-{number - 1}") in taken:
        number += 1
    return unique


def draw_curves(
    experiment: ProgramExperiment,
    curves: pd.DataFrame,
    count: str,
    column: str,
    settings: list[str],
) -> Figure:
    """A line per setting, the mean over seeds, with a band from the lowest to the highest."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
        groups = list(curves.groupby(settings)) if settings else [((), curves)]
        for number, (values, group) in enumerate(groups):
            by_count = group.groupby(count)[column].agg(["mean", "min", "max"]).dropna()
            colour = colour_of(number, len(groups))
            axes.plot(by_count.index, by_count["mean"], color=colour,
                      marker="o" if len(by_count) < 3 else None,
                      label=label(settings, values))  # fmt: skip
            axes.fill_between(by_count.index, by_count["min"], by_count["max"], color=colour,
                              alpha=0.15, linewidth=0)  # fmt: skip
        if (curves[count] % 1 == 0).all():
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return finish(figure, axes, experiment, count, column, len(groups))


def draw_axis(
    experiment: ProgramExperiment,
    summary: pd.DataFrame,
    axis: str,
    column: str,
    settings: list[str],
) -> Figure:
    """A result against a numeric axis, a line per combination of the others."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
        others = [name for name in settings if name != axis]
        groups = list(summary.groupby(others)) if others else [((), summary)]
        for number, (values, group) in enumerate(groups):
            by_value = group.groupby(axis)[column].agg(["mean", "min", "max"]).dropna()
            colour = colour_of(number, len(groups))
            axes.plot(by_value.index, by_value["mean"], color=colour, marker="o",
                      label=label(others, values))  # fmt: skip
            axes.vlines(by_value.index, by_value["min"], by_value["max"], color=colour)
        return finish(figure, axes, experiment, axis, column, len(groups))


def label(names: list[str], values: tuple[Any, ...]) -> str:
    pairs = zip(names, values, strict=True)
    return "  ".join(f"{name} {value}" for name, value in pairs).replace("$", r"\$") or "all runs"


def finish(
    figure: Figure, axes: Any, experiment: ProgramExperiment, x: str, y: str, groups: int
) -> Figure:
    # Between two dollar signs matplotlib reads a formula.
    axes.set_xlabel(x.replace("$", r"\$"))
    axes.set_ylabel(y.replace("$", r"\$"))
    figure.suptitle(f"{experiment.name}: {y} by {x}".replace("$", r"\$"), x=0.02, ha="left",
                    fontweight="bold")  # fmt: skip
    if 1 < groups <= 24:
        figure.legend(loc="outside right center")
    return figure


if __name__ == "__main__":
    main()
