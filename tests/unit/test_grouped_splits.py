"""Validation images and folds of whole groups, and the weights of images: from a table to the
trained weights.
"""

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import testing

from classifier.training.splits import fold_split, split_rows, validation_groups, validation_split
from manynodes.base.errors import Refusal
from manynodes.data.folder import DataFolder
from manynodes.data.user.declaration import UserData
from manynodes.data.user.origins import files_of
from manynodes.experiment.config import Experiment, Run
from pictures import CLASSES, write_folder
from programs import import_own, program, refused_import
from trainings import Training, complete, complete_on_ranks, newest_place, result


def run(**keys: object) -> Run:
    return next(
        iter(Experiment.from_config({"experiment": "x"} | keys, reading=True).runs.values())
    )


def test_images_without_groups_are_divided_as_they_always_were() -> None:
    labels = np.random.default_rng(1).choice(4, size=103, p=[0.6, 0.2, 0.15, 0.05])
    parts = [part for fold in range(5) for part in fold_split(labels, 5, fold, 7)]
    parts += validation_split(1000, 100, 3)
    found = hashlib.sha256(b"".join(part.astype("<i8").tobytes() for part in parts)).hexdigest()
    # Of the version before groups.
    assert found == "5776cedaaf19621911fe424dbedd3a76e6e3b1502e2b49bb660e0a2506b94f9e"
    rows = split_rows(run(folds=5, fold=2, validation_fraction=0.2), labels, None)
    assert [len(part) for part in rows] == [66, 16]


