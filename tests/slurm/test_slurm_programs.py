"""Programs of the user's on a real Slurm: started by its tasks and by accelerate, out of time."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from checkout import SlurmCheckout
from paced import EPOCHS, paced

pytestmark = pytest.mark.faults
EXAMPLES = "examples/programs"


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
    said = checkout.run(*example(name), *(["--config", *options] if options else []))
    assert re.search(rf"{Path(name).name}/\S+: {number}", said), said


def test_out_of_time_the_job_continues(checkout: SlurmCheckout) -> None:
    """The job ends with 75 and is queued again by `launch`."""
    # At first 150 s of pauses; a job of three minutes is asked to stop a minute before its end.
    checkout.run(
        *paced(checkout), "experiment=paced",
        "--set-resources", "stage:runtime=1", "train:runtime=2",
    )  # fmt: skip
    run = checkout.path / "results/paced/run"
    about = json.loads((run / "run.json").read_text())
    assert len(about["attempts"]) >= 2
    assert len({attempt["by"] for attempt in about["attempts"]}) == 1
    assert rows(run) == [str(epoch) for epoch in range(1, EPOCHS + 1)]
