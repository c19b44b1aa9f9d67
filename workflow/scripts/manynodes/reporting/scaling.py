"""How an experiment scales: its sizes compared, a model of their steps, and advice.

Strong scaling keeps the global batch, weak scaling the batch of each process. All figures are of
the training's steps alone; starting and evaluating are not in them, except in the hours.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import pandas as pd

from manynodes.experiment.config import Experiment, Run
from manynodes.experiment.keys import SIZE
from manynodes.reporting.metrics import share_form
from manynodes.reporting.results import counted
from manynodes.reporting.step_model import Model, Step, fit, last_that_pays

# What the sizes of one study may differ in; in its learning rate too if it is paired with them.
OF_SIZE = (*SIZE, "global_batch_size", "seed")
NEAR = 0.9  # share of the best rate that is near enough
OFF = 0.2  # error of the model from which on it says nothing
# Efficiency above 1 that the caches of more processors do not explain any more.
DOUBTFUL = 1.3
LIMIT = 0.1  # share of a step from which on something besides the computation is the limit
COLUMNS = (
    *("nodes", "nproc_per_node", "processes", "threads", "cpus", "gpus", "global_batch_size"),
    *(
        "images_per_step",
        "runs",
        "images_per_second",
        "epoch_seconds",
        "strong_speed_up",
        "strong_efficiency",
    ),
    *("weak_speed_up", "weak_efficiency", "cpu_hours", "gpu_hours", "accuracy", "lowest_accuracy"),
    *("highest_accuracy", "target_accuracy", "seconds_to_target", "sharing", "gradient_bytes"),
    *("model_images_per_second", "communication_share", "input_share", "computed_in"),
)


def of_run(
    name: str, run: Run, about: dict[str, Any], rows: pd.DataFrame, accuracy: float
) -> dict[str, Any]:
    """A run's measured numbers.

    Args:
        about: run.json.
        rows: of metrics.csv. The first epoch counts only if it is the only one.
        accuracy: on the test split.
    """
    ranks = about["ranks"]
    hosts = defaultdict(list)
    for rank in ranks:
        hosts[rank["host"]].append(rank)
    cpus = {host: cpus_of(mine) for host, mine in hosts.items()}
    gpus = sum(rank["device"] != "cpu" for rank in ranks)
    # The busiest host decides: all ranks wait for each other in every step.
    sharing = max(
        sum(rank["threads"] for rank in mine) / cpus[host] for host, mine in hosts.items()
    )
    rates = rows["images_per_second"].tolist()
    rate = median(rates[1:] or rates)
    # run.json did not say these before.
    batch = about.get("images_per_step", run.global_batch_size)
    sent = about.get("trained_parameters", about["parameters"])
    return {
        "run": name,
        "nodes": run.nodes,
        "nproc_per_node": run.nproc_per_node,
        "processes": run.world_size,
        "threads": max(rank["threads"] for rank in ranks),
        "cpus": sum(cpus.values()),
        "gpus": gpus,
        "global_batch_size": run.global_batch_size,
        "images_per_step": batch,
        "images_per_second": rate,
        "epoch_seconds": float(median(rows["seconds"].tolist()[1:] or rows["seconds"])),
        "seconds": about["seconds"],
        "accuracy": accuracy,
        "sharing": 1.0 if gpus else max(1.0, sharing),
        "computed_in": computed_in(run, about),
        "input_share": input_share(ranks, batch / rate),
        "gradient_bytes": sent * (4 if run.gradient_compression == "none" else 2),
        "curve": list(zip(rows["seconds"].cumsum(), rows["val_accuracy"], strict=True)),
    }


def computed_in(run: Run, about: dict[str, Any]) -> str:
    """The precision of a run; run.json did not say it before there was `auto`."""
    return str(about.get("computed_in", run.precision))


def input_share(ranks: Sequence[dict[str, Any]], step: float) -> float:
    """Share of a step of so many seconds in which a rank waits for its pixels; NaN if no rank has
    measured it.
    """
    known = [rank["input_seconds"] for rank in ranks if rank["input_seconds"] is not None]
    return mean(known) / step if known else math.nan


def cpus_of(ranks: Sequence[dict[str, Any]]) -> int:
    """The CPUs on which the ranks of a host compute, at most one per thread."""
    ours: set[int] = set()
    for part in {part for rank in ranks for part in rank["cpu_ids"].split(",")}:
        first, _, last = part.partition("-")
        ours |= set(range(int(first), int(last or first) + 1))
    return max(1, min(len(ours), sum(rank["threads"] for rank in ranks)))


def sizes(experiment: Experiment, measured: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row per size of each setting, with means over its runs, from `of_run` of each run.

    The columns are `run`, the first of the runs, and COLUMNS. The target is the highest validation
    accuracy that every run of a setting reaches.
    """
    rows = []
    for mine in by_setting(experiment, measured).values():
        target = min(max(accuracy for _, accuracy in run["curve"]) for run in mine)
        of_size = defaultdict(list)
        for run in mine:
            of_size[size_of(run)].append(run)
        found = [row_of(runs, target) for runs in of_size.values()]
        compare(found)
        model = fit([step_of(row) for row in found])
        for row in found:
            step = step_of(row)
            parts = model.parts(step) if model and model.error <= OFF else {}
            seconds = sum(parts.values())
            row["model_images_per_second"] = row["images_per_step"] / seconds if parts else math.nan
            reduced = sum(parts[part] for part in parts if part.endswith("all-reduce"))
            row["communication_share"] = reduced / seconds if parts else math.nan
        rows += found
    return pd.DataFrame(rows, columns=["run", *COLUMNS])


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as `sizes` returns it."""
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def by_setting(
    experiment: Experiment, rows: Sequence[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Rows with a `run`, by what their runs have in common besides their size, in words. With
    `device: auto` and `precision: auto`, some may have found GPUs, or bf16, and others not.
    """
    paired = {"learning_rate"} & {key for pair in experiment.config["runs"] for key in pair}
    axes = [axis for axis in experiment.axes if axis not in {*OF_SIZE, *paired}]
    mixed = len({bool(row["gpus"]) for row in rows}) > 1
    auto = {
        row["run"]: row["computed_in"]
        for row in rows
        if experiment.runs[row["run"]].precision == "auto"
    }
    rounded = auto if len({*auto.values()}) > 1 else {}
    found = defaultdict(list)
    for row in rows:
        # Not as a rule has multiplied them by the size.
        values = experiment.given_values(row["run"])
        words = [f"{axis} {values[axis]}" for axis in axes]
        words += [f"on {'GPUs' if row['gpus'] else 'CPUs'}"] if mixed else []
        words += [f"in {row['computed_in']}"] if row["run"] in rounded else []
        found["  ".join(words)].append(row)
    return dict(found)


