"""Run the commands of a plan side by side, and end them all when one fails."""

import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from ddp.errors import ERRORS_VARIABLE
from ddp.lifetime import end_with_parent
from ddp.plan import NodeCommand

# Seconds from SIGTERM to SIGKILL. torchrun itself gives its ranks 30 s.
GRACE = 35


@dataclass(frozen=True)
class Agent:
    """One node's command, running, with the threads that copy what it writes."""

    node_rank: int
    process: subprocess.Popen[bytes]
    readers: tuple[threading.Thread, ...]


def run_all(plan: Sequence[NodeCommand], log: IO[str], errors: Path, stop_with_parent: bool) -> str | None:
    """Run every command of the plan until all have ended, or until one fails, which ends the others.

    With `stop_with_parent` it also ends them when the process that started this one is gone: a Snakemake that was killed would
    otherwise leave a training that goes on writing where the next one writes.

    What they write to stdout appears on our stdout, as on a terminal if that is one. Everything goes to the log, a line at a
    time, with the node in front where there are several.

    Args:
        errors: new folder in which the processes leave what went wrong, see `errors.leave_for_launch`.

    Returns:
        None if all succeeded, else one line about the first failure.
    """
    errors.mkdir()
    with stop_signals() as stop:
        parent = os.getppid()
        agents = [start(command, log, errors, several=len(plan) > 1) for command in plan]
        while not stop.is_set() and any(agent.process.poll() is None for agent in agents) and not failed(agents):
            time.sleep(0.05)
            if stop_with_parent and os.getppid() != parent:
                stop.set()
        first = failed(agents)
        # All at once first: one after the other, stubborn agents would outlast a scheduler's patience.
        for agent in agents:
            agent.process.terminate()
        for agent in agents:
            end(agent)
        if stop.is_set():
            return "stopped"
        return first_error(first, errors) if first else None


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


def start(command: NodeCommand, log: IO[str], errors: Path, several: bool) -> Agent:
    if sys.stdout.isatty():
        # On a terminal the program gets one of the same size, so that it draws its progress bar.
        our_end, its_end = pty.openpty()
        termios.tcsetwinsize(its_end, termios.tcgetwinsize(sys.stdout))
    else:
        our_end, its_end = os.pipe()
    process = subprocess.Popen(
        command.command,
        env={**os.environ, **command.environment, ERRORS_VARIABLE: str(errors)},
        stdin=subprocess.DEVNULL,
        stdout=its_end,
        stderr=subprocess.PIPE,
        # A process group of its own: Ctrl-C reaches us alone, and we end it in order.
        start_new_session=True,
        # Not SIGTERM: with nobody to read what it writes, torchrun may not get to its end. Its ranks get SIGTERM in turn.
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
    )
    os.close(its_end)
    assert process.stderr is not None
    prefix = f"[node {command.node_rank}] " if several else ""
    readers = (
        threading.Thread(target=copy_output, args=(os.fdopen(our_end, "rb", 0), log, prefix, True), daemon=True),
        threading.Thread(target=copy_output, args=(process.stderr, log, prefix, False), daemon=True),
    )
    for reader in readers:
        reader.start()
    return Agent(command.node_rank, process, readers)


def copy_output(stream: IO[bytes], log: IO[str], prefix: str, show: bool) -> None:
    """Copy a stream to the log, a line at a time, and to our stdout if it is to be shown: on a terminal as it comes."""
    raw = show and sys.stdout.isatty()
    pending = b""
    # A pseudo-terminal ends with an error, a pipe with an empty read.
    with suppress(OSError):
        while chunk := os.read(stream.fileno(), 65536):
            if raw:
                show_now(chunk)
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                log_line(line, log, prefix)
                if show and not raw:
                    show_now(line + b"\n")
    log_line(pending, log, prefix)


def show_now(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def log_line(line: bytes, log: IO[str], prefix: str) -> None:
    # A progress bar redraws itself after carriage returns: only what it showed last is kept.
    text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")
    if text.strip():
        log.write(f"{prefix}{text}\n")
        log.flush()


def failed(agents: Sequence[Agent]) -> Agent | None:
    return next((agent for agent in agents if agent.process.poll()), None)


def end(agent: Agent) -> None:
    """Wait for an agent that was asked to end, then end whatever is left in its process group."""
    with suppress(subprocess.TimeoutExpired):
        agent.process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(agent.process.pid, signal.SIGKILL)
    agent.process.wait()
    for reader in agent.readers:
        reader.join(timeout=5)


def first_error(agent: Agent, errors: Path) -> str:
    """What the first process to fail said, or else how its node's command ended."""
    said = sorted(errors.iterdir())
    if said:
        return said[0].read_text()
    status = agent.process.returncode
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"the command of node {agent.node_rank} {how}"
