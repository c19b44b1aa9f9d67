"""Records of how processes ended, sent as lines of their output, and the search for the cause.

Not through a shared file: a network file system may show it a minute late, and it needs disk space.
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
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from manynodes.base.environment import Environment
from manynodes.base.errors import one_line
from manynodes.base.processes import (
    AFTERWARDS,
    ANNOUNCES,
    CURRENT,
    FATAL,
    ORIGINAL,
    has_crashed,
    how,
    is_indented,
    signal_of,
)

MARK = "\x1elaunch "  # an ASCII record separator, which no program writes by itself
CHUNK = (
    700  # characters; srun --label was seen to break lines of more than 1024 bytes, labels and all
)

# Words of torch, gloo and NCCL in a process that lost its peer.
LOST_A_PEER = re.compile(
    r"gloo/|gloo::|DistBackendError|DistNetworkError|TCPStore"
    r"|NCCL ([Ee]rror|WARN|communicator|operations)|(ProcessGroup|Work)NCCL"
    r"|nccl(Remote|System|Internal)Error|RuntimeError: Connection (closed|reset) by peer"
)
# Words of Python in a process whose connection to another one has ended, perhaps to a rank. With a
# message, an EOFError is that of a damaged file.
DISCONNECTED = re.compile(r"EOFError$|(BrokenPipeError|Connection(Reset|Aborted|Refused)Error)\b")
# Words of theirs in a process that has waited too long for another one. NCCL's ranks tell each
# other when one of them has.
TIMED_OUT = re.compile(
    r"[Tt]imed out|Timeout\(ms\)|Application timeout|wait timeout|collective timeout"
)
# Words of a fault of the process's own GPU. NCCL's watchdog meets it too, and reports it in its own
# words, which are those of a lost peer.
GPU_FAULT = re.compile(
    r"CUDA error: |Cuda failure|AcceleratorError|uncorrectable ECC|CU(BLAS|DNN)_STATUS_"
    r"|CUDA out of memory"
)
# Of these, the words for a broken GPU.
BROKEN = re.compile(r"uncorrectable (ECC|NVLink)")

# Of an error in a process that loads data.
WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.$")
# A progress bar of tqdm's.
BAR = re.compile(r"\d%\|.*\|")
# An exception without a message, and where one was raised.
SILENT = re.compile(r"[\w.]+")
FRAME = re.compile(r'[ >] File "(.+)", line (\d+), in (.+)')

# All that C++ says if torch's thread still holds a tensor while Python ends, well or with an error.
# 15 of 63 starts of programs of four lines that do not destroy their process group ended so (torch
# 2.14, gloo; its issue 190489).
UNENDED = "terminate called without an active exception"

# What a crash says of itself: C++ of an exception (torch's warnings may come in between), absl and
# TensorFlow of a check, glibc of an assertion and of damaged memory, Python unless it only repeats
# the signal.
CRASH = re.compile(
    r" *(what\(\): +\S.*|terminate called after throwing .*"
    r"|.*: Assertion `.*' failed\.|\*\*\* .* detected \*\*\*.*"
    r"|(?:free|malloc|realloc|munmap_chunk)\(\): .*"
    r"|(?:double free or|corrupted size|corrupted double).*"
    r"|Fatal Python error: "
    r"(?!Aborted|Segmentation fault|Bus error|Illegal instruction|Floating.point exception).*)"
)
CHECK = re.compile(r"(?:\[?F\d{4} |.*: F ).*?(\S+:\d+)\] (.*)")
MOST_CHECK = 300  # characters of a line in which it is looked for
# A frame in Python's report of a crash, the innermost one first; and the files of Python and of
# packages, also of another Python than this one, such as a container's; NVIDIA's have torch in
# dist-packages. What begins with < is no file; code of `python -c` is the user's.
CRASHED_IN = re.compile(r'  File "(.+)", line (\d+) in (.+)')
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python\d[\d.]*t?/|^<(?!string|stdin)")

# Frames that rich draws around text, and their lower edge.
EDGE = re.compile(r"[╰└┗╚][─━═]+[╯┘┛╝]$")
BOXED = re.compile(r"[│┃║] (.*?) *[│┃║]$")
# An error's name before its message, the level of an error in a log, and what may come after both:
# other levels, and where to read more.
NAMED = re.compile(r"[\w.]*(Error|Exception)(: |$)")
LEVEL = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b")
LESS = re.compile(
    r".*\b(DEBUG|INFO|SUCCESS|WARNING)\b|(See|see|For more) .*https?://|https?://\S+$"
)
MOST_LESSER = 3  # lines after an error; behind more, the program has gone on
# Hydra's last line, and what it advises after an error and adds to it.
HYDRA = "Set the environment variable HYDRA_FULL_ERROR"
ADVICE = re.compile(
    r"full_key: |object_type=|To append to your config|Either remove |Or add a second "
    r"|See https?://|\s"
)


@dataclass(frozen=True)
class Ending:
    """How a process failed.

    Attributes:
        who: `rank 3`, or `node 1` for a program that runs once per node.
        where: its host.
        status: as in subprocess; None if it was not started.
        time: in seconds since the epoch, by the clock of rank 0's node.
        late: seconds after which it was killed, because it had not ended when it was told to; 0 if
            it was not.
        lines: its last lines on stderr.
        log: file with all of its output; empty if there is none.
        report: from the program, see `environment.add_to_report`.
        told: it was told to end.
    """

    who: str
    where: str
    status: int | None
    time: float
    late: int = 0
    lines: Sequence[str] = ()
    log: str = ""
    report: dict[str, str] = field(default_factory=dict)
    told: bool = False

    def record(self) -> dict:
        return {"ending": asdict(self)}

    @property
    def name(self) -> str:
        return f"{self.who} on {self.where}"

    @property
    def lost_a_peer(self) -> bool:
        """Whether its last lines report a lost peer."""
        return self.gpu_fault is None and bool(LOST_A_PEER.search("\n".join(self.lines)))

    @property
    def gpu_fault(self) -> str | None:
        """The words of a fault of its GPU, to the end of their line; None if there was none."""
        faults = (GPU_FAULT.search(line) for line in self.lines)
        return next((fault.string[fault.start() :] for fault in faults if fault), None)

    @property
    def gpu(self) -> str:
        """Which GPU had a fault, and what to do if it is broken, to follow the fault; or empty."""
        if self.gpu_fault is None:
            return ""
        which = f" ({self.report['gpu']})" if "gpu" in self.report else ""
        broken = BROKEN.search(self.gpu_fault)
        return which + f"; exclude {self.where} and tell its administrator" * bool(broken)

    @property
    def timed_out(self) -> bool:
        """Whether it has waited too long for another process."""
        return self.lost_a_peer and bool(TIMED_OUT.search("\n".join(self.lines)))

    @property
    def is_disconnected(self) -> bool:
        """Whether a connection of the program's own, perhaps to another rank, has ended."""
        return any(map(DISCONNECTED.match, self.lines))

    @property
    def is_consequence(self) -> bool:
        """Whether another process caused it: it lost a peer, or was told to end."""
        ended = self.told or signal_of(self.status or 0) == signal.SIGTERM or self.late > 0
        return ended or self.lost_a_peer

    @property
    def only_told(self) -> bool:
        """Whether it failed because it was told to end, and its program has reported nothing."""
        return self.told and self.status != 0 and not {*self.report} - {"gpu"}

    @property
    def crashed(self) -> str:
        """One line, if it has told where or why it crashed; otherwise empty."""
        status = self.status or 0
        if not has_crashed(status) or self.lost_a_peer or UNENDED in self.lines:
            return ""
        told = crash(self.lines)
        return f"{self.name} {how(status)}{told}" if told else ""

    @property
    def error(self) -> str:
        """One line: who it was, with its error or last line, or else how it ended."""
        if self.late:
            return f"{self.name} did not end within {self.late} s of SIGTERM"
        fault = self.gpu_fault
        aborted = signal_of(self.status or 0) == signal.SIGABRT
        if aborted and fault:
            return f"{self.name}: {' '.join(fault.split())}{self.gpu}"
        if crashed := self.crashed:
            return crashed
        said = last_said(self.lines)
        raised = bool(self.lines) and self.lines[0].startswith("Traceback ")
        if raised:
            said = message(self.lines[1:]) or said
            # NCCL's exceptions begin with its own words.
            said = fault if fault and fault not in said else said
            if SILENT.fullmatch(said):
                said = f"{said} {raised_in(self.lines)}"
        if aborted and UNENDED in self.lines:
            if not raised:
                remedy = "end the program with torch.distributed.destroy_process_group()"
                return f"{self.name} {how(self.status or 0)} ({UNENDED}): {remedy}"
        elif self.status is not None and (self.status < 0 or not said):
            return f"{self.name} {how(self.status)}"
        said = f"{' '.join(said.split())}{self.gpu}"
        # Python ends with 1 after an error, which says why.
        status = self.status or 0
        if status > 1 or (status == 1 and BAR.search(said)):
            return f"{self.name} {how(status)}; it last said: {said}"
        return f"{self.name}: {said}"


