"""Numbers that a program of the user's writes in its own way: tables, JSON, lines of a log."""

import csv
import io
import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any, TypeGuard

from manynodes.base import atomic
from manynodes.base.errors import Refusal, parts_of, reason, shown, uncoloured
from manynodes.base.reading import MOST, read_bytes, refuse_separator
from manynodes.checkpointing import incidents
from manynodes.checkpointing.owner import look
from manynodes.experiment.log_lines import COUNTS, columns_of, patterns_of
from manynodes.programs.folders import Folders, starts_of
from manynodes.reporting.counting import (
    Anew,
    Counted,
    Tell,
    alike,
    in_epochs,
    is_still,
    known_epoch,
    of_the_last_start,
    refuse_anew,
    refuse_units,
    to_nobody,
)
from manynodes.reporting.metrics import (
    GOOD,
    HALF,
    MOST_COLUMNS,
    THERE_TOO,
    Row,
    number_of,
    numeric,
    read_metrics,
    write_metrics,
)

MOST_LINE = 4000  # characters of a line of a log that are looked at
MOST_BRACES = 100  # at which an object of a line may begin
# Columns whose numbers say of which part of a training a row is.
PARTS = ("fold", "rank")
DECIMAL_COMMA = re.compile(r"\s*[-+]?\d*,\d+\s*")
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
# Cells with a comma by their column, and whether it can only be a decimal one.
Commas = dict[tuple[str, bool], str]


def metrics_of(
    run: Path, given: str | Mapping[str, Any] | None, tell: Tell = to_nobody
) -> list[Row]:
    """The rows of a run, from wherever its program writes them.

    Args:
        given: the key `metrics`.
        tell: as of `of_the_last_start`; of lines of a log, `collected` has told.

    Raises:
        Refusal: they are not there, or are no such rows.
    """
    starts = starts_of(Folders(run))
    if given is None:
        # Not what was collected by an earlier key.
        return read_metrics(Folders(run).work / "metrics.csv", max(0, len(starts) - 1), tell)
    if in_log(given):
        if not (rows := rows_in_log(run, given)):
            what = first_unread(run, patterns_of(given))
            what = what or f"no line of {Folders(run).printed}/*.log matches"
            raise Refusal(f"metrics: {what}; correct the expressions of metrics.log")
        _, anew, commas = printed_rows(run, patterns_of(given))
        refuse_commas(commas, "leave its group out of metrics.log, or let the program print points")
        if anew > 1:
            count = columns_of(patterns_of(given))[0]
            raise Refusal(
                f"metrics: {count} begins anew in each epoch, and rows are told apart by it; leave "
                "its group out of metrics.log and count epoch, or let the program count on"
            )
        return rows
    return read_user_metrics(run / "work", given, starts, tell)


