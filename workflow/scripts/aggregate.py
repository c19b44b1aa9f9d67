"""Make the tables, the figures and the page of an experiment from the files of its runs.

summary.csv has one row per run, curves.csv one per run and count of its metrics, and incidents.csv
what interrupted or slowed the runs. confusion.csv is the confusion matrix of the most accurate run,
if there is one, of which the page shows the surest mistakes; scaling.csv has one row per size, if
the runs vary in it. figures/ has one figure per number, report.html shows everything, and
SHA256SUMS says of which bytes all of these are made.
"""

import argparse
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from manynodes.base import atomic
from manynodes.base.errors import Refusal, error_line, one_line, reason, told_in_one_line
from manynodes.base.reading import MOST, read_bytes
from manynodes.data.folder import MANIFEST, DataFolder
from manynodes.experiment.config import REPEATS, Experiment
from manynodes.reporting import (
    mistakes,
    numbers,
    page,
    predictions,
    result_figures,
    scaling,
    scaling_figure,
    speed_up,
    sums,
)
from manynodes.reporting.figures import STYLE
from manynodes.reporting.metrics import telling_first
from manynodes.reporting.mistakes import Mistake
from manynodes.reporting.numbers import Numbers
from manynodes.reporting.predictions import Predictions
from manynodes.reporting.tables import refuse_mixture, write_table

# Sentences of advice that are printed.
MOST_SHOWN = 20
# Runs from which on keys that vary together are drawn as a search.
FEWEST = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", required=True, metavar="JSON", help="the configuration, or @FILE with it")
    add("--sha256", help="of that file, which another command may write")
    add("--results", type=Path, required=True, help="folder of the experiment's results")
    add("--data", type=Path, metavar="FOLDER",
        help="folder of the data sets; with it the page has pictures of mistakes")  # fmt: skip
    add("--images", type=Path, metavar="FOLDER",
        help="folder of the user's images; with it the names of mistakes are links")  # fmt: skip
    add("--missing", type=Path, metavar="FILE", help="table of runs to leave out: they failed")
    add("--output", type=Path, required=True, metavar="FOLDER", help="for tables and figures")
    args = parser.parse_args()
    with told_in_one_line("aggregate"):
        aggregate(args)


def aggregate(args: argparse.Namespace) -> None:
    """Make everything.

    Raises:
        Refusal: a file of a run is missing, damaged, or of another run, or the runs are of
            different code or data.
    """
    experiment = configured(args.config, args.sha256)
    missing = None
    if args.missing:
        missing = pd.read_csv(args.missing, dtype=str, keep_default_na=False)
    left_out = set(missing["run"]) if missing is not None else set()
    whole = [name for name in experiment.runs if name not in left_out]
    runs = numbers.read(experiment, whole, args.results)
    refuse_mixture({name: run.about for name, run in runs.items()})
    tables = numbers.tables(experiment, runs)
    results = numbers.results_of(tables["summary"], experiment.axes)
    if not experiment.built_in:  # a program may write them in any order
        results = telling_first(results)
    partial = "" if missing is None else f" (partial: {page.are_missing(len(missing))})"
    figures, undrawn = figures_of(experiment, runs, tables, results, experiment.name + partial)
    data = data_of(experiment, args.data) if args.data and experiment.built_in else {}

    worst, seen = list[Mistake](), ""
    if "confusion" in tables and experiment.built_in:
        drawn, worst, seen = judged(experiment, runs, tables["confusion"], data, args)
        figures |= drawn
    if "scaling" in tables:
        scales = scaling if experiment.built_in else speed_up
        for sentence in scales.advice(experiment, tables["scaling"])[:MOST_SHOWN]:
            print(f"scaling: {sentence}")
    made = []
    for name, table in tables.items():
        made.append(args.output / f"{name}.csv")
        write_table(table, made[-1])
    written = write_figures(figures, args.output / "figures")
    pictures = {
        name: (str(figure.get_label()), (args.output / f"figures/{name}.svg").read_bytes())
        for name, figure in figures.items()
    }
    made += [*written, args.output / "report.html"]
    manifests = [each.manifest for each in data.values()]
    warned = [page.not_finite(numbers.not_finite(runs)), seen]
    where = {name: run.environment for name, run in runs.items() if run.environment}
    text = page.report(
        experiment, tables, results, missing, pictures, worst, warned, manifests, undrawn, where
    )
    atomic.write_text(made[-1], text)
    for name in {*numbers.TABLES} - {*tables}:
        # Of an earlier report, with other numbers.
        (args.output / f"{name}.csv").unlink(missing_ok=True)
    sources = {
        args.results / name / file: sha256
        for name, run in runs.items()
        for file, sha256 in run.sums.items()
    }
    sums.write(args.output, made, sources)


