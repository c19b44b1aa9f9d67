"""Starting a cluster's daemons, one after the other."""

import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from namespaces import LOGIN, STATE, Failure

# Seconds that a daemon may need on a busy machine; one that has ended is noticed at once.
PATIENCE = 300


class Boot:
    """Starts the daemons one after the other, and prints it."""

    def __init__(self, ends: list[int]) -> None:
        self.ends = ends
        self.since = time.monotonic()

    def say(self, step: str) -> None:
        now = time.monotonic()
        print(f"{now - self.since:5.1f} s  {step}", flush=True)
        self.since = now

    def daemon(self, name: str, *arguments: str, ready: Callable[[], bool]) -> None:
        log = STATE / "log" / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [name, *arguments], cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.wait(lambda: ready() or process.poll() is not None, f"{name} did not come up", log)
        if process.poll() is not None:
            print(tail(log))
            raise Failure(f"{name} did not come up: it ended with status {process.returncode}")
        self.say(name)

    def wait(self, ready: Callable[[], bool], problem: str, *logs: Path) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if select.select(self.ends, [], [], 0.05)[0]:
                sys.exit("cluster: whoever started it has ended")
            if time.monotonic() > deadline:
                print(*map(tail, logs), sep="\n")
                raise Failure(f"{problem} in {PATIENCE} s")


def address(member: str) -> str:
    return "10.77.0.1" if member == LOGIN else f"10.77.0.{10 + int(member[1:])}"


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address(LOGIN), port)) == 0


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
    return "\n".join([f"{log}:", *lines])
