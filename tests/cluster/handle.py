"""The cluster for the tests: the commands of `cluster.py`, and some more."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import forked
from cluster.namespaces import (
    ENTERED,
    LOGIN,
    OF_PBS,
    ROOT,
    SEARCHED,
    UID,
    init,
    processes,
    state_of,
)
from leftovers import FAILED, MARK, after_grace, kill
from waiting import until

# Status of cluster.py if a cluster cannot run on this machine.
IMPOSSIBLE = 2
PROGRAM = [sys.executable, str(Path(__file__).with_name("cluster.py"))]


class Cluster:
    """A running cluster of Slurm. All nodes see `shared`; `/scratch` and `/tmp` are a node's own.

    Attributes:
        kind: its scheduler, see cluster.py.
        as_user: options of `cluster.py run` for the user who owns jobs.
    """

    kind = "slurm"
    as_user: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.state_folder = state_of(self.kind)
        self.shared = self.state_folder / "shared"
        self.nodes = sorted(
            (entry.name for entry in (self.state_folder / "nodes").iterdir()),
            key=lambda name: int(name[1:]),
        )

    @classmethod
    def running(cls) -> bool:
        return bool(processes(LOGIN, state_of(cls.kind)))

    @classmethod
    def environment(cls) -> dict[str, str]:
        """For cluster.py, and for what runs inside. Other users and nodes cannot see our TMPDIR.
        With any other, two clusters would meet there: qsub has its socket in it.
        """
        ours = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
        return ours | {"CLUSTER_KIND": cls.kind}

    def inside(self, node: str | None = None, *, as_root: bool = False) -> list[str]:
        """The command that runs a command on a node, or on the login node."""
        user = () if as_root else self.as_user
        return [*PROGRAM, "run", "--node", node or LOGIN, *user, "--"]

    def run(
        self,
        *command: object,
        node: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        as_root: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node or another node; its output is text. `env` is added
        to the environment.
        """
        return subprocess.run(
            [*self.inside(node, as_root=as_root), *map(str, command)],
            cwd=cwd,
            env=self.environment() | (env or {}),
            capture_output=True,
            text=True,
            check=False,
        )

    @cached_property
    def changes(self) -> tuple[str, dict[str, str], set[str]]:
        """What `run` adds to PATH, the other variables that it sets, and those that it removes."""
        given = self.environment()
        pairs = [line.partition("=") for line in self.run("env", "-0").stdout.split("\0") if line]
        seen = {name: value for name, _, value in pairs}
        changed = {name: value for name, value in seen.items() if given.get(name) != value}
        path = changed.pop("PATH").removeprefix(given["PATH"])
        return path, changed, given.keys() - seen.keys()

    def there(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command that `run` starts with this one."""
        path, changed, removed = self.changes
        kept = {name: value for name, value in environment.items() if name not in removed}
        return {**kept, **changed, "PATH": environment["PATH"] + path}

    def ask(self, *command: object) -> subprocess.CompletedProcess[str]:
        """The same on the login node as root, for a question that waits for nothing: tests ask it
        again and again, and a Python for each, as `run` starts, costs more than the answer.
        """
        first = init(LOGIN, self.state_folder)
        assert first, "no cluster is up"
        environment = self.environment()
        environment["PATH"] += f":{SEARCHED}:{OF_PBS}"
        return subprocess.run(
            ["nsenter", f"--target={first}", *ENTERED, *map(str, command)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def batch(self, *options: object, cwd: Path | None = None) -> str:
        """Submit a job with sbatch and wait for its end; returns its id.

        `sbatch --wait` notices the end up to 30 s late.
        """
        done = self.run("sbatch", "--parsable", *options, cwd=cwd)
        assert done.returncode == 0, done.stderr
        job = done.stdout.strip()
        until(lambda: not self.ask("squeue", "--noheader", f"--jobs={job}").stdout.strip())
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
            [*self.inside(node), *map(str, command)],
            env=self.environment() | (env or {}),
            text=True,
            **options,
        )

    def kill(self, node: str) -> None:
        """A power cut."""
        self.do("kill", node)

    def cut(self, node: str) -> None:
        """Cut it off the network."""
        self.do("cut", node)

    def throttle(self, node: str) -> None:
        """Slow its link down."""
        self.do("throttle", node)

    def join(self, node: str) -> None:
        """Reconnect it to the network, at full speed."""
        self.do("join", node)

    def drain(self, node: str) -> None:
        """Give it no new jobs."""
        self.do("drain", node)

    def start(self, node: str) -> None:
        """Put it back in service after any of these."""
        self.do("start", node)

    def state(self, node: str) -> str:
        """Its state in `sinfo`: idle, mixed, down* …"""
        return self.ask(
            "sinfo", "--noheader", "--partition=main", f"--nodes={node}", "--format=%T"
        ).stdout.strip()

    def processes(self, node: str | None = None) -> dict[int, str]:
        """Command lines of the processes on a node or the login node, by process number on the
        host.
        """
        return processes(node or LOGIN, self.state_folder)

    def start_daemon(self, daemon: str) -> None:
        """Start a daemon of the login node again; it outlives the test, and has no mark of it."""
        done = self.run("env", f"--unset={MARK}", daemon, as_root=True)
        assert done.returncode == 0, done.stderr

    def usable(self, node: str) -> bool:
        """Whether it is in service. A + behind a state is that a job ends there meanwhile; planned,
        or a -, that the scheduler has chosen the node for a job that waits.
        """
        return self.state(node).rstrip("+-") in {
            "idle",
            "mixed",
            "allocated",
            "completing",
            "planned",
        }

    def out_of_service(self) -> list[str]:
        return [node for node in self.nodes if not self.usable(node)]

    def jobs(self) -> list[str]:
        """The jobs of this checkout's tests that have not ended."""
        shown = self.ask("squeue", "--noheader", "--format=%i|%Z").stdout
        rows = [line.strip().partition("|") for line in shown.splitlines()]
        return [job for job, _, folder in rows if self.is_ours(folder)]

    def is_ours(self, folder: str) -> bool:
        """Whether a job with this working folder is of this checkout's tests."""
        return any(Path(folder).is_relative_to(ours) for ours in (self.shared, ROOT))

    def cancel(self, jobs: Collection[str]) -> None:
        self.run("scancel", *jobs)

    def left(self, folder: Path) -> dict[int, str]:
        """Processes on the nodes that have to do with a folder below `shared`: as their own, on
        their command line, or in their environment.
        """
        found = {}
        for node in self.nodes:
            for pid, line in self.processes(node).items():
                with suppress(OSError):
                    entries = (Path(f"/proc/{pid}/cwd").readlink(), line, environment_of(pid))
                    if any(str(folder) in str(entry) for entry in entries):
                        found[pid] = line
        return found

    def do(self, verb: str, node: str) -> None:
        done = subprocess.run(
            [*PROGRAM, verb, node],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


class PbsCluster(Cluster):
    """A running cluster of OpenPBS, whose jobs belong to a user who is not root."""

    kind = "pbs"
    as_user = ("--user",)

    def await_end(self, job: str) -> None:
        until(lambda: self.job(job).get("job_state") == "F")

    def give(self, folder: Path) -> None:
        """Make a folder and all in it the user's."""
        subprocess.run(["chown", "--recursive", f"{UID}:{UID}", str(folder)], check=True)

    def job(self, job: str) -> dict[str, Any]:
        """What qstat shows of a job."""
        shown = self.ask("qstat", "-x", "-f", "-F", "json", job).stdout
        return json.loads(shown, strict=False)["Jobs"][job] if shown.strip() else {}

    def usable(self, node: str) -> bool:
        return set(self.state(node).split(",")) <= {"free", "job-busy", "job-exclusive"}

    def jobs(self) -> list[str]:
        shown = self.ask("qstat", "-f", "-F", "json").stdout
        jobs = json.loads(shown, strict=False).get("Jobs", {}) if shown.strip() else {}
        return [
            job
            for job, about in jobs.items()
            if self.is_ours(about.get("Variable_List", {}).get("PBS_O_WORKDIR", ""))
        ]

    def cancel(self, jobs: Collection[str]) -> None:
        self.run("qdel", *jobs, as_root=True)

    def configure(self, change: str) -> None:
        """Change the server or a queue: `set queue workq started = True`."""
        assert self.run("qmgr", "-c", change, as_root=True).returncode == 0

    def state(self, node: str) -> str:
        """Its state in `pbsnodes`: free, job-busy, down …"""
        shown = json.loads(self.ask("pbsnodes", "-F", "json", node).stdout)
        return str(shown["nodes"][node]["state"])


class GridEngineCluster(PbsCluster):
    """A running cluster of Grid Engine, for jobs in which ssh reaches the nodes."""

    kind = "gridengine"

    def state(self, node: str) -> str:
        return "on" if self.processes(node) else "off"

    def usable(self, node: str) -> bool:
        return self.state(node) == "on"

    def jobs(self) -> list[str]:
        shown = self.run("qstat", "-u", "alice").stdout.splitlines()[2:]
        return [line.split()[0] for line in shown]

    def await_end(self, job: str) -> None:
        until(lambda: job not in self.run("qstat", "-u", "*").stdout)


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


def check_after(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test: end its jobs and put nodes back into service. One that has passed must have
    done so itself.
    """
    yield
    failed = request.node.stash.get(FAILED, False)
    if failed:
        # A Snakemake would submit them again.
        forked.kill()
        kill(lambda mark: mark == os.environ[MARK])
    jobs = cluster.jobs() if failed else after_grace(cluster.jobs)
    if jobs:
        cluster.cancel(jobs)
        until(lambda: not set(jobs) & set(cluster.jobs()))
    # A node of a busy machine may answer late.
    out = cluster.out_of_service() if failed else after_grace(cluster.out_of_service)
    broken = {node: cluster.state(node) for node in out}
    for node in broken:
        cluster.start(node)
    if not failed and (jobs or broken):
        pytest.fail(f"left behind: jobs {jobs}, nodes out of service {broken}", pytrace=False)


def bring_up(kind: type[Cluster]) -> Iterator[Cluster]:
    """The cluster from `cluster.py up`, or one that ends with the tests."""
    found = kind.running()
    if not found:
        done = subprocess.run(
            [*PROGRAM, "up", "--end-with-parent"],
            env=kind.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        # Continuous integration has what a Slurm needs.
        needed = os.environ.get("CI") and kind is Cluster
        if done.returncode not in (0, IMPOSSIBLE) or (done.returncode and needed):
            pytest.fail(done.stdout, pytrace=False)
        if done.returncode:
            pytest.skip(done.stdout.splitlines()[-1])
    yield kind()
    if not found:
        subprocess.run([*PROGRAM, "down"], env=kind.environment(), check=True)
