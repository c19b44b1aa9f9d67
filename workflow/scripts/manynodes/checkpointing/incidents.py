"""What interrupted a run, which of its nodes were slow, what in it cannot be repeated exactly, and
that it left nothing, counted anew and left rows out, or was of a program that was edited meanwhile.

A file beside the run's states, one JSON object a line, to which `launch`, the training and
`publish` append.
"""

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from manynodes.base.errors import Refusal, one_line
from manynodes.base.provenance import in_utc, now
from manynodes.base.reading import MOST, parse_form, read_bytes
from manynodes.checkpointing.owner import Record, look, refuse_owned
from manynodes.checkpointing.replaced import FINISHED

FILE = "incidents.jsonl"
INTERRUPTION, SLOW, CHECKOUT, INEXACT = "interruption", "slow", "checkout", "inexact"
EMPTY, ANEW, EDITED = "empty", "anew", "edited"
LONGEST = 400  # characters of a text
SHOWN = 100  # the last ones of a run


@dataclass(frozen=True)
class Incident:
    """Something that went wrong.

    Attributes:
        time: in UTC, ISO 8601.
        kind: INTERRUPTION, SLOW, CHECKOUT, INEXACT, EMPTY, ANEW or EDITED.
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
    # Opening a pipe would wait for its reader.
    how = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):
        descriptor = os.open(folder / FILE, how, 0o666)
        with open(descriptor, "r+b", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return
            # A writer that was killed may have left half a line.
            half = status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b"\n"
            file.write(b"\n" * bool(half) + line.encode())


def read(folder: Path) -> list[Incident]:
    """The last incidents of the run; what is no incident is left out."""
    found = []
    with suppress(OSError):
        for line in read_bytes(folder / FILE, MOST).splitlines()[-SHOWN:]:
            with suppress(ValueError):
                each = Incident(**parse_form(line, "incident"))
                found.append(replace(each, text=one_line(each.text, LONGEST)))
    return found


def note_checkout(folder: Path, before: str | None, now: str | None) -> None:
    """Add a commit that was checked out while the training ran: its code is that of `before`."""
    if before != now:
        add(folder, CHECKOUT, f"the checkout changed from commit {before} to {now} meanwhile")


def forget(folder: Path) -> None:
    """Begin a new training of the run."""
    (folder / FILE).unlink(missing_ok=True)


def begin(folder: Path, name: str, tell: Callable[[str], None]) -> None:
    """Begin an attempt, see `refuse_owned`; an owner that is dead is an incident.

    Raises:
        Refusal: as `refuse_owned`; or a folder is a link, which may lead to anybody's files.
    """
    for each in (folder, folder / "checkpoints"):
        if each.is_symlink():
            raise Refusal(f"{each} is a link, which may lead to anybody's files; remove the link")
    before = look(folder / "owner.json")
    refuse_owned(folder, name, tell)
    if before:
        note_lost(folder, *before)


def note_lost(folder: Path, owner: Record, touched: int) -> None:
    """Add an owner of whose end nobody has told: its node was lost, or all of its processes killed;
    or only `launch` was, and the ranks have saved and ended in order.

    Args:
        owner: of the run, before this attempt.
        touched: when it was last alive, in ns since the epoch.
    """
    began = any(folder.glob("epoch=*.safetensors")) and not (folder / FINISHED).exists()
    if owner.released and not began:
        return
    seen = in_utc(touched // 10**9)
    what = f"ended in order at {seen}" if owner.released else f"was not heard of after {seen}"
    if not any(each.kind == INTERRUPTION and each.time >= seen for each in read(folder)):
        add(folder, INTERRUPTION, f"{owner.who} {what}")
