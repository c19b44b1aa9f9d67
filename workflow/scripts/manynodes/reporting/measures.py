"""result.json, which a program of the user's may write, and the numbers of its finished run."""

import json
import math
from collections.abc import Container, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import Refusal, drawable, reason
from manynodes.base.reading import MOST, NotAFile, parse_form, read_bytes, read_json
from manynodes.checkpointing.incidents import EMPTY
from manynodes.experiment.config import COLUMNS, REPEATS, Experiment
from manynodes.reporting.metrics import LARGEST, Row, newest, read_metrics
from manynodes.reporting.results import Finished, accuracy_line, read_about_of, read_finished
from manynodes.reporting.sums import EVALUATE, REMAKE, of_files, refuse_changed

# The keys that say where the numbers of a program of the user's are.
READ_BY = ("metrics", "result")
# By what a number is of.
WRITTEN = {"result": "result.json", "evaluated": "evaluation.json"}
EVALUATED = "evaluated.json"  # beside evaluation.json: what it is of
# A program that did nothing may end with 0 too.
NO_NUMBERS = (
    "finished without numbers; the keys metrics and result say where they are, if it has any; then "
    "add --config replace=true"
)
MOST_WHOLE = 2**53  # a larger whole number has no column of its own kind
MATRIX = ("confusion_matrix", "class_names")  # keys of result.json that are no numbers
Confusion = tuple[list[str], list[list[int]]]


@dataclass(frozen=True)
class Result:
    """What a program has written to result.json.

    Attributes:
        confusion: class names and matrix (true class by row); None if it has none.
        texts: what is no number, by name.
    """

    numbers: dict[str, float]
    confusion: Confusion | None
    texts: dict[str, str | bool] = field(default_factory=dict)


def read_result(path: Path) -> Result:
    """result.json; nothing if there is no such file. What is not finite is NaN.

    Raises:
        Refusal: it is not an object of numbers and texts, beside a confusion matrix.
    """
    try:
        return parse_result(read_bytes(path, MOST), path)
    except FileNotFoundError:
        return Result({}, None)
    except (OSError, NotAFile) as error:
        raise Refusal(f"{path} cannot be read: {reason(error)}; write it as JSON") from None


def parse_result(content: bytes, path: Path) -> Result:
    """The same from its content."""
    try:
        # A training that diverged has a result too.
        read = json.loads(content, parse_constant=lambda _: None)
        parsed = parse_form(json.dumps(read).encode(), "result")
        # A name of a file in another encoding has surrogates, which nothing can write or draw.
        found = {drawable(key): value for key, value in parsed.items()}
        matrix, names = (found.pop(key, None) for key in MATRIX)
        texts = {key: value for key, value in found.items() if isinstance(value, str | bool)}
        numbers = {key: checked(value) for key, value in found.items() if key not in texts}
        return Result(numbers, checked_matrix(matrix, names), texts)
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"{path} is not a JSON object of numbers ({reason(error)}); write one such as "
            '{"accuracy": 0.9}, or use the key result'
        ) from None


def checked_matrix(matrix: Any, names: list[str] | None) -> Confusion | None:
    """The confusion matrix with the names of its classes, which are their numbers unless given.

    Raises:
        ValueError: it is not square, or has another number of names.
    """
    if matrix is None:
        return None
    names = names or [*map(str, range(len(matrix)))]
    if len(names) != len(matrix) or any(len(row) != len(matrix) for row in matrix):
        raise ValueError("confusion_matrix: not square, or class_names has another length")
    return names, matrix


@dataclass(frozen=True)
class Names:
    """What the names of numbers mean in all runs that are compared: each may have written others.

    Attributes:
        columns: of the summary, by what a number is of, `result` or `evaluated`, and its own name:
            each has one of its own, which is not that of an axis.
        taken: names that no other number may have.
        tested: whether the confusion matrices are those of evaluations: trainings have counted
            other images.
    """

    columns: Mapping[tuple[str, str], str]
    taken: Set[str]
    tested: bool

    def column(self, origin: str, key: str) -> str:
        """That of a number; of a run that has finished since, it may be another than all these."""
        return self.columns.get((origin, key)) or unused(key, origin, self.taken)


def names_in(*found: tuple[Experiment, Path]) -> Names:
    """Those of all finished runs, whether they are read later or not.

    Args:
        found: each experiment with its folder.
    """
    written: dict[str, dict[str, None]] = {origin: {} for origin in WRITTEN}
    tested = False
    for experiment, results in found:
        # The classifier's numbers have fixed names.
        for name in experiment.runs if not experiment.built_in else ():
            for origin in ("result", "evaluated") if experiment.evaluation else ("result",):
                # A damaged one is refused with its run.
                with suppress(Refusal):
                    result = read_result(results / name / WRITTEN[origin])
                    written[origin] |= dict.fromkeys(result.numbers)
                    tested |= origin == "evaluated" and result.confusion is not None
    taken = {"run", *COLUMNS, *REPEATS}.union(*(experiment.axes for experiment, _ in found))
    columns = named(written, taken)
    return Names(columns, taken.union(columns.values()), tested)


