"""The report of an experiment: one HTML page that needs no other file and opens with the result."""

import base64
import html
from collections.abc import Mapping
from typing import Any

import pandas as pd

from ddp.experiment.config import SITE, Common, Experiment
from ddp.reporting import scaling
from ddp.reporting.results import VIEWS
from ddp.reporting.scaling import counted

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; color: #222 }}
  body {{ margin: 2rem auto; max-width: 68rem; padding: 0 1rem }}
  h1 {{ margin-bottom: .2rem }}
  h2 {{ margin: 2.2rem 0 .6rem }}
  .result {{ font-size: 1.15rem; margin: 0 0 1.2rem }}
  .partial {{ background: #fff3cd; border-left: 4px solid #d39e00; padding: .6rem 1rem }}
  .wide {{ overflow-x: auto }}
  img {{ max-width: 100%; height: auto }}
  table {{ border-collapse: collapse }}
  th, td {{ padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right }}
  td {{ font-variant-numeric: tabular-nums }}
  th {{ border-bottom: 2px solid #222 }}
  th:first-child, td:first-child {{ text-align: left }}
  .config td, .words td, .words th {{ text-align: left }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""
# Results in the first sentence of a page; a program may have hundreds.
MOST_NUMBERS = 4
# Columns of summary.csv to average over seeds, with their titles and formats.
MEANS = {
    "accuracy": ("accuracy", "{:.2%}"),
    "plain_accuracy": ("accuracy, one view", "{:.2%}"),
    "loss": ("loss", "{:.4f}"),
}


def report(
    experiment: Experiment,
    tables: Mapping[str, pd.DataFrame],
    missing: pd.DataFrame | None,
    figures: Mapping[str, bytes],
) -> str:
    """The page as HTML.

    Args:
        tables: the tables that aggregate.py makes, by name.
        missing: runs that are not in them, with `run`, `reason` and `log`; None if complete.
        figures: SVG files by name.
    """
    summary, sizes = tables["summary"], tables.get("scaling")
    settings = [axis for axis in experiment.axes if axis != "seed"]
    pictures = {name: picture(name, content) for name, content in figures.items()}
    best = str(summary["run"].iloc[int(summary["accuracy"].argmax())])
    parts = [
        f'<p class="result">{html.escape(result_sentence(summary, settings))}</p>',
        warning(missing) if missing is not None else "",
        pictures["accuracy"],
        "<h2>Mean over seeds</h2>",
        table(means(summary, settings)),
        "<h2>Every run</h2>",
        table(every_run(summary, settings)),
        scaling_part(experiment, sizes, pictures["scaling"]) if sizes is not None else "",
        f"<h2>Accuracy by setting</h2>{pictures['accuracy_by_axis']}"
        if "accuracy_by_axis" in pictures
        else "",
        "<h2>Loss</h2>",
        pictures["loss"],
        f"<h2>Confusion matrix of the most accurate run, {html.escape(best)}</h2>",
        pictures["confusion"],
        "<h2>Configuration</h2>",
        configuration(experiment.settings),
        incident_part(tables["incidents"]),
        "<h2>Provenance</h2>",
        table(provenance(summary)),
    ]
    return PAGE.format(
        title=html.escape(experiment.name), body="\n".join(part for part in parts if part)
    )


def of_program(
    experiment: Common,
    summary: pd.DataFrame,
    numbers: list[str],
    settings: list[str],
    missing: pd.DataFrame | None,
    figures: Mapping[str, bytes],
    incidents: pd.DataFrame,
) -> str:
    """The page of an experiment with a program of the user's.

    Args:
        summary: one row per run.
        numbers: its columns with results.
        settings: the axes except the seed.
        missing, figures: as in `report`.
        incidents: incidents.csv.
    """
    groups = len(summary.groupby(settings)) if settings else 1
    ranges = [
        f"{column} {summary[column].min():.6g}"
        + (f" to {summary[column].max():.6g}" if summary[column].nunique() > 1 else "")
        + missing_words(summary[column])
        for column in numbers[:MOST_NUMBERS]
    ]
    result = f"{counted(len(summary), 'run')} of {counted(groups, 'setting')}: {', '.join(ranges)}."
    axes = [column for column in summary.columns if column in ("run", *experiment.axes)]
    grouped: Any = summary.groupby(settings) if settings else summary.groupby(lambda _: "all runs")
    averaged = pd.DataFrame({"runs (n)": grouped.size()})
    for column in numbers:
        averaged[column] = grouped[column].agg(
            lambda values: f"{values.mean():.6g}{missing_words(values)}"
        )
        spread = grouped[column].std()
        if spread.notna().any():
            averaged[f"± {column}"] = spread.map("{:.2g}".format).where(spread.notna(), "–")
    parts = [
        f'<p class="result">{html.escape(result)}</p>',
        warning(missing) if missing is not None else "",
        "<h2>Mean over seeds</h2>",
        table(averaged.reset_index() if settings else averaged),
        "<h2>Every run</h2>",
        table(summary[[*axes, *numbers, "attempts"]]),
        "<h2>Figures</h2>" if figures else "",
        *(picture(name, content) for name, content in figures.items()),
        "<h2>Configuration</h2>",
        configuration(experiment.settings),
        incident_part(incidents),
    ]
    return PAGE.format(
        title=html.escape(experiment.name), body="\n".join(part for part in parts if part)
    )


def missing_words(values: Any) -> str:
    """How many runs have the number at all; a training that diverged may have none."""
    count = int(values.notna().sum())
    return "" if count == len(values) else f" ({count} of {len(values)} runs)"


def result_sentence(summary: pd.DataFrame, settings: list[str]) -> str:
    """The result in one sentence: runs, images, views, accuracy."""
    groups = len(summary.groupby(settings)) if settings else 1
    n = (
        f"{int(summary['n'].iloc[0]):,} test images"
        if summary["n"].nunique() == 1
        else "test images"
    )
    views = views_of(summary)
    plain = (
        "" if views == VIEWS["plain"] else f" ({between(summary['plain_accuracy'])} with one view)"
    )
    runs = f"{counted(len(summary), 'run')} of {counted(groups, 'setting')}"
    return f"{runs}, {n}: accuracy {between(summary['accuracy'])} with {views}{plain}."


def between(values: Any) -> str:
    """The lowest and the highest of several shares."""
    return (
        f"{values.min():.2%}" if len(values) == 1 else f"{values.min():.2%} to {values.max():.2%}"
    )


def views_of(summary: pd.DataFrame) -> str:
    """The views of the accuracies, in words."""
    return " or ".join(VIEWS.get(name, str(name)) for name in summary["views"].unique())


def seeds(table: pd.DataFrame, settings: list[str]) -> int:
    """The largest number of runs that differ only in their seed."""
    runs = table.drop_duplicates("run")
    return int(runs.groupby(settings).size().max()) if settings else len(runs)


def means(summary: pd.DataFrame, settings: list[str]) -> pd.DataFrame:
    """One row per setting: number of runs, mean and spread. A single run has no spread."""
    grouped: Any = summary.groupby(settings) if settings else summary.groupby(lambda _: "all runs")
    found = pd.DataFrame({"runs (n)": grouped.size(), "views": grouped["views"].first().map(VIEWS)})
    for column, (name, form) in MEANS.items():
        if column == "plain_accuracy" and set(summary["views"]) == {"plain"}:
            continue
        found[name] = grouped[column].mean().map(form.format)
        spread = grouped[column].std()
        found[f"± {name}"] = spread.map(form.format).where(spread.notna(), "–")
        if column == "accuracy":
            found["lowest to highest"] = grouped[column].agg(between)
    found["images/s"] = grouped["images_per_second"].mean().map("{:,.0f}".format)
    return found.reset_index() if settings else found


def every_run(summary: pd.DataFrame, settings: list[str]) -> pd.DataFrame:
    columns = {
        **{
            axis: summary[axis]
            for axis in settings + [axis for axis in summary.columns if axis == "seed"]
        },
        "test images (n)": summary["n"].map("{:,}".format),
        "views": summary["views"].map(VIEWS),
        "accuracy": summary["accuracy"].map("{:.2%}".format),
        "accuracy, one view": summary["plain_accuracy"].map("{:.2%}".format),
        "loss": summary["loss"].map("{:.4f}".format),
        "images/s": summary["images_per_second"].map("{:,.0f}".format),
        "seconds": summary["seconds"].map("{:,.0f}".format),
    }
    return pd.DataFrame(columns)


def provenance(summary: pd.DataFrame) -> pd.DataFrame:
    """From which code and data each run came, and in how many attempts: jobs or processes that
    trained it, one after the other, because something ended the one before.
    """
    columns = {
        "run": summary["run"],
        "commit": [
            ("none" if commit is None else commit[:10]) + " + changes" * (dirty is True)
            for commit, dirty in zip(summary["commit"], summary["dirty"], strict=True)
        ],
        "code (SHA-256)": summary["code_sha256"].str[:10],
        "data (SHA-256)": summary["data_sha256"].str[:10],
        "run.json (SHA-256)": summary["run_sha256"].str[:10],
        "evaluation (SHA-256)": summary["evaluation_sha256"].str[:10],
        "attempts": summary["attempts"],
    }
    return pd.DataFrame(columns)


def incident_part(incidents: pd.DataFrame) -> str:
    """What interrupted the runs and which nodes were slow; nothing if nothing happened."""
    if not len(incidents):
        return ""
    shown = incidents[["run", "time", "text"]].rename(columns={"text": "what"})
    shown["time"] = shown["time"].str.removesuffix("+00:00").str.replace("T", " ") + " UTC"
    return f'<h2>Interruptions and slow nodes</h2><div class="words">{table(shown)}</div>'


def scaling_part(experiment: Experiment, sizes: pd.DataFrame, image: str) -> str:
    """Advice, figure and table of a scaling study."""
    sentences = "".join(f"<p>{html.escape(line)}</p>" for line in scaling.advice(experiment, sizes))
    return f"<h2>Scaling</h2>{sentences}{image}{table(size_table(sizes))}"


def size_table(sizes: pd.DataFrame) -> pd.DataFrame:
    """The sizes with the columns that say something here."""
    shown = {
        "nodes": ("nodes", "{:d}"),
        "nproc_per_node": ("processes per node", "{:d}"),
        "threads": ("threads", "{:d}"),
        "gpus" if sizes["gpus"].any() else "cpus": (
            "GPUs" if sizes["gpus"].any() else "CPUs",
            "{:d}",
        ),
        "global_batch_size": ("batch", "{:,d}"),
        "runs": ("runs (n)", "{:d}"),
        "images_per_second": ("images/s", "{:,.0f}"),
        "model_images_per_second": ("model", "{:,.0f}"),
        "epoch_seconds": ("s per epoch", "{:.1f}"),
        "strong_speed_up": ("speed-up", "{:.2f}"),
        "strong_efficiency": ("efficiency", "{:.0%}"),
        "weak_efficiency": ("weak efficiency", "{:.0%}"),
        "communication_share": ("communication", "{:.0%}"),
        "input_share": ("input", "{:.0%}"),
        "gpu_hours" if sizes["gpus"].any() else "cpu_hours": (
            "GPU-hours" if sizes["gpus"].any() else "CPU-hours",
            "{:.3g}",
        ),
        "accuracy": ("accuracy", "{:.2%}"),
        "seconds_to_target": ("s to target", "{:.1f}"),
    }
    return pd.DataFrame(
        {
            title: [form.format(value) if pd.notna(value) else "–" for value in sizes[column]]
            for column, (title, form) in shown.items()
            if sizes[column].notna().any()
        }
    )


def warning(missing: pd.DataFrame) -> str:
    rows = missing[["run", "reason", "log"]].fillna("")
    line = f"<b>Partial: {len(missing)} runs are missing.</b> They are in no number below."
    return f'<div class="partial">{line}{table(rows)}</div>'


def configuration(config: dict[str, Any]) -> str:
    rows = [
        (key, ", ".join(map(str, value)) if isinstance(value, list) else value)
        for key, value in flat(config).items()
    ]
    cells = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in rows
    )
    return f'<table class="config">{cells}</table>'


def flat(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value["name"] if key == "dataset" and value else value
        for key, value in config.items()
        if key not in ("experiment", *SITE) and value not in (None, [], {})
    }


def table(frame: pd.DataFrame) -> str:
    return f'<div class="wide">{frame.to_html(index=False, border=0)}</div>'


def picture(name: str, content: bytes) -> str:
    source = f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"
    return f'<img alt="{html.escape(name.replace("_", " "))}" src="{source}">'
