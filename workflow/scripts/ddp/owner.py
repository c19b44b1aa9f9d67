"""One training of a run at a time: who is at it, on a file system that many machines share.

The owner keeps touching its record. Whoever finds a record watches it: one that is not touched any more has a dead owner, wherever that
was. Locks of the file system would not do: on many a network file system they hold on one machine only, and some outlive their owner.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ddp import atomic
from ddp.errors import Refusal
from ddp.reading import NotAFile, open_file, parse_form

BEAT = 2.0  # seconds between two touches of the record
# Seconds without a touch after which an owner is dead. Opening a file asks the server even where attributes are cached for a minute.
LEASE = 30.0
# Seconds between taking over a record and the first write: an owner who lives after all sees within BEAT that the run is no longer its own.
SETTLE = 2 * BEAT
WATCH = 2.5 * BEAT  # seconds in which an owner that is alive touches its record
# How often one job may begin at the same place: Slurm queues a job whose node dies again and again.
MOST_STARTS = 3
MOST_BYTES = 10_000  # of a record


@dataclass(frozen=True)
class Record:
    """Who owns a run.

    Attributes:
        token: of this owner and nobody else.
        name: `Slurm job 12`, `process 345 on host`. The same job, queued again, has the same name.
        host: where rank 0 runs.
        process: what tells its process from any other, on any machine and after any restart.
        released: it has ended, in order.
        place: where in the training the job of that name began last, as epoch and step.
        starts: how often it has begun there.
    """

    token: str
    name: str
    host: str
    process: str
    released: bool = False
    place: tuple[int, int] = (-1, -1)
    starts: int = 0

    @property
    def who(self) -> str:
        return self.name if self.name.endswith(f" on {self.host}") else f"{self.name} on {self.host}"


class Owner:
    """The hold on a run, as long as it lasts. Made by `own`."""

    def __init__(self, path: Path, record: Record) -> None:
        self.path, self.record = path, record
        self.confirmed = time.monotonic()
        self.taken: Record | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.keep_touching, daemon=True)
        self.thread.start()

    def keep_touching(self) -> None:
        while not self.ended.wait(BEAT):
            # Storage that is away for a while takes nothing from us: others do not see it either.
            with suppress(OSError):
                self.confirm()

    def confirm(self) -> None:
        there = look(self.path)
        if there and there[0].token == self.record.token:
            os.utime(self.path)
            self.confirmed = time.monotonic()
        else:
            self.taken = there[0] if there else Record("", "somebody", "unknown", "")

    def hold(self) -> None:
        """See that the run is still ours; to be called before anything is written. It costs nothing while the record is being touched.

        Raises:
            Refusal: another has taken the run over, or the record was removed.
        """
        if time.monotonic() - self.confirmed > 2 * BEAT:
            self.confirm()
        if self.taken:
            raise Refusal(f"{self.path.parent} was taken over by {self.taken.who}; this training ends here")

    def begin_at(self, epoch: int, step: int) -> None:
        """Note where the training begins.

        Raises:
            Refusal: the same job has begun there too often.
        """
        starts = self.record.starts + 1 if self.record.place == (epoch, step) else 1
        if starts > MOST_STARTS:
            raise Refusal(
                f"{self.record.name} has begun {MOST_STARTS} times after epoch {epoch}, step {step} and got no further; "
                "see what ended it each time (sacct --duplicates -j, .snakemake/slurm_logs), and run the same command again"
            )
        self.write(replace(self.record, place=(epoch, step), starts=starts))

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
def own(folder: Path, name: str, tell: Callable[[str], None]) -> Iterator[Owner]:
    """Own the run whose states are in the folder.

    Args:
        name: who asks.
        tell: gets a line if it takes long.

    Raises:
        Refusal: somebody who lives owns it.
        OSError: the folder cannot be written to.
    """
    path = folder / "owner.json"
    mine = Record(secrets.token_hex(8), name, socket.gethostname(), this_process())
    folder.mkdir(parents=True, exist_ok=True)
    before = look(path)
    if before:
        if before[0].name == name:
            # How often it has begun counts on, even if it now ends before it begins.
            mine = replace(mine, place=before[0].place, starts=before[0].starts)
        take_over(path, mine, before, tell)
    elif not atomic.create(path, text(mine)):
        raise Refusal(f"{folder.parent} has just been begun by somebody else; wait until that has ended, or end it")
    owner = Owner(path, mine)
    try:
        yield owner
    finally:
        owner.release()


def look(path: Path) -> tuple[Record, int] | None:
    """The record and when it was touched, in ns; None if there is none. One that is not in the form of a record is nobody's.

    Raises:
        OSError: it cannot be read, which says nothing of its owner.
    """
    nobody = Record("", "nobody", "unknown", "", released=True)
    try:
        with open_file(path, MOST_BYTES) as file:
            # Of the open file: attributes that are looked up by name may be those of a minute ago.
            touched, content = os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None
    except NotAFile:
        return nobody, 0
    try:
        fields = parse_form(content, "owner")
    except ValueError:
        return nobody, touched
    return Record(**fields | {"place": tuple(fields["place"])}), touched


def text(record: Record) -> str:
    return json.dumps(asdict(record), indent=2) + "\n"


def take_over(path: Path, mine: Record, before: tuple[Record, int], tell: Callable[[str], None]) -> None:
    """Replace the record of an owner who is gone.

    Raises:
        Refusal: it is not gone, or another was quicker.
    """
    await_end(path, mine.name, before, tell)
    atomic.write_text(path, text(mine))
    # Two who find the same dead owner both come here; the later one has it.
    time.sleep(SETTLE)
    now = look(path)
    if now is None or now[0].token != mine.token:
        raise Refusal(still_there(path, now[0]) if now else f"{path} was removed; run the same command again")


def await_end(path: Path, name: str, before: tuple[Record, int], tell: Callable[[str], None]) -> None:
    """Return once the record's owner is known to be gone.

    Args:
        name: who waits.

    Raises:
        Refusal: it is not gone.
    """
    record, touched = before
    # The same job, queued again: its scheduler says that the one before is over. Cut off from the network it may not know it yet.
    if record.released or is_gone(record) or record.name == name:
        return
    tell(f"{record.who} had this run last; waiting {LEASE:.0f} s to see whether it is still there")
    deadline = time.monotonic() + LEASE
    while time.monotonic() < deadline:
        time.sleep(BEAT / 2)
        now = look(path)
        if now is None or now[0].released:
            return
        if (now[0].token, now[1]) != (record.token, touched):
            raise Refusal(still_there(path, now[0]))


def refuse_owned(folder: Path, name: str, tell: Callable[[str], None]) -> None:
    """Refuse a run that another job is training, before anything of it is touched.

    The record of a dead owner is marked as released, so that nobody waits for it a second time.

    Args:
        folder: of the run's states.
        name: who asks.

    Raises:
        Refusal: the owner is alive.
    """
    path = folder / "owner.json"
    before = look(path)
    if before and before[0].name != name and not before[0].released:
        await_end(path, name, before, tell)
        atomic.write_text(path, text(replace(before[0], released=True)))


def living(folders: Sequence[Path]) -> dict[Path, Record]:
    """The owners that touch their records just now, by the folder of states; watches for a few seconds if there may be one."""

    def seen(folder: Path) -> tuple[Record, int] | None:
        # What cannot be read is for the job to say.
        with suppress(OSError):
            return look(folder / "owner.json")
        return None

    before = {folder: found for folder in folders if (found := seen(folder))}
    waiting = {folder: found for folder, found in before.items() if not found[0].released and not is_gone(found[0])}
    if waiting:
        time.sleep(WATCH)
    after = {folder: seen(folder) for folder in waiting}
    return {folder: now[0] for folder, now in after.items() if now and not now[0].released and now != waiting[folder]}


def still_there(path: Path, record: Record) -> str:
    return f"{path.parent.parent} is being trained by {record.who}; wait until that has ended, or end it, and run the same command again"


def this_process() -> str:
    """This process: the machine since its last start, the namespace of process numbers, the number, and the time of its own start."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getpid()} {started(os.getpid())}"


def started(pid: int) -> str:
    """When a process was started, in clock ticks since the machine was; see proc(5)."""
    # The name of the program, in parentheses, may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_gone(record: Record) -> bool:
    """Whether its process is known to be gone: one of this machine's that is no longer there."""
    if not record.process:
        return True
    *machine, pid, start = record.process.split()
    if machine != this_process().split()[:2]:
        return False
    try:
        return started(int(pid)) != start
    except FileNotFoundError:
        return True
