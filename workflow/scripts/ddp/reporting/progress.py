"""How far the runs of an experiment are, from their files alone."""

import csv
import io
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp.base.errors import Refusal
from ddp.base.reading import MOST, read_bytes
from ddp.checkpointing.owner import LEASE, look
from ddp.experiment.config import Common, Experiment, Run, parse_option
from ddp.experiment.programs import ProgramExperiment, read_experiment
from ddp.reporting import measures, results

RECORD = "experiment.json"  # of the newest command on an experiment


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        state: `waiting`, `staging`, `running`, `interrupted`, `failed`, `trained` or `done`.
        where: the host of rank 0, while it runs.
        epoch: the last finished one, or the last count of metrics.csv; None before the first.
        epochs: of the whole run; None if unknown.
        numbers: loss, accuracy and so on of the last row, or the results.
        left: seconds until the training ends at the present speed; None if unknown.
        saved: seconds since the last save; None before the first.
        reason: of a failure.
    """

    run: str
    state: str
    where: str = ""
    epoch: int | None = None
    epochs: int | None = None
    numbers: str = ""
    left: float | None = None
    saved: float | None = None
    reason: str = ""


def read_all(experiment: Common, folder: Path, now: float | None = None) -> list[Progress]:
    """The progress of every run, in the order of the experiment.

    Args:
        folder: results/<experiment>.
        now: in seconds since the epoch.
    """
    moment = time.time() if now is None else now
    own = isinstance(experiment, ProgramExperiment)
    evaluated = not own or bool(experiment.config["evaluate"])
    found = []
    for name, run in experiment.runs.items():
        epochs = run.epochs if isinstance(run, Run) else None
        found.append(read_one(name, folder / name, epochs, own, evaluated, moment))
    return found


def read_one(
    name: str, folder: Path, epochs: int | None, own: bool, evaluated: bool, now: float
) -> Progress:
    """The progress of one run.

    Args:
        epochs: of the whole run; None if unknown.
        own: it runs a program of the user's.
        evaluated: it is done when it has been evaluated.
    """
    state = folder / "state"
    owner = None
    with suppress(OSError):
        owner = look(state / "owner.json")
    alive = owner is not None and not owner[0].released and now - owner[1] / 1e9 < LEASE
    rows = read_rows(folder / ("work/metrics.csv" if own else "history.csv"))
    last = rows[-1] if rows else {}
    count = count_of(last)
    trained = (folder / ("run.json" if own else "model.safetensors")).exists()
    if owner and alive:
        return Progress(
            name, "running", owner[0].host, count, epochs, in_words(last),
            time_left(rows, epochs), since_save(state, own, now),
        )  # fmt: skip
    if trained:
        done = not evaluated or (folder / "evaluation.json").exists()
        read = measures.result_line if own else results.read_accuracy
        return Progress(name, "done" if done else "trained", epoch=count, epochs=epochs,
                        numbers=read(folder) if done else in_words(last))  # fmt: skip
    missing = results.why_missing(name, folder, "run.json" if own else "model.safetensors")
    if missing.log:
        preempted = "was preempted" in missing.reason or "same command" in missing.reason
        return Progress(name, "interrupted" if preempted else "failed", epoch=count, epochs=epochs,
                        numbers=in_words(last), saved=since_save(state, own, now),
                        reason=missing.reason)  # fmt: skip
    if owner:
        return Progress(name, "interrupted", epoch=count, epochs=epochs, numbers=in_words(last),
                        saved=since_save(state, own, now),
                        reason=f"{owner[0].who} is not heard of any more")  # fmt: skip
    started = (folder / "stage.log").exists() or (folder / "staging.json").exists()
    return Progress(name, "staging" if started else "waiting", epochs=epochs)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The whole lines of a table that a program may be writing; none if it cannot be read."""
    try:
        text = read_bytes(path, MOST).decode()
        lines = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
        return [line for line in lines if all(isinstance(cell, str) for cell in line.values())]
    except (OSError, ValueError, csv.Error):
        return []


def count_of(row: dict[str, str]) -> int | None:
    """The first cell of a row, which counts; None if it is no number."""
    try:
        return int(float(next(iter(row.values()))))
    except (StopIteration, ValueError, OverflowError):
        return None


# Columns of history.csv that say how good the network is and how fast the training.
SHOWN = ("train_loss", "val_loss", "val_accuracy", "images_per_second")
MOST_NUMBERS = 4


def in_words(row: dict[str, str]) -> str:
    """The numbers of a row that matter."""
    keys = [key for key in SHOWN if key in row] or list(row)[1 : MOST_NUMBERS + 1]
    parts = []
    for key in keys:
        with suppress(ValueError):
            parts.append(f"{key} {float(row[key]):.4g}")
    return ", ".join(parts)


def time_left(rows: list[dict[str, str]], epochs: int | None) -> float | None:
    """Seconds for the epochs that are left, as long as the last three took on average."""
    with suppress(KeyError, ValueError):
        latest = [float(row["seconds"]) for row in rows[-3:]]
        if latest and epochs:
            left = (epochs - int(rows[-1]["epoch"])) * sum(latest) / len(latest)
            return left if math.isfinite(left) else None
    return None


def since_save(state: Path, own: bool, now: float) -> float | None:
    """Seconds since something was saved last."""
    files = (state / "saved").rglob("*") if own else state.glob("epoch=*.safetensors")
    times = []
    for file in files:
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(0.0, now - max(times)) if times else None


def read_record(folder: Path) -> Experiment | ProgramExperiment:
    """An experiment, as the newest command on it configured it.

    Args:
        folder: results/<experiment>.

    Raises:
        Refusal: there is no record, or it is no configuration.
    """
    try:
        text = read_bytes(folder / RECORD, MOST).decode()
    except (OSError, ValueError):
        raise Refusal(
            f"{folder / RECORD} is not there; give the folder of an experiment that has been "
            "started, such as results/quickstart"
        ) from None
    return read_experiment(parse_option(str(folder / RECORD), text), own=True)
