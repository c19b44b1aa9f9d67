"""Shared by the tests on OpenPBS and over ssh: the cluster, and a checkout that all nodes see."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

import sleeping
from checkout import PbsCheckout
from cluster.handle import PbsCluster, bring_up, check_after
from launched import Launched, left
from leftovers import after_grace


@pytest.fixture(scope="session")
def cluster() -> Iterator[PbsCluster]:
    yield from bring_up(PbsCluster)


@pytest.fixture(scope="session")
def checkout(cluster: PbsCluster) -> Iterator[PbsCheckout]:
    checkout = PbsCheckout(cluster)
    sleeping.write(checkout.path)
    done = checkout.program("fetch", "--dataset", "digits", "--output", "results/data/digits")
    assert done.returncode == 0, done.stderr
    yield checkout
    shutil.rmtree(checkout.path.parent)


@pytest.fixture(autouse=True)
def _check_after(cluster: PbsCluster, request: pytest.FixtureRequest) -> Iterator[None]:
    yield from check_after(cluster, request)


@pytest.fixture
def launched(
    _check_after: None, cluster: PbsCluster, checkout: PbsCheckout
) -> Iterator[Callable[..., Launched]]:
    """Starts trainings that end with the test."""
    started = []

    def start(name: str, way: str, **options) -> Launched:
        started.append(Launched(cluster, checkout, name, way, **options))
        return started[-1]

    yield start
    for training in started:
        training.stop()
    # What ignores this was killed with a launch, or is on a node that was cut off.
    after_grace(lambda: list(left(checkout).values()))
    for pid in left(checkout):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
