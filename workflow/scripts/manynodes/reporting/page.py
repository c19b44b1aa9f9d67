"""The report of an experiment: one HTML page that needs no other file and opens with the result."""

import base64
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from manynodes.experiment.config import COLUMNS, REPEATS, Experiment
from manynodes.reporting import intervals, scaling, speed_up
from manynodes.reporting.metrics import is_share, percent, share_form
from manynodes.reporting.mistakes import Mistake
from manynodes.reporting.numbers import CHANGES, OF_SETTING
from manynodes.reporting.results import VIEWS, counted, shortened
from manynodes.reporting.tables import value_words

# A cell of a table, with the share of the runs that have it.
NUMBER = re.compile(r"–|([-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?%?|-?inf|nan)( \(\d+ of \d+ runs\))?")
TEMPLATE = Path(__file__).with_name("page.html")
# Results in the first sentence of a page; a program may have hundreds.
MOST_NUMBERS = 4
MOST_RATIO = 1e5  # of a column's largest number to its smallest, with the same decimals in all rows
MOST_PLAIN = 1e15  # of numbers that are written with all digits before the point
MOST_CLASSES = 50  # of the table of classes
MOST_PAIRS = 10  # of confused classes
PLAIN = ("plain_accuracy", "plain_loss")
# What the page has of environment.json beside the packages, and its column.
ENVIRONMENT = {
    "kind": "environment",
    "interpreter": "interpreter",
    "python": "Python",
    "modules": "modules",
    "lock_sha256": "lock (SHA-256)",
    "image": "image (SHA-256)",
    "driver": "driver",
}
UNPACKED = "-unpacked/bin/"  # in the path of a staged interpreter, see data/unpacking.py
# Columns that do not differ between seeds, or only go with others.
NOT_AVERAGED = ("n", *PLAIN, "seconds")
# Of the classifier's columns; another program's have the names that it gives them.
TITLES = {
    "n": "test images (n)",
    "plain_accuracy": "accuracy, one view",
    "plain_loss": "loss, one view",
    "images_per_second": "images/s",
    "top5_accuracy": "accuracy, top 5",
    "roc_auc": "ROC AUC",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "average_precision": "average precision",
}


def report(
    experiment: Experiment,
    tables: Mapping[str, pd.DataFrame],
    results: Sequence[str],
    missing: pd.DataFrame | None,
    figures: Mapping[str, tuple[str, bytes]],
    mistakes: Sequence[Mistake] = (),
    warned: Sequence[str] = (),
    manifests: Sequence[Mapping[str, Any]] = (),
    undrawn: Sequence[str] = (),
    environments: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """The page as HTML.

    Args:
        tables: those of `numbers.tables`.
        results: columns of the summary with the results.
        missing: runs that are not in them, with `run`, `reason` and `log`; None if complete.
        figures: by name, the most important first: a sentence on what is drawn, and an SVG file.
        mistakes: of the most accurate run.
        warned: sentences such as of `in_train`; empty ones are left out.
        manifests: of the data sets.
        undrawn: names of figures that were left out.
        environments: environment.json of the runs that have one.
    """
    settings = [axis for axis in experiment.axes if axis not in REPEATS]
    summary = in_order(tables["summary"], list(experiment.axes))
    pictures = {name: picture(*figure) for name, figure in figures.items()}
    sections: dict[str, Any] = {}
    if "scaling" in tables:
        sections |= scaling_section(experiment, tables["scaling"], pictures)
    if "confusion" in tables:
        sections |= confusion_section(experiment, tables["confusion"], pictures, manifests)
    if environments:
        sections |= environment_section(environments)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        table=table,
        picture=picture,
        are_missing=are_missing,
        title=experiment.name,
        result=result_sentence(summary, settings, results, experiment.built_in),
        warned=[*filter(None, warned)],
        missing=missing,
        first=pictures.pop(next(iter(pictures), ""), ""),
        means=means(summary, settings, results, experiment.built_in),
        runs=every_run(summary, list(experiment.axes), results, experiment.built_in),
        others=list(pictures.values()),
        undrawn=shortened(undrawn),
        repeats=" and ".join(f"{axis}s" for axis in REPEATS if axis in experiment.axes) or "runs",
        mistakes=mistakes,
        configuration=[*configuration(experiment.settings), *map(images_row, manifests)],
        incidents=incident_rows(tables["incidents"]),
        provenance=provenance(summary),
        **sections,
    )


