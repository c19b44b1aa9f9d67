"""The runs of an experiment as a table."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from manynodes.base.errors import Refusal, reason, shown
from manynodes.base.reading import read_bytes, refuse_separator
from manynodes.experiment.file import MOST_BYTES, check_node
from manynodes.experiment.keys import MOST_RUNS, Keys, kinds
from manynodes.experiment.paths import with_paths


def with_table(config: Mapping[str, Any], folders: Sequence[Path], keys: Keys) -> dict[str, Any]:
    """The configuration with the rows of the CSV file that `runs` names, a column per key.

    Args:
        folders, keys: as for `with_paths`.

    Raises:
        Refusal: the file is missing, or is no such table.
    """
    path = config.get("runs")
    if not isinstance(path, str):
        return dict(config)
    try:
        text = read_bytes(Path(path), MOST_BYTES).decode("utf-8-sig")
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
        # A spreadsheet may leave rows of empty cells behind.
        lines = [line for line in lines if any(cell.strip() for cell in line)]
    except FileNotFoundError:
        raise Refusal(f"config: runs: {path} is not there; give a CSV file or a list") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Refusal(f"config: runs: {path} is not a CSV file: {reason(error)}") from None
    if len(lines) < 2 or len(lines) > MOST_RUNS + 1:
        raise Refusal(
            f"config: runs: {path} has {max(0, len(lines) - 1):,} rows; give a line with the keys, "
            f"and 1 to {MOST_RUNS:,} runs"
        )
    header = [name.strip() for name in lines[0]]
    refuse_separator(f"config: runs: {path}", header)
    if len(set(header)) < len(header) or not all(header):
        raise Refusal(f"config: runs: {path}: the first line must name every key, each once")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(header):
            raise Refusal(
                f"config: runs: {path}: row {number} has {len(line)} cells, not {len(header)} as "
                "the first line, which names the keys"
            )
        rows.append(dict(zip(header, map(str.strip, line), strict=True)))
    if keys.declared:
        rows = [{key: cell_value(key, cell, keys) for key, cell in row.items()} for row in rows]
    typed = keys.typed_rows(rows, as_written=False)
    return dict(config) | {"runs": [with_paths(row, folders, keys) for row in typed]}


def cell_value(key: str, cell: str, keys: Keys) -> Any:
    """What a cell stands for: a list or a mapping as in YAML, or a text.

    Raises:
        Refusal: it is an incomplete list or mapping, or has a date, say, in it.
    """
    if key in keys.axes and kinds(keys.axes[key]) <= {"string", "null"}:
        return cell
    if cell in ("TRUE", "FALSE"):  # as spreadsheets write them
        return cell.lower()
    if cell[:1] not in ("[", "{"):
        return cell
    try:
        loader = yaml.SafeLoader(cell)
        if (node := loader.get_single_node()) is None:
            raise ValueError
        check_node(node, lambda _: f"config: runs: {key}")
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        raise Refusal(
            f"config: runs: {key}: {shown(cell)} is not a list or mapping as in YAML"
        ) from None
