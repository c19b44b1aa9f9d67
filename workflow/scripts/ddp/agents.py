"""Run commands side by side, copy what they write, and end them all when one fails."""

import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from ddp.endings import marked
from ddp.lifetime import end_with_parent

# Enough to hold what torchrun says on every one of many nodes when it is ended.
LAST_LINES = 10_000


@dataclass(frozen=True)
class Command:
    """What is to be run.

    Attributes:
        arguments: argument list.
        environment: variables added to ours.
        stdin: text it is given to read.
        end_signal: that it gets when we are gone, however that came about.
        label: a line that it wrote, as the label that it has in the log and the text itself.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    label: Callable[[str], tuple[str, str]] = lambda line: ("", line)
    # Not SIGTERM: with nobody to read what it writes, torchrun may not get to its end. Its ranks get SIGTERM in turn.
    end_signal: signal.Signals = signal.SIGKILL
    # File descriptors that it inherits.
    pass_fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Output:
    """Where what the commands write goes: stdout to ours and to a log, a line at a time, stderr to a log and if so wanted to ours.

    Attributes:
        log: for stdout.
        error_log: for stderr; may be the same.
        records: the lines of records found in it, see `endings.records`; they go nowhere else.
        errors: the last lines of stderr, of all commands.
    """

    log: IO[str]
    error_log: IO[str]
    show_errors: bool = False
    records: list[str] = field(default_factory=list)
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


@dataclass(frozen=True)
class Agent:
    """A command, running, with the threads that copy what it writes."""

    process: subprocess.Popen[bytes]
    threads: tuple[threading.Thread, ...]


@dataclass(frozen=True)
class Outcome:
    """How it went.

    Attributes:
        stopped: we were asked to stop.
        failed: number of the command that failed first, before it was asked to end if we were not asked to stop; None if none did.
        status: of that command, as subprocess has it.
    """

    stopped: bool = False
    failed: int | None = None
    status: int = 0

    @property
    def good(self) -> bool:
        return not self.stopped and self.failed is None


def run_all(commands: Sequence[Command], output: Output, grace: float, stop_with_parent: bool = False) -> Outcome:
    """Run every command until all have ended, or until one fails, which ends the others.

    Args:
        grace: seconds from SIGTERM to SIGKILL.
        stop_with_parent: also end them when the process that started this one is gone: a Snakemake that was killed would
            otherwise leave a training that goes on writing where the next one writes.
    """
    with stop_signals() as stop:
        parent = os.getppid()
        agents = [start(command, output) for command in commands]
        while not stop.is_set() and any(agent.process.poll() is None for agent in agents) and failed(agents) is None:
            time.sleep(0.05)
            if stop_with_parent and os.getppid() != parent:
                stop.set()
        first = failed(agents)
        # All at once first: one after the other, stubborn ones would outlast a scheduler's patience.
        for agent in agents:
            agent.process.terminate()
        deadline = time.monotonic() + grace
        for agent in agents:
            end(agent, deadline)
        if first is None and stop.is_set():
            first = failed(agents)
        if first is None:
            return Outcome(stop.is_set())
        return Outcome(stop.is_set(), first, agents[first].process.returncode)


@contextmanager
def log_file(path: Path, mode: str = "a") -> Iterator[IO[str]]:
    """A log. A full disk that takes none of it must not fail the program, nor hide what is to be said."""
    file = path.open(mode, encoding="utf-8")
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that is set by SIGTERM, SIGINT and SIGHUP, in place of their usual effect."""
    stop = threading.Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(command: Command, output: Output) -> Agent:
    if sys.stdout.isatty():
        # On a terminal the program gets one of the same size, so that it draws its progress bar.
        our_end, its_end = pty.openpty()
        termios.tcsetwinsize(its_end, termios.tcgetwinsize(sys.stdout))
    else:
        our_end, its_end = os.pipe()
    process = subprocess.Popen(
        command.arguments,
        env={**os.environ, **command.environment},
        stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
        stdout=its_end,
        stderr=subprocess.PIPE,
        # A process group of its own: Ctrl-C reaches us alone, and we end it in order.
        start_new_session=True,
        preexec_fn=partial(end_with_parent, command.end_signal),
        pass_fds=command.pass_fds,
    )
    os.close(its_end)
    assert process.stderr is not None
    threads = [
        threading.Thread(target=copy_output, args=(os.fdopen(our_end, "rb", 0), command, output, False), daemon=True),
        threading.Thread(target=copy_output, args=(process.stderr, command, output, True), daemon=True),
    ]
    if process.stdin:
        threads.append(threading.Thread(target=feed, args=(process.stdin, command.stdin), daemon=True))
    for thread in threads:
        thread.start()
    return Agent(process, tuple(threads))


def feed(stdin: IO[bytes], text: str) -> None:
    with suppress(BrokenPipeError), stdin:
        stdin.write(text.encode())


def copy_output(stream: IO[bytes], command: Command, output: Output, is_error: bool) -> None:
    """Copy a stream to the log, a line at a time, and show it if it is to be shown: on a terminal as it comes."""
    ours = sys.stderr.buffer if is_error else sys.stdout.buffer
    show = output.show_errors or not is_error
    raw = show and not is_error and sys.stdout.isatty()
    pending = b""
    # A pseudo-terminal ends with an error, a pipe with an empty read.
    with suppress(OSError):
        while chunk := os.read(stream.fileno(), 65536):
            if raw:
                ours.write(chunk)
                ours.flush()
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                text = copy_line(line, command, output, is_error)
                if text and show and not raw:
                    ours.write(text.encode() + b"\n")
                    ours.flush()
    if pending:
        copy_line(pending, command, output, is_error)


def copy_line(line: bytes, command: Command, output: Output, is_error: bool) -> str:
    """Log the line, or keep it if it is a record; return what of it is to be shown."""
    # A progress bar redraws itself after carriage returns: only what it showed last is kept.
    text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")
    if marked(text):
        output.records.append(text)
        return ""
    if is_error:
        output.errors.append(text)
    label, text = command.label(text)
    if text.strip():
        # A log on a full disk must not stop us from reading: whoever writes to us would wait for ever.
        with suppress(OSError):
            log = output.error_log if is_error else output.log
            log.write(f"{label}{text}\n")
            log.flush()
    return text


def failed(agents: Sequence[Agent]) -> int | None:
    return next((number for number, agent in enumerate(agents) if agent.process.poll()), None)


def end(agent: Agent, deadline: float) -> None:
    """Wait for an agent that was asked to end, then end whatever is left in its process group."""
    with suppress(subprocess.TimeoutExpired):
        agent.process.wait(max(0, deadline - time.monotonic()))
    with suppress(ProcessLookupError):
        os.killpg(agent.process.pid, signal.SIGKILL)
    agent.process.wait()
    for thread in agent.threads:
        thread.join(timeout=5)
