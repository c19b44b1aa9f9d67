"""What the tests on a Slurm cluster share: the cluster, and a checkout that all its nodes see."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from checkout import Checkout
from cluster.handle import PROGRAM, Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster that `make cluster-up` has brought up, or else one that ends with the tests."""
    found = Cluster.running()
    if not found:
        done = subprocess.run(
            [*PROGRAM, "up", "--end-with-parent"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode != 0 and (os.environ.get("CI") or os.geteuid() == 0):
            pytest.fail(done.stdout, pytrace=False)
        if done.returncode != 0:
            pytest.skip(done.stdout.splitlines()[-1])
    yield Cluster()
    if not found:
        subprocess.run([*PROGRAM, "down"], check=True)


class SlurmCheckout(Checkout):
    """A checkout on the cluster's shared file system, whose Snakemake runs on the login node."""

    def __init__(self, cluster: Cluster) -> None:
        self.inside = [*PROGRAM, "run", "--"]
        super().__init__(cluster.shared / "workflow", "profiles/slurm", self.inside)
        # Tests are in a hurry; a site's accounting is not to be asked so often.
        self.command += ["--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "10"]

    def on_the_login_node(self, *arguments: str) -> None:
        """The same checkout with the profile for one machine."""
        command = [*self.inside, sys.executable, "-m", "snakemake", "--profile", "profiles/local", *arguments]
        done = subprocess.run(command, cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def checkout(cluster: Cluster) -> Iterator[SlurmCheckout]:
    checkout = SlurmCheckout(cluster)
    yield checkout
    shutil.rmtree(checkout.path.parent)
