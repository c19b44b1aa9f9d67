"""Shared by the tests on a Slurm cluster: the cluster, and a checkout that all nodes see."""

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from checkout import SlurmCheckout
from cluster.handle import PROGRAM, Cluster
from waiting import until


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster from `make cluster-up`, or one that ends with the tests."""
    found = Cluster.running()
    if not found:
        done = subprocess.run(
            [*PROGRAM, "up", "--end-with-parent"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0 and (os.environ.get("CI") or os.geteuid() == 0):
            pytest.fail(done.stdout, pytrace=False)
        if done.returncode != 0:
            pytest.skip(done.stdout.splitlines()[-1])
    yield Cluster()
    if not found:
        subprocess.run([*PROGRAM, "down"], check=True)


@pytest.fixture(scope="session")
def checkout(cluster: Cluster) -> Iterator[SlurmCheckout]:
    checkout = SlurmCheckout(cluster)
    yield checkout
    # Processes of a failed test would continue to write there.
    cluster.run("scancel", "--user=root")
    until(lambda: not cluster.run("squeue", "--noheader").stdout, 60)
    shutil.rmtree(checkout.path.parent)