def in_log(given: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether the key `metrics` names lines of a log."""
    return isinstance(given, Mapping) and "log" in given


def read_user_metrics(
    folder: Path,
    given: str | Mapping[str, str],
    starts: Sequence[tuple[float, float]] = (),
    tell: Tell = to_nobody,
) -> list[Row]:
    """The rows of files of the program: CSV, JSON lines, a list of objects in a JSON file, or
    TensorBoard's event files.

    Columns without any number are left out; a text among numbers is none. Rows with the same count
    become one: some programs write the numbers of training and of validation in rows of their own,
    and one that starts again may write its header again.

    Args:
        folder: where the program writes.
        given: a path in it, with `*` for any name, and after `#` the place in a JSON file, such as
            `trainer_state.json#log_history`; or `{"tensorboard": path}` of a folder.
        starts: as of `starts_of`.
        tell: as of `of_the_last_start`.

    Raises:
        Refusal: there is no such file, or it has no such rows, or no numbers in them.
    """
    restarts = max(0, len(starts) - 1)
    if not isinstance(given, str):
        began = sorted(at for at, _ in starts)
        return merged(scalars(folder / str(given.get("tensorboard")), began), restarts, tell)
    pattern, _, place = given.partition("#")
    # The newest file last: its rows replace those of an earlier attempt.
    paths = without_links(folder, newest_last(folder, pattern))
    if not paths:
        raise Refusal(f"metrics: {folder / pattern} is not there; correct the key metrics")
    files = {path: rows_in(path, place) for path in paths}
    groups = by_start(
        # A file without a number is no part of it.
        [path for path in paths if any(map(numbers_in, files[path]))],
        sorted(at for _, at in starts),
    )
    if any(len(group) > 1 for group in groups):
        paths = [path for group in groups for path in group]
        apart = {path: merged(files[path], restarts, tell) for path in paths}
        if any(differ(apart[path] for path in group) for group in groups):
            return beside(dict(zip(names_of(folder, paths), apart.values(), strict=True)))
    return merged((row for rows in files.values() for row in rows), restarts, tell)


def by_start(paths: Sequence[Path], began: Sequence[float]) -> list[list[Path]]:
    """The files that each start of the program has written. Those of different starts are attempts
    at the same.
    """
    found: dict[int, list[Path]] = {}
    for path in paths:
        # A checkpoint that is removed while we look.
        with suppress(OSError):
            found.setdefault(bisect_right(began, path.stat().st_mtime), []).append(path)
    return list(found.values())


def differ(tables: Iterable[Sequence[Row]]) -> bool:
    """Whether two of some tables have different numbers at the same count; newer ones may have all
    rows of older ones, as `trainer_state.json` in each checkpoint.
    """
    seen: dict[tuple[str, str, float | None], float] = {}
    for rows in tables:
        for row in rows:
            at, *others = row.items()
            for name, value in others:
                if value is None or name in COUNTS:
                    continue
                if not alike(seen.setdefault((name, *at), value), value):
                    return True
    return False


def names_of(folder: Path, paths: Sequence[Path]) -> list[str]:
    """Names of files: the parts of their paths in which they differ."""
    parts = [path.relative_to(folder).parts for path in paths]
    if len({*map(len, parts)}) == 1:
        several = [len({*each}) > 1 for each in zip(*parts, strict=True)]
        parts = [
            tuple(part for part, kept in zip(each, several, strict=True) if kept) for each in parts
        ]
    return ["/".join(each) for each in parts]


def beside(tables: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Tables with the same count as one, with their names before those of their columns.

    Raises:
        Refusal: they count different things.
    """
    counts = sorted({next(iter(rows[0])) for rows in tables.values() if rows})
    if len(counts) > 1:
        raise Refusal(
            f"metrics: of its files one counts {shown(counts[0])}, another {shown(counts[1])}; "
            "name one file, or let the rows of all have the same count"
        )
    listed = [
        {name if name in (*counts, *COUNTS) else f"{table}/{name}": row[name] for name in row}
        for table, rows in tables.items()
        for row in rows
    ]
    columns = sorted(
        dict.fromkeys(name for row in listed for name in row), key=lambda name: name not in counts
    )
    found: dict[float, Row] = {}
    for row in listed:
        into = found.setdefault(float(row[counts[0]] or 0), dict.fromkeys(columns))
        into |= {name: value for name, value in row.items() if value is not None}
    return [found[number] for number in sorted(found)]


def rows_in(path: Path, place: str) -> list[dict[str, Any]]:
    """The rows of one file, with any values.

    Raises:
        Refusal: it has none.
    """
    try:
        text = read_bytes(path, MOST).decode("utf-8-sig")
        if holds_lines(path, text, place):
            *lines, last = text.split("\n")
            found: Any = [json_of(path, *line) for line in enumerate(lines, 1) if line[1].strip()]
            # A killed process may have left half a line.
            with suppress(ValueError):
                found += [json.loads(last)] if last.strip() else []
        elif path.suffix == ".json":
            found = inside(json.loads(text), place)
        else:
            header = text.partition("\n")[0]
            tabs = "\t" in header and not {",", ";"} & {*header}
            delimiter = "\t" if tabs else ","
            reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
            names = reader.fieldnames or ()
            refuse_separator(f"metrics: {path}", names, THERE_TOO)
            if twice := [name for name, times in Counter(names).items() if name and times > 1]:
                raise Refusal(f"metrics: {path} has two columns {shown(twice[0])}; rename one")
            found = []
            for row in reader:
                if None in row:
                    where = f"metrics: {path}: line {reader.line_num}"
                    raise Refusal(f"{where} has more cells than the first{HALF}")
                if tabs and (cell := decimal_comma(row.values())):
                    where = f"metrics: {path}: line {reader.line_num}"
                    raise Refusal(f"{where}: {cell} may have a decimal comma; write a point")
                found.append(row)
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise ValueError("no list of objects")
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise Refusal(f"metrics: {path}: {reason(error)}; correct the key metrics") from None
    return found


def decimal_comma(cells: Iterable[str | None]) -> str:
    """The first cell that may be a number with a decimal comma; empty without one."""
    given = (cell or "" for cell in cells)
    return next(
        (cell for cell in given if DECIMAL_COMMA.fullmatch(cell) and not THOUSANDS.fullmatch(cell)),
        "",
    )


def holds_lines(path: Path, text: str, place: str) -> bool:
    """Whether a file has a JSON object in each line; many have so under another name."""
    if path.suffix in (".jsonl", ".ndjson"):
        return True
    first, end, _ = text.lstrip().partition("\n")
    if path.suffix != ".json":
        return first[:1] == "{"
    with suppress(ValueError):
        # One value may have several lines, but not a whole object in its first.
        return bool(end) and not place and isinstance(json.loads(first), dict)
    return False


def json_of(path: Path, number: int, line: str) -> Any:
    """The object of a line; the last one, if a killed process has left a part of one before it.

    Raises:
        Refusal: it has none.
    """
    for start in islice(re.finditer(r"\{", line), MOST_BRACES):
        with suppress(ValueError):
            return json.loads(line[start.start() :])
    raise Refusal(f"metrics: {path}: line {number} is no JSON object{HALF}")


def newest_last(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern. The program may remove some meanwhile."""
    found = []
    # It may be no pattern of paths in the folder.
    with suppress(OSError, ValueError, NotImplementedError):
        for path in folder.glob(pattern):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def without_links(folder: Path, paths: Sequence[Path]) -> list[Path]:
    """The files, without those that a link such as `latest` in the folder shows once more."""
    there = folder.resolve()
    real = {path: path.resolve() for path in paths}
    links = {path for path in paths if real[path] != there / path.relative_to(folder)}
    known = {real[path] for path in paths if path not in links}
    return [path for path in paths if path not in links or real[path] not in known]


def scalars(folder: Path, began: Sequence[float]) -> list[dict[str, Any]]:
    """The scalars of all event files in a folder and below it, one for each row, in the order in
    which they were written.

    Folders that were written in different starts of the program are attempts at the same; if two
    with the same scalar were written in one, as `train` and `validation`, its name has that of its
    folder.

    Args:
        began: when each start was, in seconds since the epoch.

    Raises:
        Refusal: there are none.
    """
    # Only here: not every installation has it, and it takes a second.
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    series: dict[str, list[tuple[Path, Any]]] = {}
    for path in {path.parent for path in folder.rglob("events.out.tfevents.*")}:
        try:
            # With a dot: a name with `tfevents` would be taken for that of a file.
            events = EventAccumulator(f"{path}/.", size_guidance={SCALARS: 0}).Reload()
            of_tags = {tag: events.Scalars(tag) for tag in events.Tags()[SCALARS]}
        except Exception as error:  # protobuf and TensorBoard have kinds of their own
            raise Refusal(f"metrics: {path}: {reason(error)}; correct the key metrics") from None
        for tag, values in of_tags.items():
            # A writer that begins again with `purge_step` may have left none.
            if values:
                series.setdefault(tag, []).append((path, values))
    if not series:
        raise Refusal(f"metrics: {folder} has no events with scalars; correct the key metrics")
    found: list[tuple[float, dict[str, Any]]] = []
    for tag, parts in sorted(series.items()):
        parts.sort(key=lambda part: part[1][0].wall_time)
        starts = {bisect_right(began, events[0].wall_time) for _, events in parts}
        at_once = len(starts) < len(parts) or any(
            one[-1].wall_time > other[0].wall_time for (_, one), (_, other) in pairwise(parts)
        )
        for path, events in parts:
            name = f"{path.relative_to(folder).as_posix()}/{tag}" if at_once else tag
            newest = -math.inf
            for each in events:
                # The clock of another node may be behind.
                newest = max(newest, each.wall_time)
                found.append((newest, {"step": each.step, name: each.value}))
    return [row for _, row in sorted(found, key=itemgetter(0))]


def inside(value: Any, place: str) -> Any:
    """A part of a JSON value: `a.b` is `value["a"]["b"]`; for a list the number of an entry.

    Raises:
        ValueError: there is no such part.
    """
    for key in filter(None, place.split(".")):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"it has no {place}") from None
    return value


def merged(
    rows: Iterable[Mapping[str, Any]], restarts: int = 0, tell: Tell = to_nobody
) -> list[Row]:
    """Rows of numbers in the order of their count, one for each count.

    Args:
        restarts: how often the program has started again.
        tell: as of `of_the_last_start`.
    """
    listed = [{str(name).strip(): value for name, value in row.items()} for row in rows]
    written = dict.fromkeys(name for row in listed for name in row)
    # `Epoch` counts too.
    plain_names = {name: name.lower() for name in written
                   if name.lower() in COUNTS and name.lower() not in written}  # fmt: skip
    if plain_names:
        listed = [{plain_names.get(name, name): row[name] for name in row} for row in listed]
    names = [plain_names.get(name, name) for name in written if name]
    refuse_commas(commas_in(listed), "write points; if the training is over, correct its file")
    numbers = [numbers_in(row) for row in listed]
    columns = [name for name in names if any(name in row for row in numbers)]
    if not columns:
        if listed:
            raise Refusal("metrics: no column has a number; correct the key metrics")
        return []
    if len(columns) > MOST_COLUMNS or any(map(numeric, names)):
        raise Refusal("metrics: the file has no line that names its columns; write one")
    # A column of names may have some that are numbers.
    pure = [
        name
        for name in columns
        if all(name in found or row.get(name) in (None, "", name)
               for found, row in zip(numbers, listed, strict=True))
    ]  # fmt: skip
    count = next((name for name in COUNTS if name in columns), "")
    if not count and rises(numbers, (pure or columns)[0], restarts):
        count = (pure or columns)[0]
    if not count:
        # Such as a loss: the rows are as they come.
        count = "row" if "row" not in names else f"row of {len(names)} columns"
        numbers = [row | {count: float(number)} for number, row in enumerate(numbers, 1)]
        columns.append(count)
    columns.sort(key=lambda name: name != count)
    numbers = placed(numbers, count)
    texts = [
        {name: cell for name, cell in row.items()
         if isinstance(cell, str) and cell.strip() and name not in found}
        for row, found in zip(listed, numbers, strict=True)
    ]  # fmt: skip
    refuse_told_apart(counts_of(numbers, count), numbers, texts, columns)
    # Of rows that count, also where their cell is empty.
    counted = {count, *(name for row, found in zip(listed, numbers, strict=True)
                        if count in found for name in row)}  # fmt: skip
    others = {*columns} - counted
    found = by_count(numbers, columns, others, restarts, tell)
    empty = {name for name in others if all(row[name] is None for row in found.values())}
    return [
        {name: value for name, value in found[number].items() if name not in empty}
        for number in sorted(found)
    ]


def placed(rows: Sequence[dict[str, float]], count: str) -> list[dict[str, float]]:
    """Rows in which those that are counted in epochs among others in steps have no count: such a
    row belongs to the newest, which is where it was written.

    Raises:
        Refusal: one of these has a result in a column of the others, which would be lost.
    """
    found = in_epochs(rows, count)
    steps = {name for at, row in enumerate(rows) if at not in found for name in row}
    for at in sorted(found):
        if lost := [name for name in rows[at] if name in steps and GOOD.search(name)]:
            refuse_units(
                count, next((name for name in rows[at] if name not in steps), lost[0]), lost[0]
            )
    return [{name: row[name] for name in row if name != count} if at in found else row
            for at, row in enumerate(rows)]  # fmt: skip


def by_count(
    rows: Sequence[Mapping[str, float]],
    columns: Sequence[str],
    others: Collection[str],
    restarts: int,
    tell: Tell,
) -> dict[float, Row]:
    """Rows of the same count as one.

    Args:
        columns: the first one counts.
        others: those of no row that counts.
        restarts, tell: as of `of_the_last_start`.
    """
    count = columns[0]
    written: list[Counted] = [
        (number, {name: row[name] for name in columns if name in row})
        for number, row in zip(counts_of(rows, count), rows, strict=True)
        if math.isfinite(number)
    ]
    found: dict[float, Row] = {}
    anew = 0
    for number, given in of_the_last_start(written, restarts, count, COUNTS, tell):
        into = found.setdefault(number, dict.fromkeys(columns))
        if given.get(count) != number:
            # It adds to the row that it belongs to, and changes nothing there.
            fixed = {*COUNTS, *(name for name in into if name not in others and known(into[name]))}
            given = {name: value for name, value in given.items() if name not in fixed}
        elif known_epoch(into) and known_epoch(given):
            anew += into["epoch"] != given["epoch"]
        # Some programs fill what they have not measured with NaN.
        into |= {name: value for name, value in given.items()
                 if value is not None and (known(value) or not known(into[name]))}  # fmt: skip
    # Once, it may be a row after the last epoch.
    if anew > 1:
        refuse_anew(count)
    return found


def refuse_told_apart(
    counts: Sequence[float],
    rows: Sequence[Mapping[str, float]],
    texts: Sequence[Mapping[str, str]],
    columns: Sequence[str],
) -> None:
    """Refuse rows of one count that another column tells apart, such as those of folds, or of
    training and validation: the last one would replace the others.

    Args:
        counts: of the rows.
        rows, texts: the numbers of each, and its other cells.
        columns: of numbers; the first one counts.

    Raises:
        Refusal: naming the column.
    """
    count = columns[0]
    parts = [name for name in columns if name.lower() in PARTS]
    measured = [name for name in columns if name not in (count, *COUNTS, *parts)]
    latest: dict[tuple[float, str], int] = {}
    pairs: Counter[tuple[str, frozenset[str]]] = Counter()
    starts: list[int] = []  # how often the count has gone back before each row
    newest = -math.inf
    for number, (at, row) in enumerate(zip(counts, rows, strict=True)):
        starts.append((starts[-1] if starts else 0) + (at < newest))
        if not math.isfinite(at):
            continue
        newest = at
        names = [name for name in measured if name in row]
        replaced = {
            before
            for name in names
            if (before := latest.get((at, name))) is not None
            if rows[before][name] != row[name]
            and (GOOD.search(name) or is_part(rows[before], row, measured))
        }
        latest |= dict.fromkeys(((at, name) for name in names), number)
        for before in replaced:
            for name in parts:
                if name.lower() == "rank" and starts[before] != starts[number]:
                    continue  # a number of this name may be a result
                if len({each[name] for each in (rows[before], row) if name in each}) > 1:
                    refuse_column(count, name)
            # After a restart, a date or a host may be another one.
            if starts[before] == starts[number]:
                pairs.update((name, frozenset((texts[before][name], text)))
                             for name, text in texts[number].items()
                             if name in texts[before])  # fmt: skip
    for (name, pair), times in pairs.items():
        # Of a time, each is another one.
        if len(pair) > 1 and (times > 1 or not any(map(str.isdigit, "".join(pair)))):
            refuse_column(count, name)


def is_part(one: Mapping[str, float], other: Mapping[str, float], names: Sequence[str]) -> bool:
    """Whether a row has no number of its own; others may share a time."""
    first, second = ({*names} & each.keys() for each in (one, other))
    return first <= second or second <= first


def refuse_column(count: str, name: str) -> None:
    raise Refusal(
        f"metrics: rows of the same {count} differ in {shown(name)}, and the last would replace "
        "the others; write a column for each, or name a file with one of them"
    )


def known(value: float | None) -> TypeGuard[float]:
    """Whether it is a number, and not NaN."""
    return value is not None and not math.isnan(value)


def rises(rows: Sequence[Mapping[str, float]], name: str, restarts: int) -> bool:
    """Whether a column has whole numbers that rise from row to row, as those that count rows do. Of
    an accuracy, those of another run need not rise. They may go back after a restart, or to where
    they began, which is refused later.
    """
    found = [row[name] for row in rows if name in row]
    if not all(number.is_integer() for number in found):
        return False
    back = [other for one, other in pairwise(found) if other < one]
    if sum(other > min(found) for other in back) > restarts:
        return False
    return 3 * len(back) < len(found) and len(found) < 2 * len(rows) and len({*found}) > 1


def counts_of(rows: Sequence[Mapping[str, float]], count: str) -> list[float]:
    """The count of each row. One without it belongs to the last of its epoch, such as validation
    beside rows of steps, or if that is not known to the newest; NaN before the first count.
    """
    last: dict[float, float] = {}
    for row in rows:
        number, epoch = row.get(count, math.nan), row.get("epoch", math.nan)
        if math.isfinite(number) and math.isfinite(epoch):
            last[epoch] = max(number, last.get(epoch, number))
    found, newest = [], math.nan
    for row in rows:
        if math.isfinite(number := row.get(count, math.nan)):
            newest = number
        else:
            number = last.get(row.get("epoch", math.nan), newest)
        found.append(number)
    return found


def numbers_in(row: Mapping[str, Any]) -> dict[str, float]:
    """The cells of a row that have a number."""
    plain_cells = ((name, plain(cell) if isinstance(cell, str) else cell)
                   for name, cell in row.items())  # fmt: skip
    return {name: number_of(cell) for name, cell in plain_cells
            if cell not in (None, "") and numeric(cell)}  # fmt: skip


def plain(text: str) -> str:
    """A number without what may stand around it: `\\S+` takes `[0.3],`, `2.0.` and `1,234` too."""
    found = bare(text)
    return found.replace(",", "") if THOUSANDS.fullmatch(found) else found


def bare(text: str) -> str:
    """The same with the commas of thousands."""
    return text.strip().lstrip("([{'\"").rstrip(".,;:%)]}'\"")


def commas_in(rows: Iterable[Mapping[str, Any]]) -> Commas:
    """The first cell of each column that has commas between thousands, and the first of which the
    comma can only be a decimal one.
    """
    commas: Commas = {}
    cells = ((name, cell) for row in rows for name, cell in row.items())
    for name, cell in cells:
        if not isinstance(cell, str) or "," not in cell:
            continue
        is_whole = bool(THOUSANDS.fullmatch(bare(cell)))
        if is_whole or DECIMAL_COMMA.fullmatch(bare(cell)):
            commas.setdefault((name, not is_whole), cell)
    return commas


def refuse_commas(commas: Commas, remedy: str) -> None:
    """Refuse a column in which some numbers have a decimal comma, and others would be taken for a
    thousand times as much.

    Raises:
        Refusal: naming one of each.
    """
    for (name, is_decimal), cell in commas.items():
        if is_decimal and (other := commas.get((name, False))):
            both = f"{shown(name)} is {shown(other)} and {shown(cell)}"
            raise Refusal(f"metrics: {both}, which has a decimal comma; {remedy}")


def rows_in_log(run: Path, given: Mapping[str, Any]) -> list[Row]:
    """The rows that were collected from the lines of a run's program; if they are by other
    expressions, or none, those of all lines that it has printed.
    """
    folders, patterns = Folders(run), patterns_of(given)
    # An earlier version has not kept the expressions.
    if expressions_of(folders) in (None, patterns):
        rows = read_metrics(folders.metrics)
        if rows and list(rows[0]) == columns_of(patterns):
            return rows
    return printed_rows(run, patterns)[0]


def expressions_of(folders: Folders) -> Any:
    """The expressions, or the other key, by which rows were collected last; None if that is not
    known.
    """
    with suppress(OSError, ValueError):
        return json.loads(read_bytes(folders.expressions, MOST))
    return None


def collected(folders: Folders, given: Mapping[str, Any]) -> "LogRows":
    """What collects rows from lines of a log, after those that are there, and keeps by which
    expressions it does.
    """
    patterns, rows = patterns_of(given), rows_in_log(folders.run, given)
    begin_rows(folders, patterns, rows)
    return LogRows(patterns, folders.metrics, rows, lambda *again: note_anew(folders, *again))


def begin_rows(folders: Folders, key: Any, rows: Sequence[Row] = ()) -> None:
    """Keep by which key rows are collected from now on, and no rows that another key has left.

    Args:
        key: the expressions, or what else `metrics` names; None if the program writes metrics.csv,
            and none are collected.
        rows: that are there by this key.
    """
    if key is None:
        folders.metrics.unlink(missing_ok=True)
    elif expressions_of(folders) != key:
        # In this order: wherever it is ended, no rows are taken for those of another key.
        folders.metrics.unlink(missing_ok=True)
        atomic.write_text(folders.expressions, json.dumps(key) + "\n")
        if rows:
            write_metrics(folders.metrics, rows)


def note_anew(folders: Folders, count: float, counts: int) -> None:
    """Add an incident if a program that had saved something when it last started, and so continued,
    has counted from the beginning again: all rows of the starts before are left out.
    """
    found = None
    with suppress(OSError):
        found = look(folders.state / "owner.json")
    if not found or found.record.position[1] < 1:
        return
    rows = f"rows of {counts} earlier counts are" if counts > 1 else "row of an earlier start is"
    text = (
        f"the program had saved something when it last started, and counted from {count:g} again: "
        f"the {rows} left out; let it count on where it continues"
        f"{', unless it had saved before that row' * (counts < 2)}"
    )
    if not any(each.text == text for each in incidents.read(folders.state)):
        incidents.add(folders.state, incidents.ANEW, text)


def printed_rows(run: Path, patterns: Sequence[str]) -> tuple[list[Row], int, Commas]:
    """The rows in all lines that a run's program has printed, how many of them another one of the
    same start has replaced after the count had gone back, and the commas in their numbers.
    """
    folders = Folders(run)
    rows: list[Row] = []
    anew = 0
    commas: Commas = {}
    for log in sorted(folders.printed.glob("*.log")):
        start = LogRows(patterns, folders.metrics, rows)
        for line in lines_of(log):
            start.hear(line)
        start.end()
        rows = start.in_order
        anew = max(anew, start.anew.lost(0) + start.still)
        commas = start.commas | commas
    return rows, anew, commas


def first_unread(run: Path, patterns: Sequence[str]) -> str:
    """The first group of a line that matches and is no number, in words; empty if none is."""
    for log in sorted(Folders(run).printed.glob("*.log")):
        for part in (part for line in lines_of(log) for part in (line, *parts_of(line))):
            for match in filter(None, (matched(re.compile(each), part) for each in patterns)):
                for name, text in match.groupdict().items():
                    if text and not numeric(plain(text)):
                        return f"the group {name} matches {shown(text)}, which is no number"
    return ""


def matched(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    """The match of an expression in a line without its colours, or as it was printed; none if a
    group goes on behind what is looked at, as the rest of a number would.
    """
    for text in (uncoloured(line), line) if "\x1b" in line else (line,):
        if found := pattern.search(text[:MOST_LINE]):
            ends = map(found.end, pattern.groupindex)
            is_cut = text[MOST_LINE : MOST_LINE + 1].strip() and MOST_LINE in ends
            return None if is_cut else found
    return None


def lines_of(log: Path) -> Iterator[str]:
    """The lines of a log, as far as it can be read."""
    with suppress(OSError), log.open(encoding="utf-8", errors="replace") as lines:
        yield from lines


class LogRows:
    """Collects rows from the lines of a program, and writes them to metrics.csv as they come.

    Args:
        patterns: with named groups for numbers, one of which counts, see `columns_of`. A line
            without that group adds to the row of the newest count; before the first count of this
            start, only if none follows.
        path: of metrics.csv.
        before: rows by the same patterns that an interrupted attempt has left, which stay up to
            the first new one.
        tell: as of `of_the_last_start`.

    Attributes:
        anew: notices a count that begins anew.
        commas: in the numbers that its groups have matched.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        path: Path,
        before: Sequence[Row],
        tell: Tell = to_nobody,
    ) -> None:
        self.patterns, self.path, self.tell = [re.compile(each) for each in patterns], path, tell
        self.columns = columns_of(patterns)
        count = self.columns[0]
        self.rows = {at: row for row in before if (at := row[count]) is not None}
        self.begun = self.changed = False
        # The first count of this start, if rows from there on are to be told of, and how many.
        self.again = (math.nan, 0)
        self.anew = Anew()
        self.commas: Commas = {}
        self.still = 0  # rows that the same count in another epoch has replaced
        self.count = math.nan  # of the newest line with one
        self.uncounted: Row = {}  # of the lines before it
        self.lock = Lock()  # both streams of the program have a thread

    @property
    def in_order(self) -> list[Row]:
        return [self.rows[count] for count in sorted(self.rows)]

    def hear(self, line: str) -> None:
        """Look at a line, and apart at what stands in it behind a bar. One expression may find
        numbers of both at once; of several, each has its own part.
        """
        parts = parts_of(line)
        if len(parts) > 1 and len(self.patterns) == 1 and matched(self.patterns[0], line):
            parts = (line,)
        for part in parts:
            self.take(part)

    def take(self, line: str) -> None:
        """Look at a line, or a part of one."""
        for pattern in self.patterns:
            if (match := matched(pattern, line)) is None:
                continue
            self.commas = commas_in([match.groupdict()]) | self.commas
            given = {name: plain(text) for name, text in match.groupdict().items() if text}
            row = {name: number_of(text) for name, text in given.items() if numeric(text)}
            counts = {self.columns[0]}
            unknown = given.keys() - row.keys()
            # A line that counts may have nothing else; one with others has one of them.
            if not row or counts & unknown or (row.keys() == counts and unknown):
                continue
            with self.lock:
                count = row.get(self.columns[0], self.count)
                if not math.isfinite(count):
                    self.uncounted |= row
                    continue
                still, self.count = count == self.count, count
                if not self.begun:
                    if count <= min(self.rows, default=-math.inf):
                        self.again = (count, len(self.rows))
                    self.rows = {key: old for key, old in self.rows.items() if key <= count}
                self.begun = self.changed = True
                old = self.rows.get(count, dict.fromkeys(self.columns))
                others = {name: value for name, value in row.items() if name not in counts}
                # One alone is only repeated if the start before had not saved after it.
                differs = not all(alike(old.get(name), value) for name, value in others.items())
                if self.again[1] > 1 or (differs and self.again[0] == count):
                    self.tell(*self.again)
                    self.again = (math.nan, 0)
                self.anew.take(count, others, old)
                if still and known_epoch(old) and known_epoch(row):
                    self.still += is_still((count, old), (count, {**row}), (*counts, "epoch"))
                self.rows[count] = {**old, **row}

    def end(self) -> None:
        """The program has ended. One that was killed in its last test repeats it, and counts
        nothing; before a line that counts, a number may be of weights that were loaded.
        """
        with self.lock:
            if self.rows and self.uncounted and not self.begun:
                self.rows[max(self.rows)] |= self.uncounted
                self.changed = True

    def write(self) -> None:
        """Write what is new."""
        with self.lock:
            rows = self.in_order
            self.changed, changed = False, self.changed
        if changed:
            write_metrics(self.path, rows)


def read_user_result(folder: Path, given: str) -> bytes:
    """The numbers, texts and confusion matrix of a JSON file of the program, as result.json has
    them.

    Args:
        given: as for `read_user_metrics`, one file.

    Raises:
        Refusal: there is no such file, or no object at that place.
    """
    # Only here: a program that trains starts without it.
    from manynodes.reporting.measures import MATRIX, parse_result

    pattern, _, place = given.partition("#")
    paths = newest_last(folder, pattern)
    if not paths:
        raise Refusal(f"result: {folder / pattern} is not there; correct the key result")
    try:
        found = inside(json.loads(read_bytes(paths[-1], MOST)), place)
        if not isinstance(found, dict):
            raise ValueError(f"no object at {place or 'its top'}")
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(f"result: {paths[-1]}: {reason(error)}; correct the key result") from None
    # What is null has diverged, if it is a number: others may be a text elsewhere.
    kept = {key: value for key, value in found.items()
            if isinstance(value, int | float | str | bool) or (value is None and GOOD.search(key))
            if key not in MATRIX and key and len(key) <= 100}  # fmt: skip
    matrix = {key: found[key] for key in MATRIX if key in found}
    # Another program's may have another form, as its other lists; these are left out.
    with suppress(Refusal):
        parse_result(json.dumps(matrix).encode(), paths[-1])
        kept |= matrix
    return json.dumps(kept).encode()
