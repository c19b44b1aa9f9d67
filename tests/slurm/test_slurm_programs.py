"""Programs of the user's on a real Slurm: started by its tasks and by accelerate, out of time."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import SlurmCheckout
from cluster.handle import Cluster
from paced import EPOCHS, paced
from submissions import submitted

pytestmark = pytest.mark.faults
EXAMPLES = "examples/programs"
NODES = ("n1", "n2", "n3")


def example(name: str) -> list[str]:
    return ["--configfile", f"{EXAMPLES}/{name}.yaml"]


def rows(run: Path) -> list[str]:
    return [row["epoch"] for row in csv.DictReader(io.StringIO((run / "metrics.csv").read_text()))]


@pytest.mark.parametrize(
    ("name", "options", "number"),
    [
        ("procid", ["launcher=srun"], r"accuracy 0\.9"),
        ("accelerated", [], r"accuracy 0\.9"),
        # A parameter that changes no result travels apart from the others.
        ("text/text", ["layers=1", "steps=40", "save_every=20", "nodes=2", "nproc_per_node=1"],
         r"characters \d+, test_loss 2\.\d+, perplexity"),
    ],
    ids=["procid", "accelerated", "text"],
)  # fmt: skip
def test_the_examples_complete_on_two_nodes(
    checkout: SlurmCheckout, name: str, options: list[str], number: str
) -> None:
    # The preflight of procid is that of all.
    few = ["cpus_per_proc=1", f"preflight={json.dumps(name == 'procid')}"]
    last = "evaluate" if name == "text/text" else "train"
    said = checkout.run(*example(name), "--until", last, "--config", *few, *options)
    assert re.search(rf"{Path(name).name}/\S+: {number}", said), said


def test_out_of_time_the_job_continues(cluster: Cluster, checkout: SlurmCheckout) -> None:
    """The job ends with 75 and is queued again by `launch`; Snakemake is started once."""
    # At first 150 s of pauses; a job of three minutes is asked to stop a minute before its end.
    said = checkout.run(
        *paced(checkout), "experiment=paced", "--until", "train",
        "--set-resources", "stage:runtime=1", "train:runtime=2",
    )  # fmt: skip
    run = checkout.path / "results/paced/run"
    about = json.loads((run / "run.json").read_text())
    assert len(about["attempts"]) >= 2
    (job,) = {attempt["by"].split()[-1] for attempt in about["attempts"]}
    assert submitted(said) == [job]
    asked = ["sacct", "-X", "--duplicates", "--noheader", "--parsable2", f"--jobs={job}"]
    *others, last = cluster.run(*asked, "--format=State").stdout.split()
    assert others
    assert (set(others), last) == ({"REQUEUED"}, "COMPLETED")
    assert rows(run) == [str(epoch) for epoch in range(1, EPOCHS + 1)]


def test_modules_and_a_venv_are_on_every_node_and_staged_it_needs_no_shared_one(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    folder = checkout.path / "site"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    # The path of a module must not have a space.
    module = checkout.path.parent / "of-site"
    module.write_text("#%Module\nsetenv OF_SITE here\n")
    (folder / "train.py").write_text(
        "import os, sys, launched\n"
        "assert sys.prefix.endswith(('site/env', '-unpacked')), sys.prefix\n"
        "assert os.environ['OF_SITE'] == 'here'\n"
        "(launched.results / f'{os.uname().nodename}-{launched.rank}').touch()\n"
    )
    environment = {"python": "env", "modules": [str(module)]}
    (folder / "site.yaml").write_text(
        "experiment: site\nprogram: train.py\nnodes: 2\nevaluate: train.py\npreflight: false\n"
        f"environment: {json.dumps(environment)}\n"
    )
    checkout.run("--configfile", "site/site.yaml", "--until", "evaluate")
    run = checkout.path / "results/site/run"
    hosts = {path.name for path in (run / "work").glob("n*-*")}
    assert {name.partition("-")[2] for name in hosts} == {"0", "1"}
    assert len({name.partition("-")[0] for name in hosts}) == 2
    found = json.loads((run / "environment.json").read_text())
    assert found["interpreter"] == str(folder / "env/bin/python")
    assert found["modules"] == [str(module)]
    # While the job runs, the nodes have an empty folder there.
    for node in NODES:
        hidden = cluster.run("mount", "-t", "tmpfs", "tmpfs", str(folder / "env"), node=node)
        assert hidden.returncode == 0, hidden.stderr
    try:
        staged = ["experiment=staged", "environment={stage: true}", 'scratch=["/scratch"]']
        checkout.run("--configfile", "site/site.yaml", "--until", "train", "--config", *staged)
    finally:
        for node in NODES:
            cluster.run("umount", str(folder / "env"), node=node)
    found = json.loads((checkout.path / "results/staged/run/environment.json").read_text())
    assert re.fullmatch(r"/scratch/ddp-data-\d+/staged-environment-\w+-unpacked/bin/python",
                        found["interpreter"])  # fmt: skip
