"""Run commands in parallel, copy their output, and end all of them if one fails."""

import math
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import IO

from manynodes.base.errors import parts_of, shortened, uncoloured
from manynodes.base.processes import STARTED, WARNINGS, end_with_parent, let_look, stat_of
from manynodes.base.showing import show
from manynodes.launching.endings import marked, unmarked
from manynodes.launching.logs import Log
from manynodes.schedulers.base import Command

POLL = 0.05  # seconds between two looks at the commands
# Seconds in which the last output of a command comes, also from what it has left running, and from
# what is left of that.
LATE, LATEST = 1, 10
# Seconds without a look after which this process was suspended and not only slow, and seconds in
# which ranks that were suspended too notice that they have waited too long.
SUSPENDED = 10
RECENT = 60
# Enough for the last words of torchrun on each of many nodes.
LAST_LINES = 10_000
# Characters that are kept of each of them, half at its beginning, where an error has its name.
MOST_CHARACTERS = 4_001
# Bytes after which a line is cut: a program may never end one.
LONGEST_LINE = 65_536


@dataclass(frozen=True)
class Output:
    """Destinations of the output of commands.

    stdout goes line by line to our stdout and to a log; stderr to a log and, if requested, to our
    stderr.

    Attributes:
        log: for stdout.
        error_log: for stderr; may be the same.
        records: lines of records in the output, see `endings.records`; they go nowhere else. None
            for the output of a program, which has no records, whatever it prints.
        errors: the last lines of stderr of all commands.
        shown: what may still be shown; None for no limit.
        heard: called with every line, in several threads.
        together: both streams go through one pipe, as stdout, in the order in which they were
            written; `errors` has the last lines of both.
    """

    log: Log
    error_log: Log
    show_errors: bool = False
    records: list[str] | None = field(default_factory=list)
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    shown: "Allowance | None" = None
    heard: Callable[[str], None] | None = None
    together: bool = False


class Allowance:
    """Bytes that may still be shown."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def take(self, text: bytes) -> bytes:
        """The text to show: as it is, a notice once when the allowance is used up, or nothing."""
        before, self.left = self.left, self.left - len(text)
        if self.left >= 0:
            return text
        notice = f"supervise: more than {self.most:,} bytes of output; the rest is only in the log"
        return notice.encode() + b"\n" if before >= 0 else b""


@dataclass(frozen=True)
class Agent:
    """A running command, with the threads that copy its output."""

    process: subprocess.Popen[bytes]
    threads: tuple[threading.Thread, ...]


@dataclass(frozen=True)
class Outcome:
    """How the commands ended.

    Attributes:
        stopped: this process was asked to stop.
        failed: number of the command that failed first; None if none failed. Commands that failed
            because they were told to end count only if this process was asked to stop.
        status: exit status of that command, as in subprocess.
        suspended: for how many seconds this process was not running shortly before: a scheduler can
            suspend a job.
        asked: when this process was asked to stop, in seconds since the epoch; infinite while it
            was not, or if the commands had ended before.
        heard_out: all that the commands have written is copied. It is not if the reader of our own
            output does not go on.
    """

    stopped: bool = False
    failed: int | None = None
    status: int = 0
    suspended: float = 0.0
    asked: float = 0.0
    heard_out: bool = True

    @property
    def told_to_end(self) -> bool:
        """Whether the commands still ran when this process was asked to stop."""
        return self.stopped and math.isfinite(self.asked)


def run_all(
    commands: Sequence[Command],
    output: Output,
    stop: "Stop",
    grace: float,
    stop_with: int | None = None,
    look: Callable[[int, bool], None] = lambda _pid, _last: None,
    clear: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run every command until all have ended, or until one fails, which ends the others.

    Args:
        stop: ends them once it is asked, see `stop_when_signalled`.
        grace: seconds from SIGTERM to SIGKILL.
        stop_with: also end them when this process ends. After a killed Snakemake, the
            training would otherwise write to the same files as the next one.
        look: called with every command's process number all the time, and, with True, for the last
            time before it is told to end.
        clear: ends what the commands have left running, which may hold their output open.
    """
    gone = watched(stop_with)
    agents = [start(command, output) for command in commands]
    looked, suspended, resumed = time.monotonic(), 0.0, 0.0
    while (
        not stop.asked and failed(agents) is None and not all(has_ended(agent) for agent in agents)
    ):
        time.sleep(POLL)
        now = time.monotonic()
        if now - looked > SUSPENDED:
            suspended, resumed = now - looked, now
        looked = now
        for agent in agents:
            look(agent.process.pid, False)
        if gone():
            stop.asked = True
    if time.monotonic() - resumed > RECENT:
        suspended = 0.0
    first, asked = failed(agents), time.time() if stop.asked else math.inf
    running = [agent for agent in agents if not has_ended(agent)]
    for agent in running:
        look(agent.process.pid, True)
    # First to all of them: one after the other could exceed the scheduler's grace period.
    for agent in running:
        # Of another user's, such as sudo, the end is awaited.
        with suppress(PermissionError):
            os.kill(agent.process.pid, signal.SIGTERM)
        # One that was stopped hears of it only when it is continued.
        signal_group(agent, signal.SIGCONT)
    deadline = time.monotonic() + grace
    for agent in running:
        end(agent, deadline)
    await_output(agents, LATE)
    clear()
    await_output(agents, LATEST)
    if first is None and stop.asked:
        first = failed(agents)
    heard_out = not any(thread.is_alive() for agent in agents for thread in agent.threads)
    status = 0 if first is None else agents[first].process.returncode
    return Outcome(stop.asked, first, status, suspended, asked, heard_out)