def images(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Labels and groups of 3000 images."""
    random = np.random.default_rng(1)
    sizes = {"equal": random.integers(0, 400, 3000), "one class": random.integers(0, 400, 3000),
             "single": np.arange(3000), "unequal": random.geometric(0.01, 3000)}  # fmt: skip
    groups = np.unique(sizes[kind], return_inverse=True)[1]
    labels = groups % 4 if kind == "one class" else random.choice(4, 3000, p=[0.6, 0.2, 0.15, 0.05])
    return labels, groups


@pytest.mark.parametrize("kind", ["equal", "one class", "single", "unequal"])
@pytest.mark.parametrize("seed", [0, 7])
def test_no_two_folds_share_a_group_and_their_sizes_are_even(kind, seed) -> None:
    labels, groups = images(kind)
    parts = [fold_split(labels, 5, fold, seed, groups) for fold in range(5)]
    assert sorted(np.concatenate([tested for _, tested in parts])) == list(range(3000))
    for rest, tested in parts:
        assert sorted([*rest, *tested]) == list(range(3000))
        assert not {*groups[rest]} & {*groups[tested]}
    sizes = [len(tested) for _, tested in parts]
    # By the largest group at most, and an image for the sake of the classes.
    assert max(sizes) - min(sizes) <= np.bincount(groups).max() + 1
    shares = [np.bincount(labels[tested]) / np.bincount(labels) for _, tested in parts]
    assert np.abs(np.array(shares) - 0.2).max() < 0.04
    other = fold_split(labels, 5, 0, seed + 1, groups)[1]
    assert not np.array_equal(parts[0][1], other)


@pytest.mark.parametrize("kind", ["equal", "one class", "single", "unequal"])
@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5])
def test_validation_images_are_whole_groups_near_to_their_share(kind, fraction) -> None:
    labels, groups = images(kind)
    training, held_out = validation_groups(labels, groups, fraction, 3)
    assert sorted([*training, *held_out]) == list(range(3000))
    assert not {*groups[training]} & {*groups[held_out]}
    assert len(held_out) == pytest.approx(3000 * fraction, abs=int(np.bincount(groups).max()))
    assert np.array_equal(held_out, validation_groups(labels, groups, fraction, 3)[1])
    assert not np.array_equal(held_out, validation_groups(labels, groups, fraction, 4)[1])


def test_validation_is_drawn_from_the_groups_outside_the_fold() -> None:
    labels, groups = images("unequal")
    for fold in range(3):
        _, tested = fold_split(labels, 3, fold, 5, groups)
        keys = {"folds": 3, "fold": fold, "validation_seed": 5, "validation_fraction": 0.2}
        training, held_out = split_rows(run(**keys), labels, groups)
        three = [{*groups[rows]} for rows in (tested, training, held_out)]
        assert sum(map(len, three)) == len(set.union(*three)) == groups.max() + 1
        assert sorted([*tested, *training, *held_out]) == list(range(3000))
        assert len(held_out) == pytest.approx(400, abs=50)
    keys["validation_fraction"] = 0
    assert not len(split_rows(run(**keys), labels, groups)[1])


@pytest.mark.parametrize(("keys", "line"), [
    ({"folds": 5, "validation_fraction": 0}, "config: folds: the training images are of 4 groups, "
     "fewer than the 5 folds; use at most 4"),
    ({"validation_fraction": 0.1}, "config: validation_fraction: 0.1 of the 40 images of shapes in "
     "whole groups leaves 0 for validation and 40 for training; both need one"),
    ({"validation_fraction": 0.9}, "config: validation_fraction: 0.9 of the 40 images of shapes in "
     "whole groups leaves 40 for validation and 0 for training; both need one"),
    ({"validation_fraction": 0.4, "global_batch_size": 30}, "config: global_batch_size: 30 is more "
     "than the 20 training images of shapes; use at most that"),
])  # fmt: skip
def test_groups_that_cannot_be_divided_are_refused_before_any_job(keys, line) -> None:
    config = {"experiment": "x", "dataset": {"name": "shapes", "folder": "x"}} | keys
    experiment = Experiment.from_config({"global_batch_size": 10} | config)
    facts = {"name": "shapes", "train_images": 40, "height": 48, "width": 64}
    arrays = {"train_labels": np.arange(40) % 2, "train_groups": np.arange(40) // 10}
    with pytest.raises(Refusal) as refusal:
        experiment.check({"shapes": facts | arrays})
    assert str(refusal.value) == line


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, and beside it labels.csv: groups of four images, and weights."""
    root = write_folder(tmp_path_factory.mktemp("shapes") / "images", 24, 4, (24, 24))
    rows = []
    for path in sorted(root.glob("*/*/*.png")):
        split, label, name = path.parts[-3:]
        number = int(path.stem)
        weight = 0.25 + number % 7 if split == "train" else ""
        rows.append(f"{split}/{label}/{name},{label},{split},{split}{number // 4},{weight}")
    text = "\n".join(["file,label,split,group,weight", *rows])
    root.with_name("labels.csv").write_text(text)
    return root


def imported(source: Path, output: Path, table: str = "labels.csv") -> DataFolder:
    keys = {"table": str(source.with_name(table))}
    done = import_own(UserData("mine", "folder", str(source), **keys), output)
    assert done.returncode == 0, done.stderr
    assert (f"{table} weights the training images in the loss" in done.stderr) == (
        "weight" in source.with_name(table).read_text()
    )
    return DataFolder.read(output)


@pytest.fixture(scope="module")
def data(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imported(source, tmp_path_factory.mktemp("data") / "mine").path


def test_each_row_has_the_group_and_the_weight_of_its_file(data: Path) -> None:
    folder = DataFolder.read(data)
    groups, weights = folder.extra("groups"), folder.extra("weights")
    assert groups is not None
    assert weights is not None
    numbers = np.array([int(Path(name).stem) for name in files_of(folder, "train")])
    assert len(numbers) == len(groups) == len(weights) == 72
    assert np.array_equal(groups, numbers // 4)
    assert np.array_equal(weights, np.float32(0.25 + numbers % 7))
    assert folder.manifest["settings"]["groups"] == "table"


def test_groups_and_weights_belong_to_the_data(source: Path, data: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(data, tmp_path / "mine"))
    text = source.with_name("labels.csv").read_text()
    # A weight that rounds to another one, and another group.
    for number, (old, new) in enumerate((("train0,0.25", "train0,0.26"), ("train5,", "train4,"))):
        source.with_name(f"{number}.csv").write_text(text.replace(old, new))
        other = imported(source, tmp_path / str(number), f"{number}.csv")
        assert other.sha256 != DataFolder.read(data).sha256
    plain = "\n".join(line.rsplit(",", 2)[0] for line in text.splitlines())
    source.with_name("plain.csv").write_text(plain)
    without = imported(source, copy, "plain.csv")
    assert without.extra("groups") is without.extra("weights") is None
    assert sorted(path.name for path in copy.glob("*.npy")) == sorted(without.manifest["files"])
    assert len(without.manifest["files"]) == 4
    assert {*without.manifest["settings"]} == {"kind", "image_size", "channels", "table"}


def test_a_damaged_group_is_refused(data: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(data, tmp_path / "mine"))
    groups = np.load(copy / "train_groups.npy")
    np.save(copy / "train_groups.npy", groups[::-1])
    training = Training(tmp_path / "run", copy, dataset="mine", crop_size=None)
    assert training.end() == 1
    assert "train_groups.npy" in training.said.splitlines()[-1]
    np.save(copy / "train_groups.npy", groups * 100)
    with pytest.raises(Refusal, match=r"train_groups.npy has a group out of range; fetch the data"):
        DataFolder.read(copy).extra("groups")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["content_sha256"]["train_groups"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Refusal, match=r"does not name the arrays of its settings; fetch the data"):
        DataFolder.read(copy)


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "heavy", "", "1e9", "1e-9", "1,5"])
def test_a_weight_that_is_none_is_refused_with_its_row(source: Path, tmp_path, text) -> None:
    lines = source.with_name("labels.csv").read_text().splitlines()
    row = lines.index("train/circle/000.png,circle,train,train0,0.25")
    lines[row] = lines[row].removesuffix("0.25") + f'"{text}"'
    source.with_name("bad.csv").write_text("\n".join(lines))
    keys = {"table": str(source.with_name("bad.csv"))}
    line = (
        f'bad.csv, line {row + 1}: the weight "{text}" is not a number from 0.000001 to 1,000,000'
    )
    refused = refused_import(UserData("mine", "folder", str(source), **keys), tmp_path / "mine")
    assert refused.endswith(line)


# Two steps an epoch; what is drawn and mixed takes the weights along.
HOW = {"dataset": "mine", "crop_size": None, "epochs": 4, "global_batch_size": 24,
       "validation_fraction": 0.2, "checkpoint_every": 2}  # fmt: skip


def test_the_tested_groups_and_their_weights_change_no_weight(source, data, tmp_path) -> None:
    """And an evaluation tests them and no others."""
    folder = DataFolder.read(data)
    groups, labels = folder.extra("groups"), folder.split("train")[1]
    _, tested = fold_split(labels, 3, 1, 0, groups)
    files = files_of(folder, "train")
    copy = Path(shutil.copytree(source.parent, tmp_path / "copy")) / "images"
    text = source.with_name("labels.csv").read_text().splitlines()
    for row in tested:
        shutil.copy(copy / "test" / CLASSES[labels[row]] / "000.png", copy / files[row])
        (number,) = [place for place, line in enumerate(text) if line.startswith(files[row] + ",")]
        text[number] = text[number].rpartition(",")[0] + ",1000"
    copy.with_name("labels.csv").write_text("\n".join(text))
    other = imported(copy, tmp_path / "other").path
    how = HOW | {"folds": 3, "fold": 1}
    sums = []
    for name, place in (("run", data), ("again", other)):
        complete(tmp_path / name, place, **how)
        sums.append(hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).digest())
    assert sums[0] == sums[1]
    where = ["--data", data, "--model", tmp_path / "run/model.safetensors", "--device", "cpu"]
    output = tmp_path / "run/evaluation.json"
    done = program("evaluate", *where, "--fold", 1, 3, 0, "--output", output)
    assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["n"] == len(tested) == 24
    rows = [line.split(",")[:2] for line in output.with_name("predictions.csv").read_text().split()]
    assert rows[1:] == [[str(row), files[row]] for row in tested]


