"""A checkout for the tests, and Snakemake run in it as a user would."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from cluster.handle import Cluster, PbsCluster
from forked import Server, server

ROOT = Path(__file__).resolve().parents[1]
# What a Snakemake of a cluster imports that is not ours.
SNAKEMAKE = ("yaml", "jsonschema", "rich", "snakemake.cli", "snakemake_executor_plugin_slurm")
# The nodes of a test cluster claim more CPUs than the machine has.
ONE_THREAD = ["--set-threads", "evaluate=1"]


class Checkout:
    """A copy of the project in a folder with a space in its name, with its own results and
    scratch.

    Args:
        folder: empty or new.
        profile: Snakemake's.
        inside: command that runs a command elsewhere, such as on a cluster.
    """

    def __init__(
        self, folder: Path, profile: str = "profiles/local", inside: Sequence[str] = ()
    ) -> None:
        self.path = folder / "a checkout"
        self.scratch = folder / "scratch"
        self.scratch.mkdir(parents=True)
        self.inside = list(inside)
        self.command = [*inside, sys.executable, "-m", "snakemake", "--profile", profile]
        listed = [
            "git",
            "-c",
            "safe.directory=*",
            "-C",
            str(ROOT),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]
        for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split(
            "\0"
        ):
            if name and (ROOT / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.path / name)

    @property
    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name != "SLURM_TMPDIR"} | {
            "TMPDIR": str(self.scratch)
        }

    @cached_property
    def server(self) -> Server:
        """Where Snakemake is forked."""
        if not self.inside:
            return server()
        return Server(self.inside, SNAKEMAKE, self.environment)

    def there(self, environment: dict[str, str]) -> dict[str, str]:
        """An environment where Snakemake runs."""
        return environment

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `snakemake` with the profile and the arguments; both output streams as one text."""
        command = [*self.command[len(self.inside) + 1 :], *arguments]
        return self.server.run(command, self.path, self.there(self.environment), merged=True)

    def python(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Run a Python file of its, with arguments."""
        return server().run(list(map(str, command)), self.path, self.environment)

    def start(self, *arguments: str, **options) -> subprocess.Popen[str]:
        """The same, in the background."""
        return subprocess.Popen(
            [*self.command, *arguments], cwd=self.path, env=self.environment, text=True, **options
        )

    def run(self, *arguments: str) -> str:
        done = self.snakemake(*arguments)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def jobs(self, *arguments: str) -> dict[str, int]:
        """The jobs of a dry run, by rule."""
        return jobs_in(self.run("--dry-run", *arguments))


def jobs_in(said: str) -> dict[str, int]:
    """The jobs that Snakemake has announced, by rule."""
    if "Nothing to be done" in said:
        return {}
    table = re.search(r"^job +count\n-+ +-+\n(.*?)^total", said, re.MULTILINE | re.DOTALL)
    assert table, said
    return {rule: int(count) for rule, count in (line.split() for line in table[1].splitlines())}


class SlurmCheckout(Checkout):
    """A checkout on the cluster's shared file system, whose Snakemake runs on the login node."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        super().__init__(cluster.shared / "workflow", "profiles/slurm", cluster.inside())
        # Faster than a site's accounting would like.
        often = [
            *("--slurm-init-seconds-before-status-checks", "2"),
            *("--seconds-between-status-checks", "2"),
        ]
        self.command += [*often, "--latency-wait", "10", *ONE_THREAD]

    @property
    def environment(self) -> dict[str, str]:
        # Of a user who looks at other jobs, and submits arrays and waits for them.
        return super().environment | {
            "SQUEUE_PARTITION": "none", "SQUEUE_USERS": "nobody", "SACCT_FORMAT": "Account",
            "SBATCH_ARRAY_INX": "1-3", "SBATCH_SIGNAL": "B:USR1", "SBATCH_WAIT": "1",
        }  # fmt: skip

    def there(self, environment: dict[str, str]) -> dict[str, str]:
        return self.cluster.there(environment)


class PbsCheckout(Checkout):
    """The same on the cluster of OpenPBS, owned by its user."""

    def __init__(self, cluster: PbsCluster, profile: str = "profiles/pbs", name: str = "") -> None:
        folder = cluster.shared / (name or "workflow")
        self.cluster = cluster
        super().__init__(folder, profile, cluster.inside())
        cluster.give(folder)
        often = ["--seconds-between-status-checks", "2", "--latency-wait", "10", *ONE_THREAD]
        self.command += often if profile == "profiles/pbs" else []

    @property
    def environment(self) -> dict[str, str]:
        return self.cluster.environment()

    def there(self, environment: dict[str, str]) -> dict[str, str]:
        return self.cluster.there(environment)

    def program(self, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run one of its programs on the login node."""
        command = [sys.executable, f"workflow/scripts/{name}.py", *arguments]
        return self.cluster.run(*command, cwd=self.path)
