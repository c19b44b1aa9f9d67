"""How far the runs of an experiment are, from their files alone."""

import csv
import io
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from manynodes.base import failure
from manynodes.base.errors import Refusal, os_error_line
from manynodes.base.reading import MOST, parse_form, read_bytes
from manynodes.base.timeouts import BETWEEN, LEASE
from manynodes.checkpointing import incidents
from manynodes.checkpointing.owner import LIVE, look
from manynodes.experiment.config import Experiment, Run
from manynodes.reporting import measures
from manynodes.reporting.metrics import rows_so_far, telling_first
from manynodes.reporting.results import form_of, read_about

RECORD = "experiment.json"  # of the newest command on an experiment
JOBS = "jobs.json"  # the scheduler's jobs of a command that runs
STARTED = ("preflight.log", "logs")  # what a run's job makes first
SAVES = ("running", "interrupted", "failed")  # states of which the last save is shown
MOST_COUNT = 2**53  # of epochs or steps; a larger float is not exact


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        state: `waiting`, `staging`, `running`, `interrupted`, `failed`, `trained` or `done`.
        where: the host of rank 0, while it runs.
        step, steps: of the epoch that it trains; None if unknown.
        epoch: the last finished one, or the last count of metrics.csv; None before the first.
        epochs: of the whole run: its parameter `epochs`, or `steps` if it counts steps; None if
            unknown.
        counts: what is counted, the first column's name.
        numbers: loss, accuracy and so on of the last row, or the results.
        left: seconds until the training ends at the present speed; None if unknown.
        saved: seconds since the last save; None before the first.
        reason: of a failure; or why it waits, in the scheduler's words; or what there is to say of
            the numbers of a finished run, such as why there are none.
        interruptions: how often something has ended its training early, and it went on.
    """

    run: str
    state: str
    where: str = ""
    epoch: int | None = None
    epochs: int | None = None
    counts: str = "epoch"
    numbers: str = ""
    left: float | None = None
    saved: float | None = None
    reason: str = ""
    step: int | None = None
    steps: int | None = None
    interruptions: int = 0


def read_all(experiment: Experiment, folder: Path, now: float | None = None) -> list[Progress]:
    """The progress of every run, in the order of the experiment.

    Args:
        folder: results/<experiment>.
        now: in seconds since the epoch.
    """
    moment = time.time() if now is None else now
    jobs = read_quietly(folder / JOBS, "jobs")
    found: list[Progress] = []
    told: dict[str, measures.Told] = {}
    for name in experiment.runs:
        each = read_one(experiment, name, folder, moment)
        if each.state == "done":
            each = published(each, experiment, folder / name)
        if each.state == "done":
            told[name] = told_of(experiment, folder / name)
        kinds = [incident.kind for incident in incidents.read(folder / name / "state")]
        ended = each.state in ("failed", "interrupted")
        before = max(0, kinds.count(incidents.INTERRUPTION) - ended)
        each = replace(each, interruptions=before)
        found.append(queued(each, jobs[name]) if name in jobs else each)
    columns = measures.columns_of(experiment.axes, [each.numbers for each in told.values()])
    return [
        replace(each, numbers=of.words(columns), reason=of.remark)
        if (of := told.get(each.run))
        else each
        for each in found
    ]


def looks(experiment: Experiment, folder: Path, every: float | None) -> Iterator[list[Progress]]:
    """The progress of every run again and again, until all have ended.

    Args:
        folder: as of `read_all`.
        every: seconds between two looks; None for a single one.
    """
    while True:
        found = read_all(experiment, folder)
        # Before the caller reads files: of a run that ends meanwhile it reads them once more.
        over = is_over(found, folder)
        yield found
        if every is None or over:
            return
        time.sleep(every)


def is_over(found: Sequence[Progress], folder: Path) -> bool:
    """Whether all runs have ended. One that has failed may start again while a command follows the
    jobs; one that was killed has left the file that says so.

    Args:
        found, folder: of `read_all`.
    """
    states = {each.state for each in found}
    ended = states <= {"done", "failed", "interrupted"} and not (folder / JOBS).exists()
    return ended or states == {"done"}


def queued(each: Progress, job: dict[str, Any]) -> Progress:
    """A run with the state of its job; it says more than the files of a run that is not alive."""
    if each.state in ("running", "trained", "done"):
        return each
    reason = f"job {job['job']}: {job['state']} since {job['since']}"
    # After a requeue the log still has the reason for the requeue.
    started = "staging" if each.state == "waiting" else each.state
    return replace(each, state="waiting" if job["waits"] else started,
                   reason=reason if job["waits"] else each.reason or reason)  # fmt: skip


def read_one(experiment: Experiment, name: str, results: Path, now: float) -> Progress:
    """The progress of one run, from its folder among the results."""
    folder = results / name
    rows = read_rows(rows_so_far(folder))
    last = rows[-1] if rows else {}
    counts = next(iter(last), "epoch")
    count, total = count_of(last), experiment.runs[name].parameters.get(f"{counts}s")
    # A program may count on from where another training has ended.
    epochs = total if isinstance(total, int) and (count or 0) <= total else None
    reached = Progress(name, "waiting", epoch=count, epochs=epochs, counts=counts,
                       numbers=in_words(last))  # fmt: skip
    found = with_state(reached, experiment, folder, time_left(rows, epochs), now)
    if found.state not in SAVES:
        return found
    return replace(found, saved=since_save(folder / "state", not experiment.built_in, now))


def with_state(
    reached: Progress, experiment: Experiment, folder: Path, left: float | None, now: float
) -> Progress:
    """What a run has reached, with the state that its files show.

    Args:
        folder: of the run.
        left: seconds that it needs at the speed of its rows.
    """
    run, owner, silent = experiment.runs[folder.name], None, math.inf
    with suppress(OSError):
        if seen := look(folder / "state/owner.json"):
            owner, silent = seen.record, now - seen.touched / 1e9
    if owner and not owner.released and silent < LEASE:
        found = replace(reached, state="running", where=owner.host, left=left)
        live = read_quietly(folder / "state" / LIVE, "live")
        return with_live(found, live) if live else found
    failed = failure.read(folder)
    reason = f"{failed.stage}: {failed.line}" if failed else ""
    if failed and failed.again == failure.Again.NO and failed.time >= ended(folder, run):
        # Perhaps of another training that was to replace its results.
        preempted = failed.kind == failure.Kind.PREEMPTED
        return replace(reached, state="interrupted" if preempted else "failed", reason=reason)
    if (folder / "run.json").exists():
        return replace(reached, state="done")
    if owner and owner.released and silent < BETWEEN:
        return replace(reached, state="running", where=owner.host)
    if owner or failed:
        silence = f"{owner.who} is not heard of any more" if owner else ""
        return replace(reached, state="interrupted", reason=reason or silence)
    # A program without files and data has no stage.
    started = any((folder / each).exists() for each in ("stage.log", "staging.json", *STARTED))
    return replace(reached, state="staging" if started else "waiting", epoch=None, numbers="")


def published(reached: Progress, experiment: Experiment, folder: Path) -> Progress:
    """A trained run, which is done if it is evaluated."""
    if experiment.has_evaluation and not (folder / "evaluation.json").exists():
        return replace(reached, state="trained")
    # Beside its results there may be rows of an attempt that was to replace them.
    rows = read_rows(folder / "metrics.csv")
    return replace(reached, epoch=count_of(rows[-1]) if rows else None)


def told_of(experiment: Experiment, folder: Path) -> measures.Told:
    """What there is to tell of a run that is done, or why its numbers cannot be read."""
    try:
        return measures.told(experiment, folder)
    except FileNotFoundError as error:
        return measures.Told(remark=f"{error.filename} is not there; run the same command again")
    except OSError as error:
        return measures.Told(remark=os_error_line(error))
    except Refusal as refusal:
        return measures.Told(remark=str(refusal))


def ended(folder: Path, run: Run) -> str:
    """When a finished training has ended, in UTC, ISO 8601; empty if that is not known. A failure
    before is of an earlier attempt, such as of a backup.
    """
    with suppress(OSError, Refusal):
        return str(read_about(folder / "run.json", form_of(run))["ended"])
    return ""


def with_live(each: Progress, live: dict[str, Any]) -> Progress:
    """A running training with what it has told last."""
    epoch, step, steps = live["epoch"], live["step"], live["steps"]
    said = [f"loss {live['loss']:.4g}"] if "loss" in live else []
    if "images_per_second" in live:
        said.append(f"{live['images_per_second']:,.0f} images/s")
    said += [live["slow"]] if "slow" in live else []
    numbers = ", ".join(said + ([each.numbers] if each.numbers else []))
    left = each.left
    if left is not None and each.epochs and each.epoch is not None and each.epochs > each.epoch:
        # Of the epoch that it trains, a part is done.
        left *= max(0.0, each.epochs - epoch - step / steps) / (each.epochs - each.epoch)
    return replace(each, epoch=epoch, step=step, steps=steps, numbers=numbers, left=left)


def read_quietly(path: Path, form: str) -> dict[str, Any]:
    """A JSON file that may be written at this moment; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        return parse_form(read_bytes(path, MOST), form)
    return {}


