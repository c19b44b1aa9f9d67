"""The whole graph through PBS, over ssh and on one machine, and what PBS refuses."""

import json
import re
import sys
from pathlib import Path

import pytest

from checkout import PbsCheckout
from cluster.handle import PbsCluster
from launched import LOGS, left, logs_in
from submissions import TINY, sha256
from trainings import train_on_ranks
from waiting import until_none

GEOMETRIES = ["nodes=[3]"]


@pytest.fixture(scope="module")
def through_pbs(checkout: PbsCheckout) -> str:
    jobs = checkout.path / ".snakemake/pbs"
    before = set(jobs.glob("*"))
    said = checkout.snakemake(*TINY, *GEOMETRIES, "experiment=pbs")
    assert said.returncode == 0, said.stdout
    # Scripts and logs of jobs that have ended well are gone.
    assert set(jobs.iterdir()) == before
    return said.stdout


def weights(checkout: PbsCheckout, experiment: str) -> dict[str, str]:
    folder = checkout.path / "results" / experiment
    return {path.parent.name: sha256(path) for path in folder.glob("*/model.safetensors")}


def test_the_graph_through_pbs(checkout: PbsCheckout, through_pbs: str) -> None:
    assert re.search(
        r"pbs: job \d+\.login, stage and train of pbs/nodes~3, log .*: runs on n\d, n\d, n\d",
        through_pbs,
    )
    assert (checkout.path / "results/pbs/report.html").exists()
    assert "Nothing to be done" in checkout.run(*TINY, *GEOMETRIES, "experiment=pbs")


@pytest.mark.usefixtures("through_pbs")
def test_one_machine_and_ssh_come_to_the_same_weights(
    cluster: PbsCluster, checkout: PbsCheckout
) -> None:
    done = cluster.run(
        sys.executable, "-m", "snakemake", "--profile", "profiles/ssh", "--cores", "3", *TINY,
        "nodes=3", "hosts=[n1, n2, n3]", "experiment=ssh", "--until", "train",
        cwd=checkout.path, node="n1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = checkout.path / "results"
    run = json.loads((results / "pbs/nodes~3/run.json").read_text())["config"]
    train_on_ranks(run, results / "data/digits", results / "one/run", 3, cwd=checkout.path)
    through_pbs, one, ssh = (weights(checkout, name) for name in ("pbs", "one", "ssh"))
    assert one["run"] == ssh["run"] == through_pbs["nodes~3"]
    assert logs_in(results / "ssh/run") == LOGS
    until_none(lambda: left(checkout))


def refusal(checkout: PbsCheckout, *options: str) -> str:
    done = checkout.snakemake(*TINY, "experiment=refused", *options)
    assert done.returncode == 1, done.stdout
    assert not Path(checkout.path, "results/refused").exists()
    return done.stdout


def test_what_pbs_does_not_accept_stops_before_the_first_job(checkout: PbsCheckout) -> None:
    unknown = refusal(checkout, "--default-resources", "pbs_queue=nowhere")
    assert re.search(r"\npbs: qsub: Unknown queue; asked with qsub -l select=\d:", unknown)
    long = refusal(checkout, "--default-resources", "pbs_queue=short")
    assert "\npbs: qsub: Job violates queue and/or server resource limits" in long
    wrong = refusal(checkout, "--default-resources", "pbs_queue=short", "--pbs-request", "sums")
    assert "\npbs-request: sums; use select or totals" in wrong


def test_a_job_that_no_node_can_run_fails_with_pbs_s_comment(
    cluster: PbsCluster, checkout: PbsCheckout
) -> None:
    done = checkout.snakemake(*TINY, "experiment=large", "cpus_per_proc=100")
    assert done.returncode == 1
    line = (
        r"large/nodes~1: not finished: PBS job \S+ can never run: Insufficient amount of resource"
    )
    assert re.search(line, done.stdout), done.stdout
    assert cluster.jobs() == []