def last_said(lines: Sequence[str]) -> str:
    """The line of a program without a traceback that says most of its end: its last one, unless
    that only goes with what was said before.
    """
    # Rules and the edges of boxes have no letter.
    said = [line for line in lines if re.search(r"\w", line)]
    hydra = False
    while said and AFTERWARDS.match(said[-1]):
        hydra = said.pop().startswith(HYDRA) or hydra
    while hydra and said and (ADVICE.match(said[-1]) or ANNOUNCES.search(said[-1])):
        said.pop()
    if not said:
        return lines[-1] if lines else ""
    last = next((line for line in said[: -2 - MOST_LESSER : -1] if not is_lesser(line)), "")
    return of_box(lines) or (last if is_error(last) else said[-1])


def is_error(line: str) -> bool:
    return bool(NAMED.match(line) or LEVEL.search(line))


def is_lesser(line: str) -> bool:
    return bool(LESS.match(line)) and not is_error(line)


def of_box(lines: Sequence[str]) -> str:
    """The text in a box of rich's that ends the lines, or an error's below the box of a traceback,
    which rich wraps; empty if there is neither.
    """
    edges = [number for number, line in enumerate(lines) if EDGE.match(line)]
    if not edges:
        return ""
    below = [line for line in lines[edges[-1] + 1 :] if not AFTERWARDS.match(line)]
    inside = [*takewhile(bool, map(BOXED.match, reversed(lines[: edges[-1]])))]
    if below:
        return one_line(" ".join(below)) if NAMED.match(below[0]) else ""
    return one_line(" ".join(found[1] for found in reversed(inside) if found))


