"""Shared by the tests on a Slurm cluster: the cluster, and a checkout that all nodes see."""

import shutil
from collections.abc import Iterator

import pytest

from checkout import SlurmCheckout
from cluster.handle import Cluster, bring_up
from waiting import until


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    yield from bring_up(Cluster)


@pytest.fixture(scope="session")
def checkout(cluster: Cluster) -> Iterator[SlurmCheckout]:
    checkout = SlurmCheckout(cluster)
    yield checkout
    # Processes of a failed test would continue to write there.
    cluster.run("scancel", "--user=root")
    until(lambda: not cluster.run("squeue", "--noheader").stdout, 60)
    shutil.rmtree(checkout.path.parent)
