"""What the tables of all experiments share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from manynodes.base import atomic
from manynodes.base.errors import Refusal, drawable, one_line, spreadsheet_text
from manynodes.checkpointing.incidents import LONGEST

INCIDENTS = ("time", "kind", "text")
# Keys of run.json in which the runs of an experiment may not differ.
SAME = {"code_sha256": "code", "sources_sha256": "code", "files_sha256": "files"}
WORDS = SAME | {"initial_sha256": "initial_weights", "data_sha256": "data"}


def refuse_mixture(abouts: Mapping[str, dict[str, Any]]) -> None:
    """Refuse runs of different code, or of different data under one name: their numbers are not
    comparable.

    Args:
        abouts: run.json of each run, by its name.

    Raises:
        Refusal: two of them differ.
    """
    first: dict[tuple[str, str], str] = {}
    for name, about in abouts.items():
        config = about["config"]
        known = {(key, ""): about[key] for key in SAME if key in about}
        if about.get("network_sha256"):
            # The user's network is in this sum; runs of another model have another one.
            known["code_sha256", str(config["model"])] = known.pop(("code_sha256", ""))
        known["data_sha256", str(config.get("dataset"))] = about["data_sha256"]
        if initial := about.get("initial_sha256"):
            known["initial_sha256", str(config["initial_weights"])] = initial
        for (key, of), value in known.items():
            other = first.setdefault((key, of), name)
            if abouts[other][key] != value:
                raise Refusal(
                    f"{other} and {name} were trained with different {WORDS[key]} "
                    f"({key}); train them again: add --config replace=true; also --forcerun "
                    "train if that trains nothing"
                )


def value_words(value: Any, digits: int = 15) -> str:
    """A value of a key as pages, figures and terminals show it: as YAML has it, without brackets.

    Args:
        digits: of a number that needs more than six.
    """
    if value is None or pd.api.types.is_bool(value):
        return str(value).lower()
    if isinstance(value, float):
        return short if float(short := f"{value:.6g}") == value else f"{value:.{digits}g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {value_words(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(value_words, value))
    return drawable(str(value))


def incident_table(run: str, about: dict[str, Any]) -> pd.DataFrame:
    """The incidents of a run, from its run.json."""
    rows = [
        {"run": run, **incident, "text": one_line(incident["text"], LONGEST)}
        for incident in about["incidents"]
    ]
    return pd.DataFrame(rows, columns=["run", *INCIDENTS])


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV, with no text that a spreadsheet would compute or a terminal obey."""
    safe = table.rename(columns=spreadsheet_text)
    for column in safe.select_dtypes(include=["object", "string"]):
        safe[column] = [
            spreadsheet_text(cell) if isinstance(cell, str) else cell for cell in safe[column]
        ]
    with atomic.replacing(path) as temporary:
        safe.to_csv(temporary, index=False)