def watched(pid: int | None) -> Callable[[], bool]:
    """Tells whether a process has ended; without a process, never."""
    if pid is None:
        return lambda: False

    def start() -> str:
        # Another process may get the number, but not the start.
        try:
            fields = stat_of(pid)
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return "" if fields[0] in "ZX" else fields[STARTED]

    begun = start()

    def has_ended() -> bool:
        # Of a machine that is out of files for now, nothing is known.
        with suppress(OSError):
            return not begun or start() != begun
        return False

    return has_ended


def stopping_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and unless they are ignored SIGHUP (`nohup` asks for that) and a scheduler's
    warnings.
    """
    others = (signal.SIGHUP, *WARNINGS)
    heard = [number for number in others if signal.getsignal(number) != signal.SIG_IGN]
    return [signal.SIGTERM, signal.SIGINT, *heard]


@dataclass
class Stop:
    """Whether this process was asked to stop.

    Not a threading.Event: a handler that interrupts another one would wait for its lock for ever.
    A parent with several threads that is killed sends up to seven signals at once, and 2 of 60
    supervisors were seen to hang.
    """

    asked: bool = False

    def wait(self, seconds: float) -> None:
        """Return when it is asked, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.asked and time.monotonic() < deadline:
            time.sleep(POLL)


def stop_when_signalled() -> Stop:
    """What the `stopping_signals` ask for from now on, instead of their usual effect."""
    stop = Stop()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stop.asked = True

    for number in stopping_signals():
        signal.signal(number, handle)
    return stop


def ignore_stopping_signals() -> None:
    """From now on. While it shuts down, Python gives those that are handled their default effect
    back: the status was -15 after one that came then.
    """
    for number in stopping_signals():
        signal.signal(number, signal.SIG_IGN)


def start(command: Command, output: Output) -> Agent:
    if sys.stdout.isatty():
        # On a terminal, the program gets a terminal of the same size and draws its progress bar.
        our_end, its_end = pty.openpty()
        termios.tcsetwinsize(its_end, termios.tcgetwinsize(sys.stdout))
    else:
        our_end, its_end = os.pipe()
    process = subprocess.Popen(
        command.arguments,
        env={**({} if command.alone else os.environ), **command.environment},
        stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
        stdout=its_end,
        stderr=its_end if output.together else subprocess.PIPE,
        # In its own process group: Ctrl-C reaches only us, and we end it in order.
        start_new_session=True,
        preexec_fn=partial(before_the_command, command, os.getpid()),
        pass_fds=command.pass_fds,
        cwd=command.directory,
    )
    os.close(its_end)
    copies = [partial(copy_output, os.fdopen(our_end, "rb", 0), command, output, False)]
    if process.stderr:
        copies.append(partial(copy_output, process.stderr, command, output, True))
    if process.stdin:
        copies.append(partial(feed, process.stdin, command.stdin))
    threads = tuple(threading.Thread(target=copy, daemon=True) for copy in copies)
    for thread in threads:
        thread.start()
    return Agent(process, threads)


