"""result.json, which a program of the user's may write, and the numbers of its finished run."""

import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manynodes.base import atomic
from manynodes.base.errors import Refusal, drawable, reason
from manynodes.base.reading import MOST, NotAFile, parse_form, read_bytes, read_json
from manynodes.checkpointing.incidents import EMPTY
from manynodes.experiment.config import COLUMNS, REPEATS, Experiment
from manynodes.reporting.metrics import LARGEST, Row, newest, read_metrics
from manynodes.reporting.results import accuracy_line, read_about_of, read_finished
from manynodes.reporting.sums import EVALUATE, REMAKE, of_files, refuse_changed

# The keys that say where the numbers of a program of the user's are.
READ_BY = ("metrics", "result")
# What a number is of; the first of one name has it for itself.
ORIGINS = ("result", "evaluated", "newest")
EVALUATED = "evaluated.json"  # beside evaluation.json: what it is of
# A program that did nothing may end with 0 too.
NO_NUMBERS = (
    "without numbers; the keys metrics and result say where they are, if it has any; then add "
    "--config replace=true"
)
MOST_WHOLE = 2**53  # a larger whole number has no column of its own kind
MATRIX = ("confusion_matrix", "class_names")  # keys of result.json that are no numbers
Confusion = tuple[list[str], list[list[int]]]
Of = tuple[str, str]  # one of ORIGINS, and the number's own name


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
class Measured:
    """What a finished run has measured, each of this run and of no other.

    Attributes:
        about: run.json.
        result, evaluation: of its training and of its evaluation.
        metrics: the rows of metrics.csv.
        numbers: those of the result and of the evaluation, or of a program that writes none the
            newest of its rows.
        sums: SHA-256 of run.json and evaluation.json, by name.
    """

    about: dict[str, Any]
    result: Result
    evaluation: Result
    metrics: list[Row]
    numbers: dict[Of, float]
    sums: dict[str, str]


def numbers_of(result: Result, evaluation: Result, metrics: Sequence[Row]) -> dict[Of, float]:
    """Those of `Measured`."""
    found = {("result", key): value for key, value in result.numbers.items()}
    found |= {("evaluated", key): value for key, value in evaluation.numbers.items()}
    return found or {("newest", key): checked(value) for key, value in newest(metrics).items()}


def columns_of(axes: Iterable[str], numbers: Iterable[Iterable[Of]]) -> dict[Of, str]:
    """What numbers are called: a name means the same in all runs that are compared, each of which
    may have written others, and none of them is that of an axis.

    Args:
        axes: of all these runs.
        numbers: of each run.
    """
    written = dict.fromkeys(of for each in numbers for of in each)
    found: dict[Of, str] = {}
    used = {"run", *COLUMNS, *REPEATS, *axes}
    for origin, key in sorted(written, key=lambda of: ORIGINS.index(of[0])):
        found[origin, key] = unused(key, origin, used)
        used.add(found[origin, key])
    return found


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
    return Measured(about, result, evaluation, rows, numbers_of(result, evaluation, rows), sums)


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


@dataclass(frozen=True)
class Told:
    """What there is to tell of a finished run.

    Attributes:
        numbers: those of a program of the user's.
        line: of the classifier, its accuracy.
        remark: on the numbers, such as why there are none; empty if there is nothing to say.
    """

    numbers: dict[Of, float] = field(default_factory=dict)
    line: str = ""
    remark: str = ""

    def words(self, columns: Mapping[Of, str]) -> str:
        """The numbers in one line."""
        said = (f"{columns[of]} {value:.6g}" for of, value in self.numbers.items())
        return self.line or ", ".join(said)


def told(experiment: Experiment, folder: Path) -> Told:
    """What there is to tell of a finished run of any program.

    Args:
        folder: of the run.

    Raises:
        FileNotFoundError: it is not finished.
        Refusal: a file is damaged, or of another run.
    """
    if experiment.built_in:
        return Told(line=accuracy_line(read_finished(experiment, folder).evaluation))
    found = read_measured(experiment, folder)
    left = [each["text"] for each in found.about["incidents"] if each["kind"] == EMPTY]
    if experiment.evaluation and not found.evaluation.numbers:
        left = ["its evaluation left no number"]
    return Told(found.numbers, remark=left[-1] if left else "" if found.numbers else NO_NUMBERS)
