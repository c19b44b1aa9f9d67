"""What interrupted a run, and which of its nodes were slow.

A file beside the run's states, one JSON object a line, to which `launch` and the training append.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ddp.base.errors import one_line
from ddp.base.provenance import now
from ddp.base.reading import MOST, parse_form, read_bytes
from ddp.checkpointing.owner import Record, look, refuse_owned

FILE = "incidents.jsonl"
INTERRUPTION, SLOW = "interruption", "slow"
LONGEST = 400  # characters of a text
SHOWN = 100  # the last ones of a run


@dataclass(frozen=True)
class Incident:
    """Something that went wrong.

    Attributes:
        time: in UTC, ISO 8601.
        kind: INTERRUPTION or SLOW.
        text: in one line.
    """

    time: str
    kind: str
    text: str


def add(folder: Path, kind: str, text: str) -> None:
    """Add an incident to those of the run whose states are in the folder.

    A folder that is not there, or cannot be written, is left alone: a training must not fail of it.
    """
    line = json.dumps(asdict(Incident(now(), kind, one_line(text, LONGEST)))) + "\n"
    with suppress(OSError), (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(line)


def read(folder: Path) -> list[Incident]:
    """The last incidents of the run; what is no incident is left out."""
    found = []
    with suppress(OSError):
        for line in read_bytes(folder / FILE, MOST).splitlines()[-SHOWN:]:
            with suppress(ValueError):
                found.append(Incident(**parse_form(line, "incident")))
    return found


def forget(folder: Path) -> None:
    """Begin a new training of the run."""
    (folder / FILE).unlink(missing_ok=True)


def begin(folder: Path, name: str, tell: Callable[[str], None]) -> None:
    """Begin an attempt, see `refuse_owned`; an owner that is dead is an incident."""
    before = look(folder / "owner.json")
    refuse_owned(folder, name, tell)
    if before:
        note_lost(folder, *before)


def note_lost(folder: Path, owner: Record, touched: int) -> None:
    """Add an owner that ended without a word: its node was lost, or all of its processes killed.

    Args:
        owner: of the run, before this attempt.
        touched: when it was last alive, in ns since the epoch.
    """
    seen = datetime.fromtimestamp(touched // 10**9, UTC).isoformat(timespec="seconds")
    noted = any(each.kind == INTERRUPTION and each.time >= seen for each in read(folder))
    if not (owner.released or noted):
        add(folder, INTERRUPTION, f"{owner.who} was not heard of after {seen}")