def size_of(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        run[key] for key in ("nodes", "nproc_per_node", "threads", "gpus", "global_batch_size")
    )


def row_of(runs: Sequence[dict[str, Any]], target: float) -> dict[str, Any]:
    """The row of one size, without what compares it with others."""
    first = runs[0]
    accuracies = [run["accuracy"] for run in runs]
    times = [
        next((at for at, reached in run["curve"] if reached >= target), math.nan) for run in runs
    ]
    shares = [run["input_share"] for run in runs if not math.isnan(run["input_share"])]
    return first | {
        "runs": len(runs),
        **{key: mean(run[key] for run in runs) for key in ("images_per_second", "epoch_seconds")},
        "input_share": mean(shares) if shares else math.nan,
        **{
            f"{key}_hours": mean(run[f"{key}s"] * run["seconds"] for run in runs) / 3600
            for key in ("cpu", "gpu")
        },
        "accuracy": mean(accuracies),
        "lowest_accuracy": min(accuracies),
        "highest_accuracy": max(accuracies),
        "target_accuracy": target,
        "seconds_to_target": mean(times),
    }


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in speed-up and efficiency, against the smallest size of each study."""
    for kind, found in (("strong", strong(rows)), ("weak", weak(rows))):
        for row in rows:
            row |= {f"{kind}_speed_up": math.nan, f"{kind}_efficiency": math.nan}
        for study in found:
            base = smallest(study)
            for row in study:
                speed_up = row["images_per_second"] / base["images_per_second"]
                row[f"{kind}_speed_up"] = speed_up
                row[f"{kind}_efficiency"] = speed_up * units(base) / units(row)


def smallest(study: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(study, key=lambda row: (units(row), row["processes"]))


def units(row: dict[str, Any]) -> int:
    """GPUs, or CPUs without GPUs."""
    return int(row["gpus"] or row["cpus"])


def strong(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Sizes with one global batch."""
    return studies(rows, lambda row: row["global_batch_size"])


