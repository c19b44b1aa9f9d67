"""Programs of the user's on a real Slurm: started by its tasks, out of time, requeued."""

import csv
import io
import json
import re
import subprocess
from pathlib import Path

import pytest

from checkout import SlurmCheckout
from cluster.handle import Cluster
from paced import EPOCHS, paced
from submissions import submitted
from waiting import until

pytestmark = pytest.mark.faults
EXAMPLES = "examples/programs"


def example(name: str) -> list[str]:
    return ["--configfile", f"{EXAMPLES}/{name}.yaml"]


def rows(run: Path) -> list[str]:
    return [row["epoch"] for row in csv.DictReader(io.StringIO((run / "metrics.csv").read_text()))]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("loop", ["--config", "parameters={lr: 0.1}"]),
        ("procid", ["--config", "launcher=srun"]),
        ("accelerated", []),
        ("trainer", ["--config", "launcher=torchrun-c10d"]),
    ],
)
def test_the_examples_complete_on_two_nodes(
    checkout: SlurmCheckout, name: str, options: list[str]
) -> None:
    said = checkout.run(*example(name), *options)
    assert re.search(rf"{name}/\S+: accuracy 0\.9", said), said


@pytest.mark.parametrize("how", ["out of time", "requeued"])
def test_the_job_continues(cluster: Cluster, checkout: SlurmCheckout, how: str) -> None:
    """The job ends with 75 and is queued again, by `launch` or by Slurm."""
    name = how.replace(" ", "-")
    # At first 150 s of pauses; a job of three minutes is asked to stop a minute before its end.
    command = [*paced(checkout), f"experiment={name}"]
    if how == "out of time":
        command += ["--set-resources", "stage:runtime=1", "train:runtime=2"]
    run = checkout.path / f"results/{name}/run"
    said = checkout.path / f"{name}.out"
    with said.open("w") as out:
        process = checkout.start(*command, stdout=out, stderr=subprocess.STDOUT)
    if how == "requeued":
        until((run / "work/metrics.csv").exists, process)
        until(lambda: len((run / "work/metrics.csv").read_text().splitlines()) > 5, process)
        job = submitted(said.read_text())[0]
        assert cluster.run("scontrol", "requeue", job).returncode == 0
    assert process.wait() == 0, said.read_text()
    about = json.loads((run / "run.json").read_text())
    assert len(about["attempts"]) >= 2
    assert len({attempt["by"] for attempt in about["attempts"]}) == 1
    assert rows(run) == [str(epoch) for epoch in range(1, EPOCHS + 1)]
