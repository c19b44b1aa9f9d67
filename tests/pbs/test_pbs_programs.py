"""Programs of the user's through PBS and over ssh."""

import json
import re
import sys

import pytest

from checkout import PbsCheckout
from cluster.handle import PbsCluster
from paced import EPOCHS, paced

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


def test_out_of_time_it_continues_in_another_job(checkout: PbsCheckout) -> None:
    """PBS gives no warning; `launch` asks the program to stop a minute before the end."""
    # At first 150 s of pauses; a job of three minutes is asked to stop a minute before its end.
    said = checkout.run(
        *paced(checkout), "experiment=chained",
        "--set-resources", "stage:runtime=1", "train:runtime=2",
    )  # fmt: skip
    assert "it continues as job" in said
    run = checkout.path / "results/chained/run"
    assert len(json.loads((run / "run.json").read_text())["attempts"]) >= 2
    lines = (run / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines[1:]] == [str(n) for n in range(1, EPOCHS + 1)]
