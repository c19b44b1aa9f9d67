"""How a user's program scales: the sizes of each setting, by the speed that it measures or by its
time. What is known of the classifier's steps besides is in scaling.py.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

import pandas as pd

from manynodes.experiment.config import REPEATS, Experiment, Run
from manynodes.experiment.keys import SIZE
from manynodes.reporting.results import counted
from manynodes.reporting.scaling import rows_of

RATE = "_per_second"
# Rates of something else than the training.
OF_TESTS = ("eval", "val", "test", "pred")
WHOLE = "seconds"  # of the whole program, if it measures no rate
COLUMNS = ("nodes", "nproc_per_node", "cpus_per_proc", "processes", "runs")


def rates_of(rows: pd.DataFrame, results: Mapping[str, Any]) -> dict[str, float]:
    """A run's measured speeds, by their names; those of its rows first.

    Args:
        rows: of metrics.csv: medians, without the first number if it is not the only one.
        results: the single numbers of its training.
    """
    known = {str(key): rows[key].dropna() for key in rows if is_rate(key)}
    of_rows = {
        key: float((rates[1:] if len(rates) > 1 else rates).median())
        for key, rates in known.items()
    }
    single = {key: float(value) for key, value in results.items() if is_rate(key)}
    found: dict[str, float] = {}
    for key, value in (*of_rows.items(), *single.items()):
        if math.isfinite(value) and value > 0:
            found.setdefault(key, value)
    return found


def is_rate(name: Any) -> bool:
    return str(name).endswith(RATE) and not str(name).startswith(OF_TESTS)


def sizes(
    experiment: Experiment, measured: Mapping[str, tuple[Mapping[str, float], float]]
) -> pd.DataFrame:
    """One row per size of each setting, the smallest first, with which the others are compared:
    `run`, the first of its runs, COLUMNS, the mean of what is compared, `speed_up`, `efficiency`.
    A time of 0 s is NaN, as what follows from it: of less than a second, or of a node whose clock
    was set back.

    Args:
        measured: of each run, `rates_of` and the seconds of the whole program.
    """
    known = [rates for rates, _ in measured.values()]
    rate = next((key for key in known[0] if all(key in rates for rates in known)), None)
    grouped: dict[str, dict[tuple[Any, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, setting in settings(experiment, measured).items():
        grouped[setting][size_of(experiment.runs[name])].append(name)
    found = []
    for of_size in grouped.values():
        rows: list[dict[str, Any]] = []
        for names in of_size.values():
            run = experiment.runs[names[0]]
            of_runs = [measured[name] for name in names]
            rows.append({
                "run": names[0],
                **dict(zip(SIZE, size_of(run), strict=True)),
                "processes": run.world_size,
                "runs": len(names),
                rate or WHOLE: mean(
                    rates[rate] if rate else time or math.nan for rates, time in of_runs
                ),
            })  # fmt: skip
        found += compared(rows, rate or WHOLE, run.device)
    return pd.DataFrame(found)


def compared(rows: list[dict[str, Any]], by: str, device: str) -> list[dict[str, Any]]:
    """The rows of a setting, the smallest first, with their speed-up and efficiency."""
    # CPUs count only if each size has a number of them, and no GPU computes instead.
    on_cpus = device != "cuda" and all(isinstance(row["cpus_per_proc"], int) for row in rows)

    def units(row: dict[str, Any]) -> int:
        return int(row["processes"] * (row["cpus_per_proc"] if on_cpus else 1))

    ordered = sorted(rows, key=lambda row: (units(row), row["processes"]))
    base = ordered[0]
    for row in ordered:
        slower, faster = (base, row) if by != WHOLE else (row, base)
        row["speed_up"] = faster[by] / slower[by]
        row["efficiency"] = row["speed_up"] * units(base) / units(row)
    return ordered


def size_of(run: Run) -> tuple[Any, ...]:
    return tuple(getattr(run, key) for key in SIZE)


def settings(experiment: Experiment, runs: Iterable[str]) -> dict[str, str]:
    """What each run has in common with the other sizes of its setting, in words: its axes but those
    whose value its size tells, such as a batch size that is paired with it.
    """
    values = {name: experiment.axis_values(name) for name in experiment.runs}
    axes = []
    for axis in experiment.axes:
        told = defaultdict(set)
        for name, run in experiment.runs.items():
            told[size_of(run)].add(values[name][axis])
        if axis not in (*SIZE, *REPEATS) and any(len(found) > 1 for found in told.values()):
            axes.append(axis)
    return {name: "  ".join(f"{axis} {values[name][axis]}" for axis in axes) for name in runs}


def by_setting(experiment: Experiment, table: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """The rows of a table as `sizes` returns it."""
    found = defaultdict(list)
    rows = rows_of(table)
    words = settings(experiment, [row["run"] for row in rows])
    for row in rows:
        found[words[row["run"]]].append(row)
    return dict(found)


def compared_by(table: pd.DataFrame) -> str:
    """The column of a table as `sizes` returns it that the speed-up comes from."""
    return str(table.columns[len(COLUMNS) + 1])


def advice(experiment: Experiment, table: pd.DataFrame) -> list[str]:
    """A sentence per setting of several sizes, and one on what is compared.

    Args:
        table: as `sizes` returns it.
    """
    found = []
    for setting, rows in by_setting(experiment, table).items():
        base, best = rows[0], max(rows, key=lambda row: row["speed_up"])
        if len(rows) > 1 and not any(math.isnan(row["speed_up"]) for row in rows):
            sentence = (
                f"no size is faster than {in_words(base)}"
                if best is base
                else f"{in_words(best)} is {best['speed_up']:.2f} times as fast as "
                f"{in_words(base)}, the fastest; its efficiency is {best['efficiency']:.0%}"
            )
            found.append(f"{setting}: {sentence}." if setting else f"{sentence}.")
    by = compared_by(table)
    how = (
        "By the seconds of the whole program, its start included: sizes that do the same work."
        if by == WHOLE
        else f"By {by}."
    )
    return [*found, how] if found else []


def in_words(row: Mapping[str, Any]) -> str:
    """A size: `2 nodes x 1 process x 4 CPUs`."""
    parts = [counted(int(row["nodes"]), "node"), counted(int(row["nproc_per_node"]), "process")]
    cpus = row["cpus_per_proc"]
    return " x ".join([*parts, counted(int(cpus), "CPU")] if cpus != "auto" else parts)


def shown(experiment: Experiment, table: pd.DataFrame) -> pd.DataFrame:
    """The table as the page shows it."""
    found = table[["nodes", "nproc_per_node", "cpus_per_proc", "runs"]].rename(
        columns={"nproc_per_node": "processes per node", "cpus_per_proc": "CPUs per process",
                 "runs": "runs (n)"}
    )  # fmt: skip
    by = compared_by(table)
    forms = ((by, by, "{:,.4g}"), ("speed-up", "speed_up", "{:.2f}"),
             ("efficiency", "efficiency", "{:.0%}"))  # fmt: skip
    for title, key, form in forms:
        found[title] = table[key].map(form.format).where(table[key].notna(), "–")
    of_row = settings(experiment, table["run"])
    if len(set(of_row.values())) > 1:
        found.insert(0, "setting", list(of_row.values()))
    return found