def named(origins: Mapping[str, Iterable[str]], taken: Set[str]) -> dict[tuple[str, str], str]:
    """The columns of numbers, by where they come from and their own names.

    Args:
        taken: what is none of them.
    """
    found: dict[tuple[str, str], str] = {}
    used = {*taken}
    for origin, keys in origins.items():
        for key in keys:
            found[origin, key] = unused(key, origin, used)
            used.add(found[origin, key])
    return found


@dataclass(frozen=True)
class Measured:
    """The numbers of a finished run, each of this run and of no other.

    Attributes:
        about: run.json.
        result, evaluation: of its training and of its evaluation.
        metrics: the rows of metrics.csv.
        sums: SHA-256 of run.json and evaluation.json, by name.
    """

    about: dict[str, Any]
    result: Result
    evaluation: Result
    metrics: list[Row]
    sums: dict[str, str]

    def numbers(self, names: Names) -> dict[str, float]:
        """Those of the result and of the evaluation, by their columns in the summary."""
        written = {"result": self.result.numbers, "evaluated": self.evaluation.numbers}
        return {
            names.column(origin, key): value
            for origin, numbers in written.items()
            for key, value in numbers.items()
        }

    def columns(self, names: Names) -> dict[str, float]:
        """The same, or of a program that writes no result the newest of its rows."""
        last = newest(self.metrics)
        columns = named({"newest": last}, names.taken)
        return self.numbers(names) or {columns["newest", key]: checked(last[key]) for key in last}

    def confusion(self, names: Names) -> Confusion | None:
        """Class names and matrix (true class by row); None if it has none."""
        return (self.evaluation if names.tested else self.result).confusion


def unused(name: str, origin: str, taken: Container[str]) -> str:
    """The name of a column of the user's; if it is taken, with where the numbers come from."""
    while name in taken:
        name = f"{name} ({origin})"
    return name


def read_measured(experiment: Experiment, folder: Path) -> Measured:
    """The numbers of a run, after comparing its files with each other.

    Args:
        folder: of the run.

    Raises:
        FileNotFoundError: it is not finished.
        Refusal: a file is damaged, or of another run.
    """
    about = read_about_of(folder, experiment.runs[folder.name])
    evaluated = bool(experiment.evaluation)
    names = ["run.json", *["evaluation.json"] * evaluated]
    sums = of_files(folder, names, MOST)
    # Of its outputs, which may be large, only those that are evaluated are hashed.
    refuse_changed(folder, about["files"], [name for name in about["files"] if "/" not in name])
    if evaluated and read_evaluated(folder)["files"] != sums:
        raise Refusal(f"{folder}/evaluation.json is not of this run ({EVALUATED}); {REMAKE}")
    evaluation = read_result(folder / "evaluation.json") if evaluated else Result({}, None)
    result, rows = read_result(folder / "result.json"), read_metrics(folder / "metrics.csv")
    return Measured(about, result, evaluation, rows, sums)


def read_evaluated(folder: Path) -> dict[str, Any]:
    """evaluated.json, which an evaluation writes after evaluation.json.

    Raises:
        FileNotFoundError: the run is not evaluated.
        Refusal: it is damaged, or gone.
    """
    path = folder / EVALUATED
    try:
        return read_json(path, "evaluated", "delete evaluation.json")
    except FileNotFoundError:
        if not (folder / "evaluation.json").exists():
            raise
        # Snakemake does not miss it.
        raise Refusal(f"{path} is not there; delete evaluation.json and {EVALUATE}") from None


def checked(value: float | None) -> float:
    """The number, whole if it is; NaN if it is not finite, or too large to be drawn."""
    if value is None or abs(value) > LARGEST:
        return math.nan
    return value if abs(value) < MOST_WHOLE else float(value)


def write_result(path: Path, result: Result) -> None:
    found: dict[str, Any] = {
        key: value if math.isfinite(value) else None for key, value in result.numbers.items()
    }
    if result.confusion:
        names, matrix = result.confusion
        found |= dict(zip(MATRIX, (matrix, names), strict=True))
    found |= result.texts
    atomic.write_text(path, json.dumps(found, indent=2) + "\n")


def read_any(experiment: Experiment, folder: Path) -> Finished | Measured:
    """The numbers of a finished run of any program.

    Args:
        folder: of the run.

    Raises:
        FileNotFoundError: it is not finished.
        Refusal: a file is damaged, or of another run.
    """
    return (read_finished if experiment.built_in else read_measured)(experiment, folder)


def line_of(experiment: Experiment, folder: Path, names: Names) -> str:
    """The same in one line.

    Args:
        names: of the experiment's numbers.

    Raises:
        FileNotFoundError, Refusal: as `read_any`.
    """
    found = read_any(experiment, folder)
    if isinstance(found, Finished):
        return accuracy_line(found.evaluation)
    numbers = found.columns(names)
    said = ", ".join(f"{key} {value:.6g}" for key, value in numbers.items())
    if experiment.evaluation and not found.evaluation.numbers:
        return f"{said or 'finished'}; its evaluation left no number"
    left = [each["text"] for each in found.about["incidents"] if each["kind"] == EMPTY]
    return f"{said or 'finished'}; {left[-1]}" if left else said or NO_NUMBERS