def crash(lines: Sequence[str]) -> str:
    """Where and why a process has crashed, to follow its signal: ` in f (a.py:3): what(): bad`.
    Empty if it has said neither.
    """
    words = ""
    for line in reversed(lines):
        if found := CRASH.match(line):
            words = " ".join(found[1].split())
        elif found := CHECK.match(line[:MOST_CHECK]):
            words = f"{found[2].strip()} ({found[1]})"
        if words:
            break
    starts = [number for number, line in enumerate(lines) if line.startswith(FATAL)]
    report = lines[starts[-1] :] if starts else ()
    stack = map(CRASHED_IN.match, dropwhile(lambda line: not CURRENT.match(line), report))
    frames = [frame.groups() for frame in stack if frame]
    own = [frame for frame in frames if not LIBRARY.search(frame[0])]
    place = "".join(f" {located(*frame)}" for frame in (own or frames)[:1])
    return place + (f": {words}" if words else "")


def located(file: str, line: str, function: str) -> str:
    """`in load (train.py:12)`."""
    return f"in {function} ({Path(file).name}:{line})"


def message(lines: Sequence[str]) -> str:
    """The message of an exception, of the lines after `Traceback`: its first line, and what follows
    if that only announces it. What a program prints afterwards is not part of it.
    """
    first, *more = [*dropwhile(is_indented, lines), ""]
    if WORKER.search(first) and ORIGINAL in more:
        # torch tells the worker's own traceback as a message.
        return message(more[more.index(ORIGINAL) + 1 :])
    if not ANNOUNCES.search(first):
        return first
    # pydantic names a field, and what is wrong with it in an indented line.
    named = more[: not is_indented(more[0])]
    reason = " ".join([*named, *takewhile(is_indented, more[len(named) :])])
    return f"{first} {one_line(reason)}".rstrip()


