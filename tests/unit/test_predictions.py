"""predictions.csv: one row per test image, the same on any number of processes."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from classifier.models import weights
from classifier.models.classifier import build
from classifier.training.splits import fold_split
from forked import run_ranks
from manynodes.base.errors import Refusal
from manynodes.data.folder import DataFolder
from manynodes.data.user.declaration import UserData
from manynodes.data.user.origins import files_of
from manynodes.reporting import predictions
from pictures import CLASSES, write_folder
from programs import SCRIPTS, program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, from files."""
    root = tmp_path_factory.mktemp("folder")
    write_folder(root / "images", train=4, test=4)
    return imported(UserData("shapes", "folder", str(root / "images")), root / "data")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """21 classes, from arrays."""
    root, labels = tmp_path_factory.mktemp("many"), np.repeat(np.arange(21), 4)
    pixels = np.random.default_rng(0).integers(0, 256, (84, 32, 32), np.uint8)
    np.savez(root / "many.npz", images=pixels, labels=labels)
    return imported(UserData("many", "arrays", str(root / "many.npz"), test_fraction=0.5),
                    root / "data")  # fmt: skip


def imported(user_data: UserData, output: Path) -> Path:
    done = program("fetch", "--dataset", user_data.name, "--user-data", user_data.to_json(),
                   "--output", output)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return output


def evaluate(data: Path, run: Path, processes: int = 1) -> pd.DataFrame:
    """The predictions of a network that has not been trained."""
    found = DataFolder.read(data)
    torch.manual_seed(0)
    run.mkdir()
    network = build("airbench", (8, 8, 8), found.classes, found.image_shape,
                    class_names=found.class_names)  # fmt: skip
    network.fit(
        torch.full((1,), 90.0), torch.full((1,), 60.0), torch.tensor(found.split("train")[0])
    )
    weights.write(network.state_dict(), network.description, run / "model.safetensors")
    where = ["--data", data, "--model", run / "model.safetensors", "--device", "cpu"]
    how = ["--views", "flip", "--batch-size", 5, "--output", run / "evaluation.json"]
    command = list(map(str, [SCRIPTS / "evaluate.py", *where, *how]))
    ranks = run_ranks(command, processes)
    assert [rank.returncode for rank in ranks] == processes * [0], [rank.stdout for rank in ranks]
    found = predictions.read(run)
    assert found is not None
    return found.table


def test_each_row_is_an_image_with_its_file(folder: Path, tmp_path: Path) -> None:
    table = evaluate(folder, tmp_path / "run")
    data = DataFolder.read(folder)
    _, labels = data.split("test")
    every = [f"p({name})" for name in CLASSES]
    assert list(table) == [*predictions.COLUMNS, *every]
    assert table["row"].tolist() == list(range(12))
    assert table["file"].tolist() == files_of(data, "test")
    assert table["true_class"].tolist() == labels.tolist()
    assert table["true_name"].tolist() == [CLASSES[label] for label in labels]
    probabilities = table[every].to_numpy()
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-7)
    assert table["predicted_class"].tolist() == probabilities.argmax(1).tolist()
    np.testing.assert_array_equal(table["probability"], probabilities.max(1))
    np.testing.assert_array_equal(table["true_probability"], probabilities[range(12), labels])
    evaluation = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert evaluation["loss"] == pytest.approx(-np.log(table["true_probability"]).mean())
    assert evaluation["images_sha256"] == data.manifest["content_sha256"]["test_images"]


def test_the_same_bytes_on_any_number_of_processes(
    folder: Path, many: Path, tmp_path: Path
) -> None:
    for name, data in (("few", folder), ("many", many)):
        files = []
        for processes in (1, 3):
            run = tmp_path / f"{name}-{processes}"
            evaluate(data, run, processes)
            files.append(
                [(run / file).read_bytes() for file in (predictions.FILE, "evaluation.json")]
            )
        assert files[0] == files[1]


def test_many_classes_have_no_column_each_but_the_top_5(many: Path, tmp_path: Path) -> None:
    table = evaluate(many, tmp_path / "run")
    assert list(table) == list(predictions.COLUMNS)
    assert set(table["file"]) == {""}
    evaluation = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert evaluation["accuracy"] < evaluation["top5_accuracy"] < 1


def test_a_table_that_is_not_the_run_s_is_refused(folder: Path, tmp_path: Path) -> None:
    evaluate(folder, tmp_path / "run")
    path = tmp_path / "run" / predictions.FILE
    path.write_text(path.read_text().replace("circle", "cross"))
    with pytest.raises(Refusal, match=r"predictions.csv is not that of evaluation.json beside it"):
        predictions.read(tmp_path / "run")
    os.truncate(path, 10**12)
    with pytest.raises(Refusal, match=r"predictions.csv cannot be read \(has 1,000,000,000,000 "):
        predictions.read(tmp_path / "run")
    path.unlink()
    with pytest.raises(Refusal, match=r"predictions.csv cannot be read"):
        predictions.read(tmp_path / "run")


def test_a_fold_is_of_training_images(folder: Path, tmp_path: Path) -> None:
    evaluate(folder, tmp_path / "run")
    where = ["--data", folder, "--model", tmp_path / "run/model.safetensors", "--device", "cpu"]
    output = tmp_path / "fold" / "evaluation.json"
    done = program("evaluate", *where, "--fold", 1, 2, 0, "--output", output)
    assert done.returncode == 0, done.stderr
    found, data = predictions.read(tmp_path / "fold"), DataFolder.read(folder)
    assert found is not None
    assert found.images_sha256 == data.manifest["content_sha256"]["train_images"]
    rows, (_, labels) = found.table["row"].to_numpy(), data.split("train")
    assert rows.tolist() == fold_split(labels, 2, 1, 0)[1].tolist()
    assert found.table["true_class"].tolist() == labels[rows].tolist()
    files = files_of(data, "train")
    assert found.table["file"].tolist() == [files[row] for row in rows]
