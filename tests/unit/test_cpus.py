"""CPUs by affinity and by the quota of control groups."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkout import Checkout
from leftovers import control_group
from manynodes.base.cpus import quotas, usable_cpus
from programs import python


def test_quotas_of_both_versions_and_of_the_groups_above(tmp_path: Path) -> None:
    second, first = tmp_path / "2/jobs/mine", tmp_path / "1/cpu,cpuacct/jobs"
    second.mkdir(parents=True)
    first.mkdir(parents=True)
    (second / "cpu.max").write_text("max 100000\n")
    (second.parent / "cpu.max").write_text("250000 100000\n")
    (first / "cpu.cfs_quota_us").write_text("150000\n")
    (first / "cpu.cfs_period_us").write_text("100000\n")
    assert set(quotas("0::/jobs/mine\n", tmp_path / "2")) == {2.5}
    assert set(quotas("4:memory:/jobs\n3:cpu,cpuacct:/jobs/deep\n", tmp_path / "1")) == {1.5}
    assert list(quotas("", tmp_path)) == []


def test_without_a_quota_the_affinity_counts() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))


@pytest.fixture
def one_cpu() -> Iterator[list[str]]:
    """The command that enters a control group with the time of one CPU."""
    limits = {"cpu.max": "100000 100000", "cpu.cfs_quota_us": "100000"}
    with control_group("cpu", limits) as enter:
        yield enter


def test_a_real_quota_is_seen(one_cpu: list[str]) -> None:
    script = "from manynodes.base.cpus import usable_cpus; print(usable_cpus())"
    done = python(script, before=one_cpu)
    assert done.stdout == "1\n", done.stderr


def test_cores_all_are_those_of_the_quota(one_cpu: list[str], tmp_path: Path) -> None:
    machine = len(os.sched_getaffinity(0))
    if machine == 1:
        pytest.skip("this machine has one CPU")
    checkout = Checkout(tmp_path, inside=one_cpu)
    try:
        said = checkout.run("-n", "--configfile", "config/digits.yaml")
    finally:
        # It would stay in the control group.
        checkout.server.stop()
    assert f"--cores 1: the quota of this container, on {machine} CPUs" in said.splitlines()
    assert "--cpus 1 " in said
    assert f"--cpus {machine} " not in said
