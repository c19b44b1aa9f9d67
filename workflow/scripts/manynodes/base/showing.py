"""What is shown to a user who may no longer be there, or who looks at something else."""

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Thread
from typing import IO, AnyStr

# Bytes that wait for a reader that does not go on, such as `less` or a terminal after Ctrl-S, and
# seconds after which one that has taken nothing is not waited for any more.
MOST_WAITING = 10_000_000
PATIENCE = 5
# Bytes for which a pipe has room that poll calls writable; PIPE_BUF of pipe(7).
PIECE = 4096


def show(stream: IO[AnyStr] | None, text: AnyStr) -> None:
    """Write to our stdout or stderr.

    If that fails, because its disk is full or its reader has gone, all that follows goes nowhere:
    no training ends for that, and its logs have the same.
    """
    if stream is None:  # it was closed when Python started
        return
    if backlog := BACKLOGS and BACKLOGS.get(stream.fileno()):
        backlog.add(text if isinstance(text, bytes) else text.encode(errors="backslashreplace"))
        return
    try:
        # Of bytes, a stream without a buffer (PYTHONUNBUFFERED) may take a part, if a signal comes.
        while text:
            text = text[stream.write(text) or len(text) :]
        stream.flush()
    except OSError:
        send_nowhere(stream.fileno())


class Backlog:
    """What is still to be written to our stdout or stderr, by a thread: who shows something does
    not wait for its reader.

    If it is full, a reader that reads is waited for, as a pipe does. For one that does not, the
    oldest lines are dropped; a line says so where they are missing.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.text = bytearray()
        self.missing = 0
        # What ends the line that is written.
        self.before = ""
        # Since when the reader has taken nothing of what is there.
        self.since = time.monotonic()
        self.writing = False
        self.changed = Condition()
        Thread(target=self.write, daemon=True).start()

    def add(self, text: bytes) -> None:
        with self.changed:
            if not self.text:
                self.since = time.monotonic()
            self.text += text
            self.changed.notify_all()
            while len(self.text) > MOST_WAITING:
                left = self.since + PATIENCE - time.monotonic()
                if left > 0:
                    self.changed.wait(left)
                else:
                    self.drop(len(self.text) - MOST_WAITING)

    def drop(self, size: int) -> None:
        """Drop the oldest lines that have so many bytes together."""
        end = self.text.find(b"\n", size) + 1 or size
        self.missing += max(1, self.text.count(b"\n", 0, end))
        del self.text[:end]

    def take(self) -> bytes:
        """The next piece to write, of whole lines if possible."""
        if self.missing:
            lines, self.missing = self.missing, 0
            said = f"launch: {lines:,} lines are missing here, which nobody has read in time"
            return f"{self.before}{said}; a log (--log) has them\n".encode()
        end = self.text.rfind(b"\n", 0, PIECE) + 1 or PIECE
        piece = bytes(self.text[:end])
        del self.text[:end]
        self.before = "" if piece.endswith(b"\n") else "\n"
        return piece

    def write(self) -> None:
        ready = select.poll()
        ready.register(self.descriptor, select.POLLOUT)
        while True:
            with self.changed:
                self.writing = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.text)
                piece, self.writing = self.take(), True
            self.since = time.monotonic()
            while piece:
                ready.poll()
                try:
                    # Of one that does not block, which its other user has made so, only a part.
                    with suppress(BlockingIOError):
                        piece = piece[os.write(self.descriptor, piece) :]
                except OSError:
                    send_nowhere(self.descriptor)

    def finish(self) -> None:
        """Wait until all of it is written."""
        with self.changed:
            self.changed.wait_for(lambda: not (self.text or self.writing))


# Of this process's streams, by the numbers of their descriptors.
BACKLOGS: dict[int, Backlog] = {}


@contextmanager
def shown_later() -> Iterator[None]:
    """Let what is shown wait for its reader in a `Backlog`, and not who shows it; until the end."""
    out, error = sys.stdout.fileno(), sys.stderr.fileno()
    BACKLOGS[out] = Backlog(out)
    # On a terminal, or after 2>&1, the order of both is kept.
    BACKLOGS[error] = BACKLOGS[out] if os.path.sameopenfile(out, error) else Backlog(error)
    try:
        yield
    finally:
        for backlog in BACKLOGS.values():
            backlog.finish()


def send_nowhere(descriptor: int) -> None:
    """Let all that is written to our stdout or stderr from now on go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def open_closed_streams() -> None:
    """Let stdin, stdout and stderr be /dev/null if they were closed when Python started: the next
    files that are opened would take their place. Call it before any file is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # It has the lowest number that is free.
            nowhere = open(os.devnull, "w" if number else "r", encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
