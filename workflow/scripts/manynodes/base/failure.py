"""Why a stage of a run has failed: a record beside its log, from which all messages are made.

The file is there as long as the newest attempt of any stage has failed: an attempt removes it at
its beginning.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from manynodes.base import atomic
from manynodes.base.errors import LONGEST_REPORT, Failed, Refusal, Stopped, error_line, one_line
from manynodes.base.provenance import now
from manynodes.base.reading import MOST, parse_form, read_bytes

FILE = "failure.json"
# Disk that a running attempt keeps for its record: a full disk is a reason too.
RESERVED, RESERVED_BYTES = ".failure.json", 8192


class Kind(StrEnum):
    """What a failure is.

    PREEMPTED: it was asked to stop, and can continue. HUNG: one process did not go on, and the
    others waited for it. REFUSED: it would fail again in the same way. LOST: a node, or what runs
    the program there, is gone.
    """

    FAILED = "failed"
    PREEMPTED = "preempted"
    HUNG = "hung"
    REFUSED = "refused"
    LOST = "lost"


class Again(StrEnum):
    """Whether it was started again: not, in the same job, or by the scheduler."""

    NO = "no"
    HERE = "here"
    REQUEUED = "requeued"


@dataclass(frozen=True)
class Failure:
    """How an attempt of a stage failed.

    Attributes:
        stage: of the run, such as `train`.
        reason: in one line, with who and where.
        who: the process that failed first, such as `rank 3`; empty if no single one did.
        where: its host, or the host that was lost.
        log: file with all of its output; empty if there is none.
        after: what happened then, or what to do, in words.
        time: in UTC, ISO 8601.
    """

    reason: str
    kind: Kind = Kind.FAILED
    who: str = ""
    where: str = ""
    log: str = ""
    after: str = ""
    again: Again = Again.NO
    stage: str = ""
    time: str = ""

    @property
    def line(self) -> str:
        """All of it in one line."""
        log = f"its own log is {self.log}" if self.log else ""
        return joined(self.reason, log, self.after)

    def then(self, what: str, again: Again = Again.NO) -> "Failure":
        """The same, with what happened next."""
        return replace(self, after=joined(self.after, what), again=again)


def joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def of_error(error: Exception) -> Failure:
    """What an error has ended; of one that has a traceback, such as of a user's network, its last
    line.
    """
    if isinstance(error, Stopped | Failed):
        return Failure(str(error), Kind.PREEMPTED if isinstance(error, Stopped) else Kind.FAILED)
    if isinstance(error, Refusal | OSError):
        kind = Kind.REFUSED if isinstance(error, Refusal) else Kind.FAILED
        return Failure(error_line(error), kind)
    return Failure(one_line(f"{type(error).__name__}: {error}"))


def write(folder: Path, stage: str, failure: Failure) -> None:
    """Write the record of a stage of the run whose folder this is.

    A folder that cannot be written is left alone: the message matters more.
    """
    texts = {
        field.name: one_line(str(getattr(failure, field.name)), LONGEST_REPORT)
        for field in fields(Failure)
    }
    text = json.dumps(texts | {"stage": stage, "time": now()}, indent=2) + "\n"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(folder / RESERVED, "r+", opener=atomic.not_through_a_link) as file:
                file.write(text.ljust(RESERVED_BYTES))
            (folder / RESERVED).replace(folder / FILE)
        except OSError:
            atomic.write_text(folder / FILE, text)


def read(folder: Path) -> Failure | None:
    """The record of a run; None if its newest attempt has not failed, or cannot be read."""
    with suppress(OSError, ValueError):
        found = parse_form(read_bytes(folder / FILE, MOST), "failure")
        return Failure(**found | {"kind": Kind(found["kind"]), "again": Again(found["again"])})
    return None


def begin(folder: Path) -> None:
    """Begin an attempt."""
    with suppress(OSError):
        (folder / FILE).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESERVED).unlink(missing_ok=True)
        try:
            with (folder / RESERVED).open("x") as file:
                file.write(" " * RESERVED_BYTES)
        except OSError:  # the disk is full now
            (folder / RESERVED).unlink()


def end(folder: Path) -> None:
    """End an attempt well."""
    for name in (FILE, RESERVED):
        with suppress(OSError):
            (folder / name).unlink()


@contextmanager
def recorded(folder: Path, stage: str) -> Iterator[None]:
    """An attempt of a stage that runs in this process alone; what ends it is recorded."""
    begin(folder)
    try:
        yield
        end(folder)
    except Exception as error:
        write(folder, stage, of_error(error))
        raise
