"""The whole graph inside a job of a real Grid Engine, whose host file names the nodes."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator

import pytest

from checkout import PbsCheckout
from cluster.handle import GridEngineCluster, bring_up, check_after
from submissions import TINY, sha256
from trainings import train_on_ranks


@pytest.fixture(scope="module")
def cluster() -> Iterator[GridEngineCluster]:
    yield from bring_up(GridEngineCluster)


@pytest.fixture(autouse=True)
def _check_after(cluster: GridEngineCluster, request: pytest.FixtureRequest) -> Iterator[None]:
    yield from check_after(cluster, request)


@pytest.fixture(scope="module")
def checkout(cluster: GridEngineCluster) -> Iterator[PbsCheckout]:
    checkout = PbsCheckout(cluster, "profiles/ssh")
    yield checkout
    shutil.rmtree(checkout.path.parent)


def test_the_host_file_of_a_job_is_enough(
    cluster: GridEngineCluster, checkout: PbsCheckout
) -> None:
    command = shlex.join(
        [
            sys.executable,
            "-m",
            "snakemake",
            "--profile",
            "profiles/ssh",
            "--until",
            "train",
            *TINY,
            "nodes=2",
        ]
    )
    lines = [
        f"cd {shlex.quote(str(checkout.path))}",
        f"{command} experiment=hosts hosts=$PE_HOSTFILE",
    ]
    script = checkout.path.parent / "job.sh"
    script.write_text("\n".join(lines))
    said = checkout.path.parent / "said"
    options = ["-terse", "-pe", "spread", "2", "-j", "y", "-o", said, "-S", "/bin/bash"]
    done = cluster.run("qsub", *options, script)
    assert done.returncode == 0, done.stderr
    try:
        cluster.await_end(done.stdout.strip())
    finally:
        print(cluster.run("qstat", "-f", "-u", "*").stdout)
        print(said.read_text() if said.exists() else "the job has not begun")
        print(*(cluster.processes(node) for node in cluster.nodes), sep="\n")
    results = checkout.path / "results"
    log = results / "hosts/run/logs/rank=0.log"
    assert log.exists(), said.read_text()
    assert "preflight: 2 ranks on n" in (results / "hosts/run/train.log").read_text()
    # The same on one machine.
    run = json.loads((results / "hosts/run/run.json").read_text())["config"]
    train_on_ranks(run, results / "data/digits", results / "local/run", 2, cwd=checkout.path)
    found = [sha256(results / name / "run/model.safetensors") for name in ("hosts", "local")]
    assert found[0] == found[1]
