"""Shared by the tests on a Slurm cluster: the cluster, and a checkout that all nodes see."""

import shutil
from collections.abc import Iterator

import pytest

import sleeping
from checkout import SlurmCheckout
from cluster.handle import Cluster, bring_up, check_after


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    yield from bring_up(Cluster)


@pytest.fixture(autouse=True)
def _check_after(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    yield from check_after(cluster, request)


@pytest.fixture(scope="session")
def checkout(cluster: Cluster) -> Iterator[SlurmCheckout]:
    checkout = SlurmCheckout(cluster)
    sleeping.write(checkout.path)
    yield checkout
    shutil.rmtree(checkout.path.parent)
