"""TensorBoard's event files, from the files of the runs."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from manynodes.base.errors import Refusal
from manynodes.base.optional import tensorboard
from manynodes.experiment.config import Experiment
from manynodes.reporting.measures import Of, columns_of, read_measured
from manynodes.reporting.metrics import rows_so_far
from manynodes.reporting.progress import MOST_COUNT, read_rows
from manynodes.reporting.results import read_finished

# Tags of the classifier's columns, which put training and validation into one chart's group.
TAGS = {
    "train_loss": "loss/train",
    "val_loss": "loss/validation",
    "train_accuracy": "accuracy/train",
    "val_accuracy": "accuracy/validation",
}
NO_TAGS = ("epoch", "seconds")
PATTERN = "events.out.tfevents.*"
# A step, the tag, and its value.
Point = tuple[int, str, float]


class RunEvents:
    """The event file of a run, which grows with it.

    TensorBoard draws a point twice that a file has twice. So a file is only appended to while what
    it has is still true; otherwise a new one replaces it.

    Args:
        folder: for the event file; older ones in it are removed.
        settings: the run's values on the axes.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self.folder = folder
        self.settings = settings
        self.written: list[Point] = []
        self.file: Any = None

    def update(self, points: Sequence[Point], times: Mapping[int, float]) -> None:
        """Write the points that the file does not have yet.

        Args:
            times: seconds since the epoch, by step.
        """
        if self.file is None or list(points[: len(self.written)]) != self.written:
            self.start(min(times.values(), default=0.0))
        board = tensorboard()
        for step, tag, value in points[len(self.written) :]:
            summary = board.Summary(value=[board.Summary.Value(tag=tag, simple_value=value)])
            self.file.add_event(
                board.Event(step=step, wall_time=times.get(step, 0.0), summary=summary)
            )
            self.written.append((step, tag, value))
        self.file.flush()

    def start(self, now: float) -> None:
        """A new file, with the settings as hyper-parameters."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(PATTERN):
            old.unlink()
        self.file = tensorboard().EventFileWriter(str(self.folder))
        self.written = []
        summary = tensorboard().hparams(self.settings, trial_id=self.folder.parent.name)
        self.file.add_event(tensorboard().Event(step=0, wall_time=now, summary=summary))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def points_of(
    experiment: Experiment, results: Path
) -> dict[str, tuple[list[Point], dict[int, float]]]:
    """What each run has to show so far, and when each step was, in seconds since the epoch.

    Args:
        results: results/<experiment>.
    """
    runs = experiment.runs
    ends = {} if experiment.built_in else {run: end(experiment, results / run) for run in runs}
    columns = columns_of(experiment.axes, ends.values())
    return {
        run: of_run(
            experiment,
            results / run,
            {columns[of]: value for of, value in ends.get(run, {}).items()},
        )
        for run in runs
    }


def of_run(
    experiment: Experiment, folder: Path, numbers: Mapping[str, float]
) -> tuple[list[Point], dict[int, float]]:
    """That of a run. A program may have written a row twice; the numbers of the later one count.
    Steps are those of the first column: epochs, or what the program counts.

    Args:
        numbers: of its finished program, by their columns.
    """
    built_in = experiment.built_in
    path = rows_so_far(folder)
    found: dict[float, dict[str, float]] = {}
    for row in read_rows(path):
        with suppress(ValueError, StopIteration):
            name = next(iter(row))
            count = float(row[name])
            cells = {key: float(row[key]) for key in row if row[key].strip() and key != name}
            if abs(count) < MOST_COUNT:
                found[count] = found.get(count, {}) | cells
    # A count of fractions, such as 0.25 of an epoch, is no step.
    whole = all(count.is_integer() for count in found)
    rows = {int(count) if whole else number: found[count]
            for number, count in enumerate(sorted(found), 1)}  # fmt: skip
    points = [
        (step, TAGS.get(key, key) if built_in else key, value)
        for step in sorted(rows)
        for key, value in rows[step].items()
        if not math.isnan(value) and not (built_in and key in NO_TAGS)
    ]
    last = max(rows, default=0)
    points += [
        (last, f"result/{key}", value) for key, value in numbers.items() if not math.isnan(value)
    ]
    return points + (tested(experiment, folder) if built_in else []), times(rows, path)


def end(experiment: Experiment, folder: Path) -> dict[Of, float]:
    """The numbers of a finished program, but those of its rows; none before."""
    with suppress(FileNotFoundError, Refusal):
        found = read_measured(experiment, folder).numbers
        return {of: value for of, value in found.items() if of[0] != "newest"}
    return {}


def tested(experiment: Experiment, folder: Path) -> list[Point]:
    """The classifier's results, at the epoch that it publishes; none before it is evaluated."""
    with suppress(FileNotFoundError, Refusal):
        found = read_finished(experiment, folder)
        epoch = int(found.about["metrics"]["epoch"])
        return [(epoch, f"{key}/test", found.evaluation[key]) for key in ("accuracy", "loss")]
    return []


def times(rows: Mapping[int, Mapping[str, float]], path: Path) -> dict[int, float]:
    """When each step ended: the last one when the file was written, the others by their seconds."""
    try:
        end = path.stat().st_mtime
    except OSError:
        return {}
    found = {}
    for step in sorted(rows, reverse=True):
        found[step] = end
        seconds = rows[step].get("seconds", 0.0)
        end -= seconds if math.isfinite(seconds) else 0.0
    return found
