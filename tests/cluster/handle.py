"""The cluster as the tests hold it: what `cluster.py` does, by name, and what it does not show."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cluster.namespaces import LOGIN, STATE, processes
from waiting import until

PROGRAM = [sys.executable, str(Path(__file__).with_name("cluster.py"))]


class Cluster:
    """One that is up. What all nodes see alike is in `shared`; a node's own folders are `/scratch`
    and `/tmp`.
    """

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
        """Run a command on the login node or another, to its end; its output is text. `env` is
        added to the environment here.
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
        """Start one. A signal to it reaches the command; the end of it is the command's."""
        return subprocess.Popen(
            _inside(node, command), env=os.environ | (env or {}), text=True, **options
        )

    def kill(self, node: str) -> None:
        """Power cut."""
        _do("kill", node)

    def cut(self, node: str) -> None:
        """Off the network."""
        _do("cut", node)

    def join(self, node: str) -> None:
        """On the network again."""
        _do("join", node)

    def drain(self, node: str) -> None:
        """No new jobs."""
        _do("drain", node)

    def start(self, node: str) -> None:
        """Back in service, whatever was done to it."""
        _do("start", node)

    def state(self, node: str) -> str:
        """As `sinfo` says it: idle, mixed, down* …"""
        return self.run(
            "sinfo", "--noheader", "--partition=main", f"--nodes={node}", "--format=%T"
        ).stdout.strip()

    def processes(self, node: str | None = None) -> dict[int, str]:
        """What runs on a node or the login node: command lines by process number, as numbered out
        here.
        """
        return processes(node or LOGIN)


def _inside(node: str | None, command: tuple[object, ...]) -> list[str]:
    return [*PROGRAM, "run", "--node", node or LOGIN, "--", *map(str, command)]


def _do(verb: str, node: str) -> None:
    done = subprocess.run(
        [*PROGRAM, verb, node], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