def weak(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Sizes with one batch per process."""
    found = studies(rows, lambda row: (row["global_batch_size"] / row["processes"], row["threads"]))
    return [study for study in found if len({row["processes"] for row in study}) > 1]


def studies(rows: Sequence[dict[str, Any]], key: Any) -> list[list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return [rows for _, rows in sorted(found.items()) if len(rows) > 1]


def step_of(row: dict[str, Any]) -> Step:
    return Step(
        int(row["processes"]), int(row["threads"]), round(row["images_per_step"]),
        float(row["sharing"]), float(row["gradient_bytes"]),
        row["images_per_step"] / row["images_per_second"],
    )  # fmt: skip


# Of columns that are not in every table.
MEANINGS = {
    "model_images_per_second": "Model: images/s of a model of a step, fitted to these sizes.",
    "communication_share": "Communication: its share of a step.",
    "input_share": "Input: the share of a step in which a rank waits for pixels.",
    "seconds_to_target": (
        "s to target: seconds until the highest validation accuracy that all runs of a setting "
        "reach."
    ),
}


def meaning(sizes: pd.DataFrame) -> str:
    """What the columns mean that the page shows of a table as `sizes` returns it."""
    return " ".join(text for key, text in MEANINGS.items() if sizes[key].notna().any())


def advice(experiment: Experiment, table: pd.DataFrame) -> list[str]:
    """A sentence per setting. Strong scaling: the smallest size that is near the best, where more
    processes stop to pay, and what limits the largest. Weak scaling: what the largest keeps.

    Args:
        table: as `sizes` returns it.
    """
    rows = rows_of(table)
    found = []
    for setting, mine in by_setting(experiment, rows).items():
        model = fit([step_of(row) for row in mine])
        if study := max(strong(mine), key=len, default=None):
            sentence = strong_sentence(study, model)
        elif study := max(weak(mine), key=len, default=None):
            sentence = weak_sentence(study, model)
        else:
            continue
        found.append(f"{setting}: {sentence}" if setting else sentence)
    if (table["strong_efficiency"] > DOUBTFUL).any():
        found.append(
            f"An efficiency above {DOUBTFUL:.0%} shows that other work has slowed the "
            "smaller sizes: measure again."
        )
    return found


def shown(experiment: Experiment, sizes: pd.DataFrame) -> pd.DataFrame:
    """The table as the page shows it: the columns that say something here; a few sizes stand side
    by side.
    """
    unit = "gpu" if sizes["gpus"].any() else "cpu"
    forms = {
        "nodes": ("nodes", "{:d}"),
        "nproc_per_node": ("processes per node", "{:d}"),
        "threads": ("threads", "{:d}"),
        f"{unit}s": (f"{unit.upper()}s", "{:d}"),
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
        f"{unit}_hours": (f"{unit.upper()}-hours", "{:.3g}"),
        "accuracy": ("accuracy", share_form(sizes["accuracy"])),
        "seconds_to_target": ("s to target", "{:.1f}"),
    }
    columns = {
        title: [form.format(value) if pd.notna(value) else "–" for value in sizes[column]]
        for column, (title, form) in forms.items()
        if sizes[column].notna().any()
    }
    of_row = {
        row["run"]: setting
        for setting, rows in by_setting(experiment, rows_of(sizes)).items()
        for row in rows
    }
    if len(set(of_row.values())) > 1:
        columns = {"setting": [of_row[run] for run in sizes["run"]]} | columns
    if len(sizes) > len(columns):
        return pd.DataFrame(columns)
    # Side by side they fit a narrow page.
    return pd.DataFrame({"": list(columns)} | {
        " " * number: values for number, values in enumerate(zip(*columns.values(), strict=True), 1)
    })  # fmt: skip


def strong_sentence(study: Sequence[dict[str, Any]], model: Model | None) -> str:
    best = max(study, key=lambda row: row["images_per_second"])
    chosen = smallest(
        [row for row in study if row["images_per_second"] >= NEAR * best["images_per_second"]]
    )
    text = f"{in_words(chosen)} trains {chosen['images_per_second']:,.0f} images/s"
    text += (
        ", the most of all sizes"
        if chosen is best
        else f", within 10% of the most ({best['images_per_second']:,.0f}, {in_words(best)})"
    )
    if model is not None and model.error <= OFF:
        pays, most = pays_up_to(study, model), largest(study)["processes"]
        text += (
            f"; from {counted(pays, 'process')} on, twice as many gain less than 10%"
            if pays <= most
            else f"; more than {counted(most, 'process')} would gain more"
        )
    return text + limit_of(largest(study), model)


def weak_sentence(study: Sequence[dict[str, Any]], model: Model | None) -> str:
    base, most = smallest(study), largest(study)
    share = base["global_batch_size"] // base["processes"]
    text = (
        f"with {share} images per process, {in_words(most)} trains "
        f"{most['images_per_second']:,.0f} images/s, {most['weak_efficiency']:.0%} of what "
        f"{in_words(base)} promises"
    )
    return text + limit_of(most, model)


def largest(study: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(study, key=lambda row: (row["processes"], units(row)))


def limit_of(row: dict[str, Any], model: Model | None) -> str:
    """What a size spends its time on, by the model; the end of a sentence."""
    if model is None:
        return "; too few sizes for a model."
    if model.error > OFF:
        return f"; no model fits (the best is {model.error:.0%} off on sizes held out)."
    if row["input_share"] >= LIMIT:
        share = f"{row['input_share']:.0%} of a step"
        return f"; each rank of {in_words(row)} waits {share} for its pixels."
    parts = model.parts(step_of(row))
    shares = {part: seconds / sum(parts.values()) for part, seconds in parts.items()}
    computation = shares.pop("computation")
    limit = max(shares, key=shares.__getitem__)
    text = (
        f"the computation, {computation:.0%} of a step"
        if shares[limit] < LIMIT
        else f"{limit}, {shares[limit]:.0%} of a step"
    )
    fit_text = f"model, {model.error:.0%} off on sizes held out of its fit"
    return f"; the limit of {in_words(row)} is {text} ({fit_text})."


def pays_up_to(study: Sequence[dict[str, Any]], model: Model) -> int:
    """Processes beyond which doubling them at a fixed global batch gains less than 10 %; more than
    the largest size has if it still gains more.
    """
    row = largest(study)
    shared = any(row["sharing"] > 1 for row in study)
    cpus = max(row["cpus"] for row in study)

    def seconds(processes: int) -> float:
        threads = int(row["threads"])
        sharing = max(1.0, processes * threads / cpus) if shared else 1.0
        return model.seconds(
            Step(processes, threads, round(row["images_per_step"]), sharing,
                 float(row["gradient_bytes"]), 0.0)
        )  # fmt: skip

    return last_that_pays(seconds, most=row["processes"] + 1)


def in_words(row: dict[str, Any]) -> str:
    """A size: `2 nodes x 1 process x 1 thread`."""
    parts = [(row["nodes"], "node"), (row["nproc_per_node"], "process")]
    # The threads of a process with a GPU do little.
    parts += [] if row["gpus"] else [(row["threads"], "thread")]
    return " x ".join(counted(int(number), what) for number, what in parts)
