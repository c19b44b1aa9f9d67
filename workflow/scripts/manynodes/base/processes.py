"""How processes end: their parent, their exit status, their last lines."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from manynodes.base.errors import shortened

LIBC = ctypes.CDLL(None)
# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER = 0x59616D61
# In `stat_of`.
STARTED = 19
# Of a fault of the process's own, of which it may have told before.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# Schedulers and launchers end a job with SIGTERM; a job can ask for these as a warning.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
# The first namespace of process numbers, see <linux/proc_ns.h>; a container has another.
FIRST_NAMESPACE = Path("pid:[4026531836]")
MOST_SECONDS = 5  # until killed processes are gone; one that waits for a disk may stay longer
MOST_LINES = 40
MOST_CHARACTERS = 4000
MOST_OF_A_LINE = 1000
# Lines of torch's C++ log: what may follow a Python traceback, and what says nothing by itself.
NOISE = re.compile(r"^\[?[WEI]\d{4}[ -]|^\[[WEI]\d{3,4} |^\s*$")
REMARK = re.compile(r"^\[?[WI]\d{4}[ -]|^\[[WI]\d{3,4} |^\s*$")
# torch puts the rank in front of a traceback's lines.
RANK_PREFIX = re.compile(r"^(\[rank\d+\]: ?)+")
TRACEBACK = "Traceback (most recent call last):"
# Before the traceback of an error that ends no program, and between two tracebacks of one error.
ASIDE = re.compile(r"Exception (ignored|in thread) ")
CHAINED = re.compile(r"During handling of the above|The above exception was the direct")
# Python tells a group of errors with a margin, and a group in it with a wider one.
GROUP = f"  + Exception Group {TRACEBACK}"
MARGIN = re.compile(r" +[|+]")
# Above each of its errors; above the first one, and so below a group's message.
NEXT = re.compile(r" +\+(-\+)?-+ \d+ -+$")
BELOW = re.compile(r" +\+-\+-+ 1 -+$")
# torch tells the own traceback of a process that loads data as a message.
ORIGINAL = f"Original {TRACEBACK}"
# Of a process that loads data, and how torch's error that it has caused tells less of it.
WORKER_KILLED = re.compile(r"RuntimeError: DataLoader worker \(pid \d+\) is killed by signal: ")
WORKER_GONE = re.compile(r"RuntimeError: DataLoader worker \(pid\(s\) .*\) exited unexpectedly$")
# In place of an error that Python could not print, because its handler of a signal has raised
# another one meanwhile, as torch's does when several processes that load data are killed.
UNPRINTED = re.compile(
    r".*object address  : 0x|object (refcount|type    |type name) ?: |lost sys\.stderr$"
)
PRINTED = re.compile(r"object repr     : (\w+)\((['\"])(.*)\2\)$")
# The first line of a message whose reason is in the lines after it; pydantic's has no colon.
ANNOUNCES = re.compile(r":\s*$|\d+ validation errors? for \S+$")
# What may follow an error that has ended a program: Python's warnings, advice of Hydra's, the end
# of a make that has started it, and what torch's C++ adds to a message.
AFTERWARDS = re.compile(
    r"\S+:\d+: \w*Warning: |Set the environment variable HYDRA_FULL_ERROR|g?make(\[\d+\])?: \*\*\* "
    r"|At:$|Exception raised from |frame #\d+: "
)
# loguru's mark of the frame that has caught the error, in place of a frame's indent.
CAUGHT_IN = "> File "
# Python's own report of a crash, its stack of the thread that has crashed, and what says least of
# it: the stacks of the others, and the names of all that was imported.
FATAL = "Fatal Python error: "
CURRENT = re.compile(r"Current thread 0x")
STACKS = re.compile(r"Current thread|Thread 0x|Extension modules: ")
MOST_FRAMES = 20
# A line of absl's stack.
ADDRESS = re.compile(r" +@ +0x")


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies, even by SIGKILL."""
    LIBC.prctl(PR_SET_PDEATHSIG, number)


def ignore_interrupts() -> None:
    """From now on, take no notice of Ctrl-C: a second one would interrupt what the first one has
    asked for.
    """
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def let_look(pid: int) -> None:
    """Let another process of this user, and what it starts, read this process's memory. Some
    systems allow it to no other than a process's ancestors; see ptrace_scope in the kernel's
    documentation of Yama.
    """
    LIBC.prctl(PR_SET_PTRACER, pid)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none gets away."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def stat_of(pid: int) -> list[str]:
    """What the kernel says of a process, see proc(5): its state, its parent's number and so on; at
    STARTED its start, in clock ticks since the boot of the machine.

    Raises:
        OSError: it has ended.
    """
    # The name of the program, in parentheses, may contain anything, and be cut in a character.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def process_name() -> str:
    """What users are told of this process: `process 345 on host`. In a container with its start
    too, in clock ticks since the boot: in each of them the numbers begin at 1.
    """
    pid, first = os.getpid(), False
    with suppress(OSError):
        first = Path("/proc/self/ns/pid").readlink() == FIRST_NAMESPACE
    start = "" if first else f" (start {stat_of(pid)[STARTED]})"
    return f"process {pid}{start} on {socket.gethostname()}"


