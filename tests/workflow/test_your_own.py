"""docs/your-own.md as written: a folder of images, a network in a file, two nodes, a kill, a
prediction.
"""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from checkout import ROOT, Checkout
from manynodes.reporting.results import read_evaluation

# An interrupted training on two nodes.
pytestmark = pytest.mark.faults
EXAMPLE = "examples/your-own"
FILE = ["--configfile", f"{EXAMPLE}/your-own.yaml"]
# An axis of one value keeps the folder's name.
CONFIG = [*FILE, "--config", "nodes=[2]"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The example, after a Snakemake that was killed while it trained on two nodes."""
    checkout = Checkout(tmp_path_factory.mktemp("your-own"))
    python(checkout, f"{EXAMPLE}/make_images.py")
    first = checkout.start(
        *CONFIG, "--", "results/your-own/nodes~2/model.safetensors",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert first.stdout is not None
    for line in first.stdout:
        if "epoch 2/6" in line:
            break
    # As a terminal does at Ctrl-C.
    os.killpg(first.pid, signal.SIGINT)
    rest = first.stdout.read()
    assert first.wait() != 0, rest
    again = checkout.snakemake(*CONFIG)
    assert again.returncode == 0, again.stdout
    return checkout


def python(checkout: Checkout, *command: str) -> str:
    ended = checkout.python(*command)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_it_was_resumed_and_evaluated_with_its_class_names(done: Checkout) -> None:
    about = json.loads((done.path / "results/your-own/nodes~2/run.json").read_text())
    assert len(about["attempts"]) == 2
    assert 2 <= about["attempts"][1]["from"]["epoch"] < 6
    (incident,) = about["incidents"]
    assert incident["kind"] == "interruption"
    assert incident["text"] in (done.path / "results/your-own/incidents.csv").read_text()
    assert incident["text"] in (done.path / "results/your-own/report.html").read_text()
    evaluation = read_evaluation(done.path / "results/your-own/nodes~2/evaluation.json")
    assert evaluation["class_names"][:3] == ["eight", "five", "four"]
    assert evaluation["n"] == 360
    assert evaluation["accuracy"] > 0.9
    figure = (done.path / "results/your-own/figures/confusion.svg").read_text()
    assert "seven" in figure


def test_a_prediction_names_the_class(done: Checkout) -> None:
    table = python(
        done, "workflow/scripts/predict.py", "--trust-code",
        "--model", "results/your-own/nodes~2/model.safetensors", f"{EXAMPLE}/images/test/seven",
    )  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(table)))
    right = sum(row["predicted"] == "seven" for row in rows)
    assert right / len(rows) > 0.8


def test_the_python_of_the_docs_predicts_and_exports(done: Checkout) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/your-own.md").read_text(), re.DOTALL)
    (image,) = sorted((done.path / EXAMPLE / "images/test/seven").iterdir())[:1]
    shutil.copy(image, done.path / "seven.png")
    before = """
import torch
from pathlib import Path
from classifier.models import weights
from manynodes.data.user.pictures import read_image
"""
    after = """
assert classifier.description["class_names"][int(probabilities.argmax())] == "seven"
loaded = torch.export.load("classifier.pt2").module()
several = torch.tensor(image).repeat(5, 1, 1, 1)
assert loaded(several).equal(classifier(several))
"""
    code = before + "\n".join(block for block in blocks if "classifier" in block) + after
    environment = os.environ | {"PYTHONPATH": "workflow/scripts"}
    subprocess.run([sys.executable, "-c", code], cwd=done.path, env=environment, check=True)


def test_nothing_is_done_twice_and_changes_are_noticed(done: Checkout) -> None:
    def jobs() -> str:
        return done.snakemake(*CONFIG, "-n").stdout

    assert "Nothing to be done" in jobs()
    network = done.path / EXAMPLE / "my_models.py"
    text = network.read_text()
    network.write_text(text.replace("nn.ReLU()", "nn.GELU()"))
    planned = jobs()
    assert "train" in planned
    assert "fetch" not in planned
    assert "would replace finished results: nodes~2 (examples/your-own/my_models.py has" in planned
    network.write_text(text)
    assert "Nothing to be done" in jobs()
    image = next((done.path / EXAMPLE / "images/train/zero").iterdir())
    image.rename(image.with_name("renamed.png"))
    planned = jobs()
    assert "fetch" in planned
    assert "would replace finished results: nodes~2 (other images of numerals)" in planned
    refused = done.snakemake(*CONFIG)
    assert refused.returncode == 1
    assert "add --config replace=true" in refused.stdout
    made = "results/data/numerals/manifest.json"
    line = f"same bytes as before, first make {made} alone: this command --force {made}\n"
    assert line in refused.stdout
    image.with_name("renamed.png").rename(image)
    assert "Nothing to be done" in jobs()


@pytest.mark.parametrize(("change", "line"), [
    ("model_args={depth: 3}", "my_models.py:Net: my_models.py: TypeError: Net.__init__() got an"),
    ("model=my_models.py:Nut", "my_models.py has no Nut"),
    ("global_batch_size=4000", "is more than the 1,293 training images of numerals"),
    ("cutout=60", "config: cutout: 60 is more than the 64 x 48 pixels of an image"),
    ("crop_size=80", "config: crop_size: 80 x 80 is larger than the 64 x 48 images of numerals"),
    ("initial_weights=nothing.pt", "config: initial_weights: nothing.pt is not there"),
    ("initial_weights=README.md", "config: initial_weights: README.md is not a weights file: "),
    ("initial_weights=other.pt", "config: initial_weights: no tensor of other.pt fits this"),
    ("dataset={name: cifar10, folder: images}", "config: dataset.name: cifar10 is built in"),
    ("dataset={name: x, folder: none}", 'config: dataset.folder: "none" is not a folder'),
])  # fmt: skip
def test_what_does_not_fit_the_images_is_refused_in_a_dry_run(
    done: Checkout, change: str, line: str
) -> None:
    torch.save({"fc.weight": torch.zeros(3, 3)}, done.path / "other.pt")
    refused = done.snakemake(*FILE, "-n", "--config", "experiment=other", change)
    assert refused.returncode == 1
    last = refused.stdout.strip().splitlines()[-1]
    assert line in last
    assert len(last) <= 200


def test_more_epochs_start_from_the_weights_in_a_folder_of_their_own(done: Checkout) -> None:
    weights = done.path / "results/your-own/nodes~2/model.safetensors"
    before = weights.read_bytes()
    more = done.snakemake(
        *FILE, "--config", "experiment=longer", "epochs=1", "nodes=1", "cpus_per_proc=1",
        "initial_weights=results/your-own/nodes~2/model.safetensors",
        "--", "results/longer/run/evaluation.json",
    )  # fmt: skip
    assert more.returncode == 0, more.stdout
    assert weights.read_bytes() == before
    assert read_evaluation(done.path / "results/longer/run/evaluation.json")["accuracy"] > 0.9