def test_what_is_drawn_weights_and_groups_are_the_same_on_any_geometry(
    data: Path, tmp_path: Path
) -> None:
    """A linear network: BatchNorm would have other statistics on each rank."""
    network = tmp_path / "linear.py"
    network.write_text(
        "from torch import nn\n"
        "def net(classes, channels, size):\n"
        "    pixels = channels * size[0] * size[1]\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, classes))\n"
    )
    mixed = {"mixup": 0.2, "cutmix": 1.0, "sampling": "balanced", "micro_batches": 2}
    mixed |= {"trivial_augment": True, "random_erasing": 0.5}
    changes = HOW | mixed | {"model": f"{network}:net", "learning_rate": 0.001, "epochs": 2}
    changes |= {"class_weights": {"circle": 3}}
    found = []
    for processes in (1, 2, 3):
        output = tmp_path / str(processes)
        complete_on_ranks(output, data, processes, **changes)
        found.append(load_file(output / "model.safetensors"))
    for other in found[1:]:
        for name, tensor in found[0].items():
            testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


def test_an_interrupted_training_with_weights_goes_on_to_the_same_weights(data, tmp_path) -> None:
    # Of 0.02 s each: there must be some left when the signal comes.
    how = HOW | {"epochs": 80, "checkpoint_every": 40, "mixup": 0.2, "class_weights": "balanced"}
    complete(tmp_path / "alone", data, **how)
    training = Training(tmp_path / "out", data, **how)
    training.reach(2)
    os.kill(training.find("train.py")[0], signal.SIGUSR1)
    assert training.end() == 75, training.said
    assert (0, 0) < newest_place(tmp_path / "out") < (80, 0)
    # On a scratch that the scheduler removes with the job, whose copy nobody else will read.
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    of_job = {"LAUNCH_JOB_SCRATCH": "OF_JOB", "OF_JOB": str(scratch)}
    complete(tmp_path / "out", data, "--scratch", "$OF_JOB", environment=of_job, **how)
    assert [path.name for path in scratch.glob("*/[!.]*") if path.is_dir()] == []
    assert [path.suffix for path in scratch.glob("*/*")] == [".lock"]
    assert result(tmp_path / "out") == result(tmp_path / "alone")
