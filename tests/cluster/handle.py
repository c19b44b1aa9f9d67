"""The cluster for the tests: the commands of `cluster.py`, and some more."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cluster.namespaces import LOGIN, STATE, processes
from waiting import until

PROGRAM = [sys.executable, str(Path(__file__).with_name("cluster.py"))]


class Cluster:
    """A running cluster. All nodes see `shared`; `/scratch` and `/tmp` are a node's own."""

    shared = STATE / "shared"

    def __init__(self) -> None:
        self.nodes = sorted(
            (entry.name for entry in (STATE / "nodes").iterdir()), key=lambda name: int(name[1:])
        )

    @staticmethod
    def running() -> bool:
        return bool(processes(LOGIN))

    def run(
        self,
        *command: object,
        node: str | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node or another node; its output is text. `env` is added
        to the environment.
        """
        return subprocess.run(
            _inside(node, command),
            cwd=cwd,
            env=os.environ | (env or {}),
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )

    def batch(self, *options: object, cwd: Path | None = None, timeout: float = 60) -> str:
        """Submit a job with sbatch and wait for its end; returns its id.

        `sbatch --wait` notices the end up to 30 s late.
        """
        done = self.run("sbatch", "--parsable", *options, cwd=cwd)
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        until(lambda: not self.run("squeue", "--noheader", f"--jobs={job}").stdout.strip(), timeout)
        return job

    def popen(
        self,
        *command: object,
        node: str | None = None,
        env: Mapping[str, str] | None = None,
        **options,
    ) -> subprocess.Popen[str]:
        """Start a command. Signals to it reach the command; it ends with the command."""
        return subprocess.Popen(
            _inside(node, command), env=os.environ | (env or {}), text=True, **options
        )

    def kill(self, node: str) -> None:
        """A power cut."""
        _do("kill", node)

    def cut(self, node: str) -> None:
        """Cut it off the network."""
        _do("cut", node)

    def join(self, node: str) -> None:
        """Reconnect it to the network."""
        _do("join", node)

    def drain(self, node: str) -> None:
        """Give it no new jobs."""
        _do("drain", node)

    def start(self, node: str) -> None:
        """Put it back in service after any of these."""
        _do("start", node)

    def state(self, node: str) -> str:
        """Its state in `sinfo`: idle, mixed, down* …"""
        return self.run(
            "sinfo", "--noheader", "--partition=main", f"--nodes={node}", "--format=%T"
        ).stdout.strip()

    def processes(self, node: str | None = None) -> dict[int, str]:
        """Command lines of the processes on a node or the login node, by process number on the
        host.
        """
        return processes(node or LOGIN)


def _inside(node: str | None, command: tuple[object, ...]) -> list[str]:
    return [*PROGRAM, "run", "--node", node or LOGIN, "--", *map(str, command)]


def _do(verb: str, node: str) -> None:
    done = subprocess.run(
        [*PROGRAM, verb, node], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