def with_ancestors(pid: int) -> Iterator[int]:
    """A process, its parent and so on; one of them may end while we look."""
    with suppress(OSError):
        while pid > 0:
            yield pid
            pid = int(stat_of(pid)[1])


def descendants(ancestor: int) -> list[int]:
    """The living processes below a process, see proc(5)."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        # A process may end while we look.
        with suppress(ValueError, OSError):
            state, parent, *_ = stat_of(int(folder.name))
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
    found, below = [], {ancestor}
    while below := {pid for pid, parent in parents.items() if parent in below}:
        found += sorted(below)
    return found


def job_seconds(entry: str) -> float:
    """For how long the topmost process above this one has run that was started with an entry, such
    as `PBS_JOBID=7`, in its environment: a job, by this machine's own clock. 0 if there is none.
    """
    ticks = None
    # A process of another user hides its environment.
    with suppress(OSError):
        for pid in with_ancestors(os.getpid()):
            if entry.encode() not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                break
            ticks = int(stat_of(pid)[STARTED])
    if ticks is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def answer_within(
    seconds: float, command: Sequence[str], **options: Any
) -> subprocess.CompletedProcess[Any]:
    """What a command says that ends soon. `subprocess.run` kills one that does not, and then waits
    for it without end, if it waits for a disk or a GPU that is gone.

    Args:
        options: of `subprocess.Popen`; its output is text, unless they say otherwise.

    Raises:
        subprocess.TimeoutExpired: it has not ended; it is killed, or as good as that.
        OSError: it cannot be started.
    """
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "errors": "replace"}
    running = subprocess.Popen(command, **given | options)
    try:
        said, errors = running.communicate(timeout=seconds)
    except BaseException:
        running.kill()
        with suppress(subprocess.TimeoutExpired):
            running.wait(1)
        raise
    return subprocess.CompletedProcess(command, running.returncode, said, errors)


def end_descendants() -> None:
    """Kill every process below this one, with those that `adopt_orphans` has brought here."""
    end_all(lambda: descendants(os.getpid()))


def end_all(find: Callable[[], list[int]]) -> None:
    """Kill the processes that are found, until there are none, for MOST_SECONDS at most; but for
    those of other users, such as sudo has started.
    """
    deadline, foreign = time.monotonic() + MOST_SECONDS, set[int]()
    while (left := [pid for pid in find() if pid not in foreign]) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                foreign.add(pid)
        time.sleep(0.02)


def of_container(status: int) -> int:
    """A container's exit status as subprocess gives it: negative after a signal."""
    return 128 - status if status - 128 in set(signal.Signals) else status


def how(status: int) -> str:
    """An exit status of subprocess in words; shells add 128 to a signal's number."""
    try:
        killed = signal.Signals(signal_of(status)).name
    except ValueError:
        return f"ended with status {status}"
    said = "was ended by" if status < 0 else f"ended with status {status}, which is"
    return f"{said} {killed}" + (
        "; the system does that when memory runs out" if killed == "SIGKILL" else ""
    )


def signal_of(status: int) -> int:
    """The number of the signal that has ended a process, or the program that a shell, or another
    program such as `uv run`, has started; of no signal without one.
    """
    return -status if status < 0 else status - 128


def has_crashed(status: int) -> bool:
    """Whether a signal of a fault of its own has ended it."""
    return signal_of(status) in CRASHES


def last_words(lines: Sequence[str], program: str, status: int = 1) -> tuple[str, ...]:
    """The part of a process's stderr that says why it ended.

    If the program printed a one-line error, which begins with its name, that line; otherwise the
    last traceback, unless it was of an error that did not end the program; otherwise the last
    lines.

    Args:
        program: its name if it is one of ours; otherwise empty.
        status: as in subprocess; Python's is 1 after an error.
    """
    said = [RANK_PREFIX.sub("", line) for line in lines]
    said = [PRINTED.sub(r"\1: \3", line) for line in said if not UNPRINTED.match(line)]
    for line in reversed(said):
        if program and line.startswith(f"{program}: "):
            return (line.removeprefix(f"{program}: "),)
    if has_crashed(status):
        said = without_stacks(said)
    said = reason(ungrouped(said), status)
    raised = bool(said) and said[0].startswith("Traceback ")
    said = [shortened(line, MOST_OF_A_LINE) for line in said]
    # A traceback is known by its first line; of its frames, the last ones say most.
    kept = 1 if raised else 0
    while len(said) > MOST_LINES or (
        len(said) > kept + 1 and sum(map(len, said)) > MOST_CHARACTERS
    ):
        del said[kept]
    return tuple(said)