def raised_in(traceback: Sequence[str]) -> str:
    """Where an exception was raised: `in load (train.py:12): assert images`."""
    places = [number for number, line in enumerate(traceback) if FRAME.match(line)]
    if not places:
        return ""
    place = located(*FRAME.match(traceback[places[-1]]).groups())  # type: ignore[union-attr]
    code = traceback[places[-1] + 1]
    return f"{place}: {code.strip()}" if code.startswith("    ") else place


def moment(contract: Environment) -> float:
    """The time now, by the clock of rank 0's node: it is compared with those of other nodes."""
    return time.time() - (contract.ahead or 0)


def send(record: dict) -> None:
    """Write a record to stderr, line by line: a pipe with several writers keeps only short writes
    whole.
    """
    sys.stderr.flush()
    for line in record_lines(record):
        # Not print: with PYTHONUNBUFFERED it writes the line and its end separately, and the record
        # of another rank came between them (measured). On a line of its own: srun would break the
        # long one of another rank, which may not have ended yet, in the middle of the record.
        os.write(sys.stderr.fileno(), f"\n{line}\n".encode())


def record_lines(record: dict) -> list[str]:
    """A record as lines that are short enough to stay whole."""
    text = json.dumps(record)
    chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    key = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    return [f"{MARK}{key} {number} {len(chunks)} {chunk}" for number, chunk in enumerate(chunks)]


def marked(line: str) -> bool:
    """Whether the line belongs to a record, with any label in front of it."""
    return MARK in line


def unmarked(line: str) -> str:
    """A line of a program's own that is no record, whatever it contains."""
    return line.replace(MARK[0], "\N{SYMBOL FOR RECORD SEPARATOR}")


def records(lines: Iterable[str]) -> list[dict]:
    """The complete records among these lines, in the order of their first lines."""
    found: dict[str, dict[int, str]] = {}
    sizes: dict[str, int] = {}
    for line in lines:
        if part := re.match(r"(\S+) (\d+) (\d+) (.*)", line.partition(MARK)[2]):
            found.setdefault(part[1], {})[int(part[2])] = part[4]
            sizes[part[1]] = int(part[3])
    whole = []
    for key, chunks in found.items():
        # A record whose writer was killed is incomplete.
        with suppress(ValueError):
            if len(chunks) == sizes[key]:
                whole.append(json.loads("".join(chunk for _, chunk in sorted(chunks.items()))))
    return whole


def sent(lines: Iterable[str], kind: str) -> list[Any]:
    """What the complete records of a kind among these lines tell."""
    return [record[kind] for record in records(lines) if kind in record]


def cause(endings: Sequence[Ending]) -> Ending:
    """The first failure: the earliest one that does not report a lost peer, or may be due to one.

    The time alone does not decide: the peers of a killed rank notice its end before its parent
    does.
    """

    def order(each: Ending) -> tuple[bool, bool, bool, bool, float]:
        return each.late > 0, each.told, each.lost_a_peer, each.is_disconnected, each.time

    return min(endings, key=order)