def read_rows(path: Path) -> list[dict[str, str]]:
    """The whole lines of a table that a program may be writing; none if it cannot be read."""
    try:
        text = read_bytes(path, MOST).decode("utf-8-sig")
        lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        first, *rows = [line for line in lines if line]
        names = [name.strip() for name in first]
        # A program that has started again may have written the names again.
        return [dict(zip(names, row, strict=True)) for row in rows
                if len(row) == len(names) and row != first]  # fmt: skip
    except (OSError, ValueError, csv.Error):
        return []


def count_of(row: dict[str, str]) -> int | None:
    """The first cell of a row, which counts; None if it is no number that can count."""
    try:
        count = int(float(next(iter(row.values()))))
    except (StopIteration, ValueError, OverflowError):
        return None
    return count if abs(count) < MOST_COUNT else None


def interval(text: str) -> float:
    """Seconds between two looks, from a command line.

    Raises:
        ValueError: they are no positive number.
    """
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise ValueError
    return seconds


# The classifier's columns that say how good the network is and how fast the training.
SHOWN = ("train_loss", "val_loss", "val_accuracy", "images_per_second")
MOST_NUMBERS = 4


def in_words(row: dict[str, str]) -> str:
    """The numbers of a row that matter."""
    known = [key for key in SHOWN if key in row]
    others = [key for key in telling_first([*row][1:]) if key not in known]
    keys = [*known, *others][:MOST_NUMBERS]
    parts = []
    for key in keys:
        with suppress(ValueError):
            parts.append(f"{key} {float(row[key]):.4g}")
    return ", ".join(parts)


def time_left(rows: list[dict[str, str]], epochs: int | None) -> float | None:
    """Seconds for the epochs or steps that are left, at the speed of the last three rows.

    The row before these tells where they began; a single row began at 0.
    """
    latest = rows[-4:][1:] or rows
    began = count_of(rows[-4:][0]) if len(rows) > 1 else 0
    count = count_of(rows[-1]) if rows else None
    if not epochs or began is None or count is None or count <= began:
        return None
    with suppress(KeyError, ValueError):
        seconds = sum(float(row["seconds"]) for row in latest)
        left = (epochs - count) * seconds / (count - began)
        return left if math.isfinite(left) else None
    return None


def since_save(state: Path, user_program: bool, now: float) -> float | None:
    """Seconds since something was saved last."""
    times = []
    # Files and folders may be removed while we look.
    for parent, _, names in os.walk(state / "saved" if user_program else state):
        for name in names:
            if user_program or (Path(parent) == state and fnmatch(name, "epoch=*.safetensors")):
                with suppress(OSError):
                    times.append(Path(parent, name).stat().st_mtime)
    return max(0.0, now - max(times)) if times else None


def read_record(folder: Path) -> Experiment:
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
    return Experiment.from_json(text, str(folder / RECORD))