def reason(lines: Sequence[str], status: int) -> list[str]:
    """The traceback of the error that has ended a program, or else its last lines. After an error
    Python's status is 1, or a signal's.
    """
    start = last_traceback(lines)
    if start is None:
        return [line for line in lines if not REMARK.search(line)]
    told = [lines[start], *takewhile(lambda line: not ASIDE.match(line), lines[start + 1 :])]
    if killed := [line for line in lines[:start] if WORKER_KILLED.match(line)]:
        told = [killed[-1] if WORKER_GONE.match(line) else line for line in told]
    if status > 1 and (later := what_follows(told)):
        return later
    return [line for line in told if not NOISE.search(line)]


def without_stacks(lines: Sequence[str]) -> list[str]:
    """The lines without the stacks that are printed in a crash, which are longer than what is kept:
    of Python's only the thread that has crashed, and of that the innermost frames.
    """
    kept = [line for line in lines if not ADDRESS.match(line)]
    starts = [number for number, line in enumerate(kept) if line.startswith(FATAL)]
    if not starts:
        return kept
    before, report = kept[: starts[-1] + 1], kept[starts[-1] + 1 :]
    own = [*dropwhile(lambda line: not CURRENT.match(line), report)]
    frames = [*takewhile(is_indented, own[1:])][:MOST_FRAMES]
    later = [line for line in report if not (is_indented(line) or STACKS.match(line))]
    return [*before, *own[:1], *frames, *later]


def last_traceback(lines: Sequence[str]) -> int | None:
    """The number of its first line; of an error that ends no program only if there is no other."""
    of_ends: list[int] = []
    of_others: list[int] = []
    found, before = of_ends, ""
    for number, line in enumerate(lines):
        if line.startswith("Traceback "):
            if not CHAINED.match(before):
                found = of_others if ASIDE.match(before) else of_ends
            found.append(number)
        before = line if line.strip() else before
    numbers = of_ends or of_others
    return numbers[-1] if numbers else None


def what_follows(traceback: Sequence[str]) -> list[str]:
    """The lines after a traceback and its message, without those that say nothing of an end."""
    inner = [number for number, line in enumerate(traceback) if line == ORIGINAL]
    message, *more = [*dropwhile(is_indented, traceback[(inner or [0])[-1] + 1 :]), ""]
    # The line after one that only announces its reason is of the message too.
    more = more[bool(ANNOUNCES.search(message)) :]
    return [line for line in more if not (is_indented(line) or is_noise(line))]


def is_noise(line: str) -> bool:
    return bool(NOISE.search(line) or AFTERWARDS.match(line))


def is_indented(line: str) -> bool:
    """As a frame of a traceback, and what belongs to it."""
    return not line[:1].strip() or line.startswith(CAUGHT_IN)


def ungrouped(lines: Sequence[str]) -> Sequence[str]:
    """The lines with the last group of errors, as `asyncio.TaskGroup` raises it, told as the first
    of its errors that has gone through the frames of the group, or if none was raised the first.
    """
    starts = [number for number, line in enumerate(lines) if line == GROUP]
    if not starts:
        return lines
    before, rest = lines[: starts[-1]], lines[starts[-1] + 1 :]
    group = list(takewhile(MARGIN.match, rest))
    raised = [n for n, line in enumerate(group) if line.endswith(f"| {TRACEBACK}")]
    following = [*group[1:], "", ""]
    plain = [
        n + 1
        for n, line in enumerate(group)
        if NEXT.match(line) and "|" in following[n] and not BELOW.match(following[n + 1])
    ]
    if not (raised or plain):
        return lines
    first = (raised or plain)[0]
    margin = " " * group[first].index("|") + "|"
    error = takewhile(lambda line: line.startswith(margin), group[first + bool(raised) :])
    outer = [line[found.end() + 1 :] for line in group[:first] if (found := MARGIN.match(line))]
    inner = [line[len(margin) + 1 :] for line in error]
    frames = [line for line in outer if line.startswith("  ")]
    return [*before, TRACEBACK, *frames, *inner, *rest[len(group) :]]
