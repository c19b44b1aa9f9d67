"""The owner of a run: one job at a time trains it, on a file system shared by many machines.

The owner touches its record regularly. If a record is not touched any more, its owner is dead,
wherever it ran. File-system locks are no substitute: on many network file systems they hold on one
machine only, or outlive their owner.
"""

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from manynodes.base import atomic
from manynodes.base.errors import Refusal
from manynodes.base.processes import STARTED, stat_of
from manynodes.base.reading import NotAFile, open_file, parse_form
from manynodes.base.timeouts import BEAT, LEASE, SETTLE, WATCH

# How often one job may start from the same position: a scheduler may requeue a job whose node dies
# every time.
MOST_STARTS = 3
MOST_BYTES = 10_000  # of a record
LIVE = "live.json"  # beside the record


@dataclass(frozen=True)
class Record:
    """The owner of a run.

    Attributes:
        token: unique to this owner.
        name: `Slurm job 12`, `process 345 on host`. A requeued job keeps its name.
        host: where rank 0 runs.
        process: identifies its process on any machine, across restarts.
        released: it ended in order.
        position: epoch and step from which the job of that name last started.
        starts: how often it has started from there.
    """

    token: str
    name: str
    host: str
    process: str
    released: bool = False
    position: tuple[int, int] = (-1, -1)
    starts: int = 0

    @property
    def who(self) -> str:
        return (
            self.name if self.name.endswith(f" on {self.host}") else f"{self.name} on {self.host}"
        )


class Seen(NamedTuple):
    """A record, and the time of its last touch in ns since the epoch."""

    record: Record
    touched: int


class Owner:
    """The hold on a run. Made by `acquire`.

    Attributes:
        live: tells how far the training is, for `watch`; it is called in another thread.
    """

    def __init__(self, path: Path, record: Record) -> None:
        self.path, self.record = path, record
        self.confirmed = time.monotonic()
        self.live: Callable[[], dict[str, Any]] | None = None
        self.taken: Record | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.keep_touching, daemon=True)
        self.thread.start()

    def keep_touching(self) -> None:
        while not self.ended.wait(BEAT):
            # If the storage is unavailable for a while, nobody else sees the record either.
            with suppress(OSError):
                self.confirm()
                if self.live and not self.taken:
                    text = json.dumps(self.live()) + "\n"
                    atomic.write_often(self.path.with_name(LIVE), text)

    def confirm(self) -> None:
        there = look(self.path)
        if there and there.record.token == self.record.token:
            os.utime(self.path)
            self.confirmed = time.monotonic()
        else:
            self.taken = there.record if there else Record("", "", "", "")

    def check(self) -> None:
        """Check that the run is still ours; call it before every write. It is free while the
        record is touched.

        Raises:
            Refusal: another job has taken the run over, or the record was removed.
            OSError: the record cannot be read, and another job may take the run over.
        """
        if (silent := time.monotonic() - self.confirmed) > 2 * BEAT:
            try:
                self.confirm()
            except OSError:
                # Storage that fails for moments ends no training: nobody takes the run so early.
                if silent > LEASE - SETTLE:
                    raise
        if self.taken:
            run = self.path.parent.parent
            who = f"taken over by {self.taken.who}" if self.taken.name else "released by somebody"
            raise Refusal(f"{run} was {who}; this training ends here")

    def begin_at(self, epoch: int, step: int, where: str = "") -> None:
        """Note the position from which the training starts.

        Args:
            where: the position in words.

        Raises:
            Refusal: the same job has started from there too often, or another job has taken the
                run over.
        """
        # Loading data and compiling may have taken longer than the lease.
        self.check()
        starts = self.record.starts + 1 if self.record.position == (epoch, step) else 1
        if starts > MOST_STARTS:
            # For whoever has read the logs: the next command counts anew.
            self.write(replace(self.record, starts=0))
            raise Refusal(
                f"{self.record.name} has started {MOST_STARTS} times "
                f"{where or f'after epoch {epoch}, step {step}'} and got no further; "
                "read the logs of its attempts, and run the same command again"
            )
        self.write(replace(self.record, position=(epoch, step), starts=starts))
        # Of an earlier owner.
        self.path.with_name(LIVE).unlink(missing_ok=True)

    def write(self, record: Record) -> None:
        self.record = record
        atomic.write_text(self.path, text(record))

    def release(self) -> None:
        self.ended.set()
        self.thread.join()
        with suppress(OSError):
            self.confirm()
            if not self.taken:
                self.write(replace(self.record, released=True))


@contextmanager
def acquire(folder: Path, name: str, tell: Callable[[str], None]) -> Iterator[Owner]:
    """Own the run whose states are in the folder.

    Args:
        name: who asks.
        tell: gets a line if it takes long.

    Raises:
        Refusal: a living owner has it.
        OSError: the folder is not writable.
    """
    path = folder / "owner.json"
    mine = Record(secrets.token_hex(8), name, socket.gethostname(), this_process())
    folder.mkdir(parents=True, exist_ok=True)
    before = look(path)
    if before:
        earlier = before.record
        if earlier.name == name:
            # The count of starts continues, even if this attempt ends before it starts.
            mine = replace(mine, position=earlier.position, starts=earlier.starts)
        take_over(path, mine, before, tell)
    elif not atomic.create(path, text(mine)):
        raise Refusal(
            f"{folder.parent} was just started by another process; wait until it has ended, or end "
            "it"
        )
    owner = Owner(path, mine)
    try:
        yield owner
    finally:
        owner.release()


