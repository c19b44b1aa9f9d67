"""Programs in processes of their own that need not import torch or Snakemake: a server has
imported them and forks for each program.

A forked program differs from one that was started by a shell in its parent and in its command
line, which are the server's. Tests that look for processes by their command line, change the
environment in which torch is imported, or measure memory start a Python of their own.
"""

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from leftovers import MARK

FORK_SERVER = Path(__file__).with_name("fork_server.py")
SCRIPTS = Path(__file__).resolve().parents[1] / "workflow/scripts"
SERVERS: list["Server"] = []


class Forked:
    """A running program, with as much of subprocess.Popen as the tests use.

    Attributes:
        stdout, stderr: what it writes, in bytes; with stderr merged, the latter is None.
        status: pipe on which the server tells its number and, at its end, its status.
    """

    def __init__(self, args: Sequence[str], stdout: int, stderr: int | None, status: int) -> None:
        self.args = args
        self.returncode: int | None = None
        self.stdout = os.fdopen(stdout, "rb", 0)
        self.stderr = None if stderr is None else os.fdopen(stderr, "rb", 0)
        self.status = os.fdopen(status)
        self.pid = int(self.status.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self.status.readline())
            self.status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> list[str]:
        """All that it writes, to its end."""
        said = read_all([self.stdout.fileno(), *([self.stderr.fileno()] if self.stderr else [])])
        self.wait()
        return said


class Server:
    """The process that forks. It ends with the process that has started it.

    Args:
        inside: command that runs a command elsewhere, such as on a cluster. There, programs can
            be run to their end, but the number of their process is another one here.
        modules: that it imports; those of all programs unless given.
        environment: of the server; each program has its own.
    """

    def __init__(
        self,
        inside: Sequence[str] = (),
        modules: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.inside = list(inside)
        self.ours, its = socket.socketpair()
        # One thread, so that a fork copies no lock of another thread. Its mark is the run's.
        environment = dict(environment) | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            MARK: f"{os.environ.get(MARK, '').partition(' ')[0]} run",
        }
        self.process = subprocess.Popen(
            [*self.inside, sys.executable, str(FORK_SERVER), str(its.fileno()), *modules],
            pass_fds=[its.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        its.close()
        self.lock = threading.Lock()
        SERVERS.append(self)

    def programs(self) -> list[int]:
        """Those that have not ended. Their environment in /proc is this server's."""
        with suppress(psutil.NoSuchProcess):
            ours = psutil.Process(self.process.pid)
            return [
                child.pid
                for server in (ours.children() if self.inside else [ours])
                for child in server.children()
                if child.status() != psutil.STATUS_ZOMBIE
            ]
        return []

    def start(
        self,
        command: Sequence[str],
        cwd: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        merged: bool = False,
    ) -> Forked:
        """Start a program.

        Args:
            command: the file of a program, or `-m` and a module, and the arguments.
            cwd: its folder; ours if there is none.
            merged: whether stderr goes to stdout.
        """
        out, its_out = os.pipe()
        errors, its_errors = (None, os.dup(its_out)) if merged else os.pipe()
        status, its_status = os.pipe()
        order = json.dumps([list(command), str(cwd or Path.cwd()), dict(environment)]).encode()
        its = [its_out, its_errors, its_status]
        with self.lock:
            # The length first, with the descriptors.
            socket.send_fds(self.ours, [len(order).to_bytes(8)], its)
            self.ours.sendall(order)
        for descriptor in its:
            os.close(descriptor)
        return Forked(command, out, errors, status)

    def run(
        self,
        command: Sequence[str],
        cwd: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        merged: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; its output is text."""
        process = self.start(command, cwd, environment, merged)
        said = process.communicate()
        return subprocess.CompletedProcess(command, process.wait(), *said)

    def stop(self) -> None:
        SERVERS.remove(self)
        self.ours.close()
        self.process.wait()


@functools.cache
def server() -> Server:
    """The server of this process; the tests of a run share it."""
    return Server()


def running() -> list[int]:
    """The forked programs that have not ended."""
    return [pid for server in SERVERS for pid in server.programs()]


def kill() -> None:
    """End them."""
    for pid in running():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_ranks(
    command: Sequence[str], processes: int, cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program that may import our library on several processes, with the variables that
    torchrun gives them; stderr goes to stdout.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = os.environ | {
        "PYTHONPATH": str(SCRIPTS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1", "LAUNCH_SECRET": "x" * 32,
    }  # fmt: skip
    started = [
        server().start(command, cwd, shared | {"RANK": rank, "LOCAL_RANK": rank}, merged=True)
        for rank in map(str, range(processes))
    ]
    # All outputs at once: none waits for a pipe that nobody reads.
    with ThreadPoolExecutor(processes) as pool:
        said = list(pool.map(Forked.communicate, started))
    return [
        subprocess.CompletedProcess(command, process.wait(), text[0])
        for process, text in zip(started, said, strict=True)
    ]


def read_all(descriptors: list[int]) -> list[str]:
    """All that is written to pipes, until nobody can write to them."""
    said = dict.fromkeys(descriptors, b"")
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    left = set(descriptors)
    while left:
        for descriptor, _ in poll.poll():
            if chunk := os.read(descriptor, 65536):
                said[descriptor] += chunk
            else:
                poll.unregister(descriptor)
                left.remove(descriptor)
    return [text.decode() for text in said.values()]
