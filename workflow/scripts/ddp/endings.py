"""How processes ended, as lines that travel with their output, and which of several endings was the cause.

A shared file would be another way, but on a network file system it may be seen a minute late, and a full disk would take it too.
"""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

MARK = "\x1elaunch "  # an ASCII record separator, which no program writes by itself
CHUNK = 700  # characters; srun --label was seen to break lines of more than 1024 bytes, labels and all
MOST_LINES = 40
MOST_CHARACTERS = 4000

# What torch, gloo and NCCL say in a process whose peer is gone.
LOST_A_PEER = re.compile(r"gloo/|gloo::|DistBackendError|DistNetworkError|ncclRemoteError|NCCL|TCPStore|Connection (closed|reset) by peer")
# Lines of torch's C++ log, which may follow a Python traceback.
NOISE = re.compile(r"^\[?[WEI]\d{4}[ -]|^\[[WEI]\d{3,4} |^\s*$")
# torch puts the rank in front of a traceback's lines.
RANK_PREFIX = re.compile(r"^(\[rank\d+\]: ?)+")


@dataclass(frozen=True)
class Ending:
    """How one process ended that did not end well.

    Attributes:
        who: `rank 3 on n2`, or `node 1 on n2` for a program that runs once a node.
        how: `ended with status 1`, `was ended by SIGKILL`.
        time: when, in seconds since the epoch.
        lines: what it wrote last to stderr.
        log: file with all that it wrote; empty if there is none.
        report: what the program has reported of itself: `saved`, how far it was when it last saved since it began, and `stopped`, why it
            stopped.
    """

    who: str
    how: str
    time: float
    lines: tuple[str, ...] = ()
    log: str = ""
    report: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict:
        return {"ending": asdict(self)}

    @property
    def lost_a_peer(self) -> bool:
        """Whether it speaks of a peer that is gone."""
        return bool(LOST_A_PEER.search("\n".join(self.lines)))

    @property
    def is_consequence(self) -> bool:
        """Whether it followed from the end of another process: it lost a peer, or was asked to end."""
        return self.lost_a_peer or self.how.startswith("was ended by SIGTERM")

    @property
    def error(self) -> str:
        """One line: who it was, and what it said last or else how it ended."""
        said = self.lines[-1] if self.lines else ""
        if self.how.startswith("was ended by") or not said:
            return f"{self.who} {self.how}"
        return f"{self.who}: {' '.join(said.split())}"


def send(record: dict) -> None:
    """Write a record to stderr, each of its lines by itself: a pipe with several writers takes so many bytes in one piece, and no more."""
    sys.stderr.flush()
    for line in record_lines(record):
        # Not print, which with PYTHONUNBUFFERED writes the end of the line by itself: another rank's record came between (measured).
        os.write(sys.stderr.fileno(), f"{line}\n".encode())


def record_lines(record: dict) -> list[str]:
    """A record as lines, each short enough to stay whole on its way."""
    text = json.dumps(record)
    chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    key = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    return [f"{MARK}{key} {number} {len(chunks)} {chunk}" for number, chunk in enumerate(chunks)]


def marked(line: str) -> bool:
    """Whether the line is of a record, whatever label stands in front of it."""
    return MARK in line


def records(lines: Iterable[str]) -> list[dict]:
    """The records whose lines are all among these, in the order in which they begin."""
    found: dict[str, dict[int, str]] = {}
    sizes: dict[str, int] = {}
    for line in lines:
        if part := re.match(r"(\S+) (\d+) (\d+) (.*)", line.partition(MARK)[2]):
            found.setdefault(part[1], {})[int(part[2])] = part[4]
            sizes[part[1]] = int(part[3])
    whole = []
    for key, chunks in found.items():
        # One whose writer was killed in the middle of it is lost.
        with suppress(ValueError):
            if len(chunks) == sizes[key]:
                whole.append(json.loads("".join(chunk for _, chunk in sorted(chunks.items()))))
    return whole


def ending(fields: dict) -> Ending:
    return Ending(**fields | {"lines": tuple(fields["lines"])})


def how(status: int) -> str:
    """A status of subprocess in words."""
    if status >= 0:
        return f"ended with status {status}"
    killed = signal.Signals(-status).name
    return f"was ended by {killed}" + ("; the system does that when memory runs out" if killed == "SIGKILL" else "")


def last_words(lines: Sequence[str], program: str) -> tuple[str, ...]:
    """The part of a process's last lines of stderr that says why it ended.

    For what a user can put right, which programs say in one line that begins with their name, that line; otherwise the last
    traceback; otherwise the last lines.
    """
    said = [RANK_PREFIX.sub("", line) for line in lines if not NOISE.search(line)]
    for line in reversed(said):
        if line.startswith(f"{program}: "):
            return (line.removeprefix(f"{program}: "),)
    starts = [number for number, line in enumerate(said) if line.startswith("Traceback ")]
    said = said[starts[-1] :] if starts else said
    while len(said) > MOST_LINES or (len(said) > 1 and sum(map(len, said)) > MOST_CHARACTERS):
        said = said[1:]
    return tuple(line[-MOST_CHARACTERS:] for line in said)


def cause(endings: Sequence[Ending]) -> Ending:
    """The ending that brought about the others: the earliest that does not itself speak of a lost peer.

    The time alone does not tell: a killed rank's peers notice it sooner than those who wait for it.
    """
    return min(endings, key=lambda ending: (ending.lost_a_peer, ending.time))
