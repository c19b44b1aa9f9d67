"""Programs of the user's through PBS and over ssh."""

import subprocess
import sys

import pytest

from checkout import PbsCheckout
from cluster.handle import PbsCluster
from guides import GUIDES, assert_ran, command_of, make_environments
from paced import assert_continued, unchanged

pytestmark = pytest.mark.faults


def test_the_guides_come_to_the_same_numbers_through_pbs_and_over_ssh(
    cluster: PbsCluster, checkout: PbsCheckout
) -> None:
    """Meanwhile, a program that knows nothing of us is out of time: its job of three minutes is
    asked to stop a minute before its end.
    """
    make_environments(checkout)
    cluster.give(checkout.path)
    waits = [*unchanged(checkout), "--set-resources", "train:runtime=3"]
    with (checkout.path / "unchanged.out").open("w") as out:
        out_of_time = checkout.start(*waits, stdout=out, stderr=subprocess.STDOUT)
    # The agents start any launcher alike; Slurm's tests have accelerate.
    for name in [name for name in GUIDES if name != "trixie-accelerate"]:
        command = command_of(checkout, name)
        checkout.run(*command)
        done = cluster.run(
            sys.executable, "-m", "snakemake", "--profile", "profiles/ssh", "--cores", "2",
            *command, f"experiment={name}-ssh", "hosts=[n1, n2]", cwd=checkout.path, node="n1",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        for experiment in (name, f"{name}-ssh"):
            assert_ran(checkout, name, experiment)
        by_pbs, by_ssh = (
            (checkout.path / f"results/{experiment}/run/metrics.csv").read_bytes()
            for experiment in (name, f"{name}-ssh")
        )
        assert by_pbs == by_ssh
    assert out_of_time.wait() == 0, (checkout.path / "unchanged.out").read_text()
    assert_continued(checkout)