def in_order(summary: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    """The runs by their values of the axes, which other tables are grouped by."""
    if not axes:
        return summary
    place = summary.groupby(axes, dropna=False).ngroup()
    return summary.iloc[place.argsort(kind="stable")]


def scaling_section(
    experiment: Experiment, sizes: pd.DataFrame, pictures: dict[str, Markup]
) -> dict[str, Any]:
    """What the page says of the sizes; its figure is taken out of the others."""
    scales = scaling if experiment.built_in else speed_up
    return {
        "scaling": pictures.pop("scaling"),
        "advice": scales.advice(experiment, sizes),
        "sizes": scales.shown(experiment, sizes),
        "meaning": scaling.meaning(sizes) if experiment.built_in else "",
    }


def confusion_section(
    experiment: Experiment,
    confused: pd.DataFrame,
    pictures: dict[str, Markup],
    manifests: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What the page says of the classes; its figures are taken out of the others."""
    best = confused_run(confused, experiment)
    return {
        "confusion": pictures.pop("confusion"),
        "best": best,
        "chosen": is_chosen(confused, experiment),
        "worth": class_sentence(confused, manifests),
        "guess": guess_sentence(confused, best),
        "judged": [pictures.pop(each, "") for each in ("calibration", "ranking")],
        "classes": by_class(confused),
        "listed": listed_sentence(confused),
        "pairs": confusions(confused),
    }


def incident_rows(incidents: pd.DataFrame) -> pd.DataFrame:
    found = incidents[["run", "time", "text"]].rename(columns={"text": "what"})
    found["time"] = found["time"].str.removesuffix("+00:00").str.replace("T", " ") + " UTC"
    return found


def confused_run(table: pd.DataFrame, experiment: Experiment) -> str:
    """Of what the confusion matrix is."""
    run = str(table["run"].iloc[0])
    if len(experiment.runs) == 1:
        return "the run"
    if not is_chosen(table, experiment):
        return run
    return f"the most accurate {'run' if run in experiment.runs else 'setting'}, {run}"


def is_chosen(table: pd.DataFrame, experiment: Experiment) -> bool:
    """Whether the confusion matrix is of the best of several runs or, with folds, settings; not of
    all folds together.
    """
    run = str(table["run"].iloc[0])
    return len(experiment.runs) > 1 and (run in experiment.runs or OF_SETTING in run)


def result_sentence(
    summary: pd.DataFrame, settings: list[str], results: Sequence[str], built_in: bool
) -> str:
    """The result in one sentence: runs, images, and the range of the first numbers.

    Args:
        built_in: whether they are the classifier's.
    """
    groups = len(summary.groupby(settings)) if settings else 1
    runs = f"{counted(len(summary), 'run')} of {counted(groups, 'setting')}"
    if not built_in:
        shown = [between(summary, column) for column in results[:MOST_NUMBERS]]
        return f"{runs}: {', '.join(shown)}."
    least, most = summary["n"].min(), summary["n"].max()
    n = f"{least:,}{f' to {most:,}' if most > least else ''} test images"
    views = " or ".join(VIEWS.get(name, str(name)) for name in summary["views"].unique())
    plain = between(summary, "plain_accuracy").removeprefix("plain_accuracy ")
    more = "" if views == VIEWS["plain"] else f" ({plain} with one view)"
    return f"{runs}, {n}: {between(summary, 'accuracy')} with {views}{more}."


def in_train(manifest: Mapping[str, Any], split: str) -> str:
    """How many of the images that a run was tested on are known to be among those that it was
    trained on too; empty if none are.

    Args:
        split: of which it was tested on images; a fold is of the train split.
    """
    if split == "train" and (copies := manifest.get("copies")):
        return (
            f"Of the {manifest['images'][split]:,} images, {copies:,} "
            f"{'is a copy' if copies == 1 else 'are copies'} of others, which may be in another "
            "fold; accuracy on them says little about new images."
        )
    found = manifest.get("in_train", {}) if split == "test" else {}
    words = {"same": "in the train split too", "similar": "almost the same as one of train"}
    parts = [
        f"{number:,} {'is' if number == 1 else 'are'} {text}"
        for key, text in words.items()
        if (number := found.get(key))
    ]
    if not parts:
        return ""
    n = f"{manifest['images'][split]:,}"
    return (
        f"Of the {n} test images, {' and '.join(parts)}; accuracy on them says little about new "
        "images."
    )


def are_missing(runs: int) -> str:
    return f"{counted(runs, 'run')} {'is' if runs == 1 else 'are'} missing"


def not_finite(found: Mapping[str, Sequence[str]]) -> str:
    """Which runs ended without a finite number; empty if none did.

    Args:
        found: of `numbers.not_finite`.
    """
    words = [f"{run} ({shortened(keys)})" for run, keys in found.items()]
    said = f"Without a finite number, as of a training that diverged: {shortened(words)}."
    return said if found else ""


def between(summary: pd.DataFrame, column: str) -> str:
    """A number's name, its lowest and its highest value."""
    values, form = summary[column], form_of(summary, column)
    words = form.format(values.min()) if values.notna().any() else "none finite"
    if values.nunique() > 1:
        words += f" to {form.format(values.max())}"
    return f"{column} {words}{missing_words(values)}"


def missing_words(values: Any) -> str:
    """How many runs have the number at all; a training that diverged may have none."""
    count = int(values.notna().sum())
    return "" if count == len(values) else f" ({count} of {len(values)} runs)"


def form_of(summary: pd.DataFrame, column: str) -> str:
    """How a column's numbers are written."""
    values = summary[column].to_numpy(dtype=float)
    if is_share(column, values):
        return share_form(values)
    if pd.api.types.is_integer_dtype(summary[column]):
        return "{:,}"
    least, most = summary[column].abs().agg(["min", "max"])
    if 100 <= least <= most < MOST_PLAIN:
        # Five digits, as of smaller ones.
        return f"{{:,.{max(0, 4 - int(math.log10(least)))}f}}"
    texts = [f"{value:.5g}" for value in summary[column].dropna()]
    # Of a training that diverged, a number may have 30 digits.
    if not most < MOST_RATIO * least or any("e" in text for text in texts):
        return "{:.5g}"
    # As many decimals in every row.
    return f"{{:,.{max(len(text.partition('.')[2]) for text in texts)}f}}"


def means(
    summary: pd.DataFrame, settings: list[str], results: Sequence[str], built_in: bool
) -> pd.DataFrame | None:
    """One row per setting: number of runs, means, and the 95 % interval of each (Student's t); None
    if no two runs differ in their seed or fold only.

    The seeds of a fold share its images: they are averaged first, and the folds count.
    """
    left_out = NOT_AVERAGED if built_in else ("seconds",)
    by: Any = settings or (lambda _: "all runs")
    runs = summary.groupby(by)
    kinds = runs["computed_in"] if "computed_in" in summary else None
    if {*REPEATS} <= {*summary}:
        averaged = [column for column in results if column not in left_out]
        each_fold = summary.groupby([*settings, "fold"], as_index=False)
        summary = each_fold[averaged].mean()
    grouped: Any = summary.groupby(by)
    if grouped.size().max() < 2:
        return None
    what = "folds (n)" if "fold" in summary else "runs (n)"
    found = pd.DataFrame({what: grouped.size()})
    for column in results:
        if column in left_out:
            continue
        of_column = grouped[column].mean()
        form = form_of(of_column.to_frame(), column)
        title = title_of(column, built_in)
        words = of_column.map(form.format) + runs[column].agg(missing_words)
        found[title] = words.where(of_column.notna(), "–")
        half = grouped[column].agg(half_width)
        if half.notna().any():
            # Also of means without decimals; half a point of 91.2 is no share, whatever its name.
            spread = form if "%" in form else form_of(half.to_frame(""), "")
            found[f"± {title} (95%)"] = half.map(spread.format).where(half.notna(), "–")
    # Of `precision: auto` on nodes of several kinds.
    if kinds is not None and kinds.nunique().max() > 1:
        found["computed in"] = kinds.agg(lambda names: ", ".join(sorted({*names})))
    return found.reset_index() if settings else found


def title_of(column: str, built_in: bool) -> str:
    name, bracket, of = column.partition(" (")
    return TITLES.get(name, name) + bracket + of if built_in else column


def half_width(values: pd.Series) -> float:
    """Of the interval of the mean; NaN for fewer than two numbers."""
    known = values.dropna()
    return intervals.half_width(known.std(), len(known)) if len(known) > 1 else math.nan


def every_run(
    summary: pd.DataFrame, axes: list[str], results: Sequence[str], built_in: bool
) -> pd.DataFrame:
    """One row per run; its name if the axes do not tell."""
    found = summary[axes or ["run"]].copy()
    # With one view only they are the same numbers again.
    again = PLAIN if built_in and set(summary["views"]) == {"plain"} else ()
    for column in [each for each in (*results, "attempts") if each not in again]:
        values, form = summary[column], form_of(summary, column)
        found[title_of(column, built_in)] = values.map(form.format).where(values.notna(), "–")
    return found


def per_class(confused: pd.DataFrame) -> pd.DataFrame:
    """By class and its name: images, predictions and how many of them agree, recall, precision and
    F1; NaN where there is nothing to divide by.
    """
    right = confused["images"].where(confused["true_class"] == confused["predicted_class"], 0)
    of = confused.assign(right=right)
    true = of.groupby(["true_class", "true_name"])[["images", "right"]].sum()
    predicted = of.groupby(["predicted_class", "predicted_name"])["images"].sum()
    found = true.assign(predicted=predicted.to_numpy())
    return found.assign(
        recall=found["right"] / found["images"],
        precision=found["right"] / found["predicted"],
        F1=2 * found["right"] / (found["images"] + found["predicted"]),
    )


def class_sentence(confused: pd.DataFrame, manifests: Sequence[Mapping[str, Any]] = ()) -> str:
    """What the accuracy is worth: its interval (Wilson's) for so many images, what it would be if
    every image were of the largest class, and the means over the classes.

    Args:
        manifests: of the data sets.
    """
    found = per_class(confused)
    n, right = int(found["images"].sum()), int(found["right"].sum())
    if not n:
        return "There is no image."
    low, high = intervals.of_share(right, n)
    largest = str(found.reset_index().loc[int(found["images"].argmax()), "true_name"])
    grouped = any(manifest["settings"].get("groups") for manifest in manifests)
    tested = int((found["images"] > 0).sum())
    few = f"{tested} of {len(found)} classes have test images. " * (tested < len(found))
    narrow = ", if they were independent; images of a group are alike, so it is wider" * grouped
    return (
        f"Accuracy {percent(right / n)}; of {n:,} images, the 95% interval is {percent(low)} to "
        f"{percent(high)}{narrow}. "
        f"{percent(found['images'].max() / n)} of them are of the largest class, {largest}. "
        f"{few}Balanced accuracy {percent(found['recall'].mean())}, "
        f"macro F1 {percent(found['F1'].mean())}."
    )


def guess_sentence(confused: pd.DataFrame, best: str) -> str:
    """That the accuracy is not clearly above what calling every image the largest class reaches:
    its interval (Wilson's) does not begin above that share. Empty if it does.

    Args:
        best: of what the confusion matrix is.
    """
    found = per_class(confused).reset_index()
    n, right = int(found["images"].sum()), int(found["right"].sum())
    most = int(found["images"].argmax())
    if not n or intervals.of_share(right, n)[0] > found["images"][most] / n:
        return ""
    return (
        f"The accuracy of {best}, {percent(right / n)}, is not clearly above "
        f"{percent(found['images'][most] / n)}, which calling every image "
        f"{found['true_name'][most]} would reach."
    )


def confusions(confused: pd.DataFrame) -> pd.DataFrame:
    """The pairs of classes that are confused most often."""
    total = confused.groupby("true_class")["images"].transform("sum")
    wrong = confused[
        (confused["true_class"] != confused["predicted_class"]) & (confused["images"] > 0)
    ]
    most = wrong.sort_values("images", ascending=False, kind="stable")[:MOST_PAIRS]
    shares = most["images"] / total[most.index]
    return pd.DataFrame(
        {
            "is": most["true_name"],
            "taken for": most["predicted_name"],
            "images (n)": most["images"].map("{:,}".format),
            "of its class": shares.map(share_form(shares, 1).format),
        }
    )


def by_class(confused: pd.DataFrame) -> pd.DataFrame:
    """Images, recall, precision and F1 of each class, the one with the lowest recall first."""
    worst = per_class(confused).sort_values("recall", kind="stable")[:MOST_CLASSES]
    shares = worst[["recall", "precision", "F1"]]
    shown = shares.apply(lambda column: column.map(share_form(column).format))
    shown = shown.where(shares.notna(), "–")
    shown.insert(0, "class", [name for _, name in worst.index])
    shown.insert(1, "images (n)", worst["images"].map("{:,}".format))
    return shown


def listed_sentence(confused: pd.DataFrame) -> str:
    """Which classes the table has, if it has not all of them."""
    classes = confused["true_class"].nunique()
    if classes <= MOST_CLASSES:
        return ""
    return f"The {MOST_CLASSES} of {classes:,} classes with the lowest recall:"


def provenance(summary: pd.DataFrame) -> pd.DataFrame:
    """From which code and data each run came, and in how many attempts: jobs or processes that
    trained it, one after the other, because something ended the one before.
    """
    columns = {
        "run": summary["run"],
        "commit": [
            "none"
            if pd.isna(commit)
            else f"{commit[:10]}{CHANGES[None if pd.isna(dirty) else dirty]}"
            for commit, dirty in zip(summary["commit"], summary["dirty"], strict=True)
        ],
    }
    if "program_commit" in summary:
        columns["program's commit"] = summary["program_commit"]
    if "computed_in" in summary:
        columns["computed in"] = summary["computed_in"]
    columns["versions"] = summary["versions"]
    # A program may have numbers of such names.
    for column in [each for each in COLUMNS if each.endswith("_sha256") and each in summary]:
        if summary[column].notna().any():
            columns[f"{column.removesuffix('_sha256')} (SHA-256)"] = summary[column].str[:10]
    return pd.DataFrame(columns | {"attempts": summary["attempts"]}).fillna("–")


def environment_section(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Where the program ran: a row for each environment, and each list of packages once.

    Args:
        found: environment.json of each run.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    installed: dict[str, list[str]] = {}
    for run, each in found.items():
        words = {key: value_words(each[key]) for key in ENVIRONMENT if each.get(key)}
        words |= {key: words[key][:10] for key in ("lock_sha256", "image") if key in words}
        if "kind" in each:
            words.setdefault("kind", "the workflow's own")
        if UNPACKED in words.get("interpreter", ""):
            # On a job's scratch, which is another one for each run.
            words["interpreter"] = "a staged copy"
        rows.setdefault(tuple(words.get(key, "–") for key in ENVIRONMENT), []).append(run)
        installed.setdefault(json.dumps(each.get("distributions", {})), []).append(run)
    shown = pd.DataFrame(list(rows), columns=list(ENVIRONMENT.values()))
    shown = shown.loc[:, (shown != "–").any()]
    if len(rows) > 1:
        shown.insert(0, "runs", [shortened(runs) for runs in rows.values()])
    lists = [
        (
            f" of {shortened(runs)}" * (len(installed) > 1),
            pd.DataFrame(json.loads(text).items(), columns=["package", "version"]),
        )
        for text, runs in installed.items()
    ]
    return {"environments": shown, "installed": lists} if len(shown.columns) else {}


def images_row(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """What a data set's images are, and how they were made from the user's files."""
    counts = " and ".join(f"{number:,} {split}" for split, number in manifest["images"].items())
    shape = " x ".join(map(str, manifest["image_shape"]))
    how = [
        f"{key} {' x '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in manifest["settings"].items()
        if value is not None and not key.endswith("sha256")
    ]
    if skipped := len(manifest["skipped"]):
        how.append(f"{skipped:,} unreadable ones left out")
    text = f"{counts} images of {shape}, {manifest['dtype']}"
    return f"images of {manifest['dataset']}", "; ".join([text, ", ".join(how)] if how else [text])


def configuration(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for key, given in config.items():
        if key != "experiment" and given not in (None, [], {}):
            rows = given if key == "parameters" else {key: given}
            if key == "runs":
                names = dict.fromkeys(name for point in given for name in point)
                rows = {key: f"{counted(len(given), 'point')} of {', '.join(names)}"}
            elif key == "dataset":
                rows = {key: given["name"]}
            found += [(name, value_words(value)) for name, value in rows.items()]
    return found


def table(frame: pd.DataFrame) -> Markup:
    """A table whose numbers stand to the right, and are never broken."""
    columns = []
    for name in frame:
        cells = [value_words(value) for value in frame[name]]
        kind = ' class="n"' if all(map(NUMBER.fullmatch, cells)) else ""
        head = f'<th scope="col"{kind}>{html.escape(str(name), quote=False)}</th>'
        rows = [f"<td{kind}>{html.escape(cell, quote=False)}</td>" for cell in cells]
        columns.append([head, *rows])
    lines = "\n".join(f"<tr>{''.join(row)}</tr>" for row in zip(*columns, strict=True))
    return Markup(f'<div class="wide"><table>{lines}</table></div>')


def picture(drawn: str, content: bytes, form: str = "svg+xml") -> Markup:
    """An image of the page.

    Args:
        drawn: a sentence for who cannot see it.
    """
    source = f"data:image/{form};base64,{base64.b64encode(content).decode()}"
    return Markup(f'<img alt="{escape(drawn)}" src="{source}">')
