"""Shared by the tests on OpenPBS and over ssh: the cluster, and a checkout that all nodes see."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from checkout import PbsCheckout
from cluster.handle import PbsCluster, bring_up
from launched import Launched, left
from waiting import until, until_none


@pytest.fixture(scope="session")
def cluster() -> Iterator[PbsCluster]:
    yield from bring_up(PbsCluster)


@pytest.fixture(scope="session")
def checkout(cluster: PbsCluster) -> Iterator[PbsCheckout]:
    checkout = PbsCheckout(cluster)
    done = checkout.program("fetch", "--dataset", "digits", "--output", "results/data/digits")
    assert done.returncode == 0, done.stderr
    yield checkout
    # Processes of a failed test would continue to write there.
    cluster.run("bash", "-c", "qselect -u alice | xargs --no-run-if-empty qdel")
    until(lambda: not cluster.run("qselect", "-u", "alice").stdout, 60)
    shutil.rmtree(checkout.path.parent)


@pytest.fixture
def launched(cluster: PbsCluster, checkout: PbsCheckout) -> Iterator[Callable[..., Launched]]:
    """Starts trainings that end with the test."""
    started = []

    def start(name: str, way: str, **options) -> Launched:
        started.append(Launched(cluster, checkout, name, way, **options))
        return started[-1]

    yield start
    for training in started:
        training.stop()
    with suppress(TimeoutError, AssertionError):
        until_none(lambda: left(cluster), 45)
    for pid in left(cluster):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