def judged(
    experiment: Experiment,
    runs: Mapping[str, Numbers],
    confused: pd.DataFrame,
    data: Mapping[str, DataFolder],
    args: argparse.Namespace,
) -> tuple[dict[str, Figure], list[Mistake], str]:
    """What the predictions of the most accurate run show: figures, its surest mistakes, and a
    sentence on test images that are in the training too.

    Args:
        confused: the confusion matrix of that run, as a table.
        data: the data sets that are still there, by name.
    """
    best = str(confused["run"].iloc[0])
    names = numbers.judged_together(experiment, list(runs))[best]
    predicted = predictions.pooled([predictions.read(args.results / name) for name in names])
    if predicted is None:
        return {}, [], ""

    def address(file: str) -> str:
        return mistakes.address_of(file, args.images, args.output) if args.images else ""

    worst, seen = list[Mistake](), ""
    if (found := data.get(str(experiment.runs[names[0]].dataset))) is not None:
        # No number depends on the pictures.
        with told_if_unusable():
            split, tested = images_of(predicted, found)
            worst = mistakes.surest(predicted.table, tested, address)
            seen = page.in_train(found.manifest, split)
    return result_figures.draw_predictions(best, predicted), worst, seen


def configured(given: str, sha256: str | None) -> Experiment:
    """The experiment of a JSON object, or of a file with one: with more than a thousand runs it is
    too long for an argument.

    Args:
        given: JSON, or `@FILE`.
        sha256: of the file; None for any.

    Raises:
        Refusal: the file cannot be read, is another one, or it is no configuration.
    """
    if not given.startswith("@"):
        return Experiment.from_json(given)
    file = Path(given[1:])
    try:
        text = read_bytes(file, MOST).decode()
    except (OSError, ValueError) as error:
        raise Refusal(
            f"--config: {file} cannot be read ({reason(error)}); run snakemake again, which "
            "writes it"
        ) from None
    if sha256 not in (None, hashlib.sha256(text.encode()).hexdigest()):
        raise Refusal(
            f"{file} is of another command, which runs this experiment with other settings now; "
            "run the same command again when that one has ended"
        )
    return Experiment.from_json(text, str(file))


def figures_of(
    experiment: Experiment,
    runs: Mapping[str, Numbers],
    tables: Mapping[str, pd.DataFrame],
    results: Sequence[str],
    title: str,
) -> tuple[dict[str, Figure], list[str]]:
    """The figures of the tables, by name, the most important first; and the names of those for
    which there are too many.
    """
    pairs = experiment.config["runs"]
    varied = set().union(*pairs) - {*REPEATS}
    together = [key for key in experiment.axes if key in varied]
    found, left_out = result_figures.draw(
        result_figures.FigureData(
            curves=numbers.drawn(experiment, tables["curves"], runs),
            summary=tables["summary"],
            axes=list(experiment.axes),
            numeric=experiment.numeric_axes,
            results=results,
            title=title,
            built_in=experiment.built_in,
            counts={
                name: str(run.rows.columns[0])
                for name, run in runs.items()
                if len(run.rows.columns)
            },
            searched=together if len(pairs) >= FEWEST and len(together) > 1 else (),
        )
    )
    if "confusion" in tables:
        best = page.confused_run(tables["confusion"], experiment)
        found["confusion"] = result_figures.draw_confusion(tables["confusion"], best)
    if "scaling" in tables and experiment.built_in:
        summary = tables["summary"]
        images = dict(zip(map(str, summary["run"]), map(int, summary["n"]), strict=True))
        found["scaling"] = scaling_figure.draw(experiment, tables["scaling"], images, title)
    elif "scaling" in tables:
        found["scaling"] = scaling_figure.draw_programs(experiment, tables["scaling"], title)
    return found, left_out


@mpl.rc_context(STYLE)
def write_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write each as SVG and as PDF, and remove those of an earlier report, which had more."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    # Readers of an SVG have fonts for other scripts.
    warnings.filterwarnings("ignore", "Glyph .* missing from font")
    for name, figure in figures.items():
        for form, dated in (("svg", "Date"), ("pdf", "CreationDate")):
            made.append(folder / f"{name}.{form}")
            with atomic.replacing(made[-1]) as temporary:
                figure.savefig(temporary, format=form, metadata={dated: None})
            # The second form has the layout of the first: each layout draws everything once more.
            figure.set_layout_engine("none")
    for path in {*folder.glob("*.svg"), *folder.glob("*.pdf")} - set(made):
        path.unlink(missing_ok=True)
    return made


def data_of(experiment: Experiment, folder: Path) -> dict[str, DataFolder]:
    """The data sets of an experiment that are still there."""
    found = {}
    for name in experiment.datasets:
        with told_if_unusable():
            if (folder / name / MANIFEST).exists():
                found[name] = DataFolder.read(folder / name)
            else:
                print(f"aggregate: {folder / name} is not there: the page has no pictures of its "
                      "images")  # fmt: skip
    return found


@contextmanager
def told_if_unusable() -> Iterator[None]:
    """Print why data cannot be used, and go on without them."""
    try:
        yield
    except (Refusal, OSError) as error:
        print(one_line(f"aggregate: without pictures: {error_line(error)}"))


def images_of(predicted: Predictions, data: DataFolder) -> tuple[str, np.ndarray]:
    """The split that the rows of predictions are of, and its images (n, h, w, c).

    Raises:
        Refusal: the data set has no such images.
    """
    for split in ("test", "train"):
        if data.manifest["content_sha256"][f"{split}_images"] == predicted.images_sha256:
            return split, data.array(f"{split}_images")
    raise Refusal(
        f"{data.path} has other images than the runs were evaluated on; fetch the earlier ones, or "
        "train again with --config replace=true"
    )


if __name__ == "__main__":
    main()