def before_the_command(command: Command, parent: int) -> None:
    end_with_parent(command.end_signal)
    let_look(parent)
    for number in command.ignored:
        signal.signal(number, signal.SIG_IGN)


def feed(stdin: IO[bytes], text: str) -> None:
    with suppress(BrokenPipeError), stdin:
        stdin.write(text.encode())


def copy_output(stream: IO[bytes], command: Command, output: Output, is_error: bool) -> None:
    """Copy a stream to the log line by line, and show it if requested; on a terminal without
    delay.
    """
    ours = sys.stderr.buffer if is_error else sys.stdout.buffer
    shows = output.show_errors or not is_error
    raw = shows and not is_error and sys.stdout.isatty()
    pending = b""

    def tell(text: bytes) -> None:
        show(ours, output.shown.take(text) if output.shown else text)

    def pass_on(lines: Iterable[bytes]) -> None:
        texts = [copy_line(line, command, output, is_error) for line in lines]
        # All that was read at once: on a slow disk, 20,000 lines of a program that had failed took
        # longer one by one than they are waited for, and the last one was not heard. And before a
        # terminal that somebody has stopped.
        with suppress(OSError):
            (output.error_log if is_error else output.log).flush()
        for text in texts:
            if text and shows and not raw:
                tell(text.encode() + b"\n")

    # A pseudo-terminal ends with an error, a pipe with an empty read.
    with stream, suppress(OSError):
        while chunk := os.read(stream.fileno(), 65536):
            if raw:
                tell(chunk)
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > LONGEST_LINE:
                # A progress bar that redraws itself, or a line without end.
                *_, pending = pending.rsplit(b"\r", 1)
                while len(pending) > LONGEST_LINE:
                    lines.append(pending[:LONGEST_LINE])
                    pending = pending[LONGEST_LINE:]
            pass_on(lines)
    # A last line without an end.
    if pending:
        with suppress(OSError):
            pass_on([pending])


def copy_line(line: bytes, command: Command, output: Output, is_error: bool) -> str:
    """Log a line, or keep it if it is a record; returns the part to show."""
    # A progress bar redraws itself after a carriage return; only its last form is logged.
    text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")
    if output.records is None:
        text = unmarked(text)
    elif marked(text):
        output.records.append(text)
        return ""
    if is_error or output.together:
        output.errors.append(shortened(uncoloured(text), MOST_CHARACTERS))
    if output.heard:
        for part in parts_of(text) if output.together else (text,):
            output.heard(part)
    label, text = command.label(text)
    if text.strip():
        # If the disk is full, keep reading: otherwise the program would block on a full pipe.
        with suppress(OSError):
            (output.error_log if is_error else output.log).write(f"{label}{text}\n")
    return text


def has_ended(agent: Agent) -> bool:
    """Whether an agent has ended; then the rest of its process group is killed.

    At once, and before its status is taken: from then on its number may be somebody else's.
    """
    if agent.process.returncode is None:
        with suppress(ChildProcessError):  # SIGCHLD is ignored here, and its status lost
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, agent.process.pid, flags) is None:
                return False
            signal_group(agent, signal.SIGKILL)
        agent.process.wait()
    return True


def signal_group(agent: Agent, number: signal.Signals) -> None:
    """Send a signal to what of the process group of an agent may get it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(agent.process.pid, number)


def failed(agents: Sequence[Agent]) -> int | None:
    statuses = [has_ended(agent) and agent.process.returncode for agent in agents]
    return next((number for number, status in enumerate(statuses) if status), None)


def end(agent: Agent, deadline: float) -> None:
    """Wait for an agent that was told to end; after the deadline, kill it."""
    while not has_ended(agent):
        if time.monotonic() >= deadline:
            signal_group(agent, signal.SIGKILL)
        time.sleep(POLL)


def await_output(agents: Sequence[Agent], seconds: float) -> None:
    """Wait until all that the agents have written is copied, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    for agent in agents:
        for thread in agent.threads:
            thread.join(max(0, deadline - time.monotonic()))