def look(path: Path) -> Seen | None:
    """The record at a path; None if there is none.

    A file that is not a record belongs to nobody.

    Raises:
        OSError: it cannot be read, so its owner is unknown.
    """
    nobody = Record("", "nobody", "unknown", "", released=True)
    try:
        with open_file(path, MOST_BYTES) as file:
            # From the open file: attributes looked up by name may be a minute old.
            touched, content = os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None
    except NotAFile:
        return Seen(nobody, 0)
    try:
        fields = parse_form(content, "owner")
    except ValueError:
        return Seen(nobody, touched)
    return Seen(Record(**fields | {"position": tuple(fields["position"])}), touched)


def job_of(name: str) -> str:
    """The job of an owner's name: with PBS it may have another id later, and its runs count."""
    return re.sub(r"(, now \S+)? run \d+$", "", name)


def text(record: Record) -> str:
    return json.dumps(asdict(record), indent=2) + "\n"


def take_over(path: Path, mine: Record, before: Seen, tell: Callable[[str], None]) -> None:
    """Replace the record of a dead owner.

    Raises:
        Refusal: it is alive, or another process was faster.
    """
    await_end(path, mine.name, before, tell)
    earlier = before.record
    if earlier.token and is_gone(earlier):
        # Of several that know on this machine that it is gone, one goes on at once.
        claim = path.with_name(f"{path.stem}.{earlier.token}{path.suffix}")
        if atomic.create(claim, text(mine)):
            try:
                refuse_others(path, earlier.token)
                atomic.write_text(path, text(mine))
                return
            finally:
                claim.unlink()
        time.sleep(SETTLE)
        refuse_others(path, earlier.token)
    atomic.write_text(path, text(mine))
    # Others that find the same dead owner come here too; the last one wins.
    time.sleep(SETTLE)
    refuse_others(path, mine.token)


def refuse_others(path: Path, token: str) -> None:
    """Refuse a record that is not the expected one."""
    now = look(path)
    if now is None:
        raise Refusal(f"{path} was removed; run the same command again")
    if now.record.token != token:
        raise Refusal(still_there(path, now.record))


def await_end(path: Path, name: str, before: Seen, tell: Callable[[str], None]) -> None:
    """Return when the owner of the record is known to be dead.

    Args:
        name: who waits.

    Raises:
        Refusal: it is alive.
    """
    record = before.record
    if record.released or is_gone(record) or is_earlier(record, name):
        return
    tell(
        f"{record.who} trained this run last; waiting {LEASE:.0f} s to see whether it is still "
        "alive"
    )
    deadline = time.monotonic() + LEASE
    while time.monotonic() < deadline:
        time.sleep(BEAT / 2)
        now = look(path)
        if now is None or now.record.released:
            return
        if (now.record.token, now.touched) != (record.token, before.touched):
            raise Refusal(still_there(path, now.record))


def refuse_owned(folder: Path, name: str, tell: Callable[[str], None]) -> None:
    """Refuse a run that another job trains, before anything is changed.

    The record of a dead owner is marked as released, so that nobody waits for it again.

    Args:
        folder: of the run's states.
        name: who asks.

    Raises:
        Refusal: the owner is alive.
    """
    path = folder / "owner.json"
    before = look(path)
    if before and not before.record.released and not is_earlier(before.record, name):
        await_end(path, name, before, tell)
        # Another process may have taken the run over meanwhile.
        now = look(path)
        if now and now.record.token == before.record.token:
            atomic.write_text(path, text(replace(now.record, released=True)))


def is_earlier(record: Record, name: str) -> bool:
    """Whether a record is of the same job before it was requeued, or before its ranks were started
    again: then its scheduler, or `launch`, guarantees that the process is over or cut off. A job
    may have two commands at once too, and the process of the other is alive.
    """
    return record.name == name and not is_alive(record)


def living(folders: Sequence[Path]) -> dict[Path, Record]:
    """The living owners, by the folder of states; this takes a few seconds if there may be one."""

    def seen(folder: Path) -> Seen | None:
        # The job will report a file that cannot be read.
        with suppress(OSError):
            return look(folder / "owner.json")
        return None

    before = {folder: found for folder in folders if (found := seen(folder))}
    waiting = {
        folder: found
        for folder, found in before.items()
        if not found.record.released and not is_gone(found.record)
    }
    if waiting:
        time.sleep(WATCH)
    after = {folder: seen(folder) for folder in waiting}
    return {
        folder: now.record
        for folder, now in after.items()
        if now and not now.record.released and now != waiting[folder]
    }


def still_there(path: Path, record: Record) -> str:
    return (
        f"{path.parent.parent} is being trained by {record.who}; "
        "wait until it has ended, or end it, and run the same command again"
    )


def this_process() -> str:
    """Identifies this process: boot of the machine, process namespace, number, start time."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid = os.getpid()
    # Not psutil: its create_time moves when the clock is set.
    start = stat_of(pid)[STARTED]
    return f"{boot} {Path('/proc/self/ns/pid').readlink()} {pid} {start}"


def is_gone(record: Record) -> bool:
    """Whether its process is known to be gone."""
    return is_alive(record) is False


def is_alive(record: Record) -> bool | None:
    """Whether its process is alive; None if that is not known, such as on another machine."""
    if not record.process:
        return False
    *machine, pid, start = record.process.split()
    if machine != this_process().split()[:2]:
        return None
    try:
        found = stat_of(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        # A system may hide the processes of other users; then the first one is hidden too.
        return False if Path("/proc/1").exists() else None
    except PermissionError:
        return None
    # One that has ended stays until its parent has asked for its status.
    return found[STARTED] == start and found[0] not in "ZX"
