"""Programs of the user's through PBS and over ssh."""

import json
import re
import sys

import pytest

from checkout import PbsCheckout
from cluster.handle import PbsCluster

pytestmark = pytest.mark.faults
EXAMPLES = "examples/programs"


def example(name: str) -> list[str]:
    return ["--configfile", f"{EXAMPLES}/{name}.yaml"]


def test_a_loop_through_pbs_and_over_ssh_comes_to_the_same_numbers(
    cluster: PbsCluster, checkout: PbsCheckout
) -> None:
    one = [*example("loop"), "--config", "parameters={lr: 0.1}"]
    said = checkout.run(*one)
    assert re.search(r"loop/run: accuracy 0\.9", said), said
    done = cluster.run(
        sys.executable, "-m", "snakemake", "--profile", "profiles/ssh", "--cores", "3",
        *one, "hosts=[n1, n2, n3]", "experiment=ssh",
        cwd=checkout.path, node="n1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [
        json.loads((checkout.path / f"results/{name}/run/evaluation.json").read_text())
        for name in ("loop", "ssh")
    ]
    assert found[0] == found[1]
