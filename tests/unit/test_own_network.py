"""A user's own network, warm starts, and predictions, by the programs."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from classifier.models import weights
from classifier.models.classifier import build
from classifier.models.fitting import depends_on_others, refuse_uncallable, refuse_unfit_model
from classifier.models.names import BUILT_IN_MODELS, LEAST_EDGE, Form
from classifier.pixels.batches import centred
from classifier.training.splits import validation_split
from forked import run_ranks
from manynodes.base.errors import Refusal
from manynodes.base.sources import local_sources, sources_sha256
from manynodes.data.folder import DataFolder
from manynodes.data.user.declaration import UserData
from pictures import picture, write_folder
from programs import SCRIPTS, imported, program, train_command
from trainings import RUN, Training
from waiting import until

NETWORK = """
import random
import numpy as np
from torch import nn
from classifier import Block

class Net(nn.Module):
    def __init__(self, classes, channels, image_size, width=8):
        super().__init__()
        self.body = nn.Sequential(Block(channels, width), Block(width, 2 * width))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, images):
        if self.training:
            images = images + random.gauss(0, 0.1) + 0.1 * np.random.standard_normal()
        return self.head(self.body(images).mean((2, 3)))

    def parameter_groups(self, weight_decay, muon):
        return [{"params": self.head.parameters(), "rate": 2.0, "weight_decay": 0.0}]

def broken(classes, channels, image_size):
    return 1 / 0
"""
# Its name is that of a package of ours too.
LAYERS = """
from torch import nn

class Block(nn.Sequential):
    def __init__(self, channels_in, channels_out):
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out),
            nn.ReLU(), nn.MaxPool2d(2),
        )
"""
FORM = Form(48, 64, 1, 3)


def with_model(model: str, **model_args: object) -> SimpleNamespace:
    """What is known of a run with this model when its network is tried."""
    return SimpleNamespace(model=model, widths=(8, 8, 8), model_args=model_args)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    (folder / "my_models.py").write_text(NETWORK)
    (folder / "classifier.py").write_text(LAYERS)
    return folder


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of 48 x 64 x 1 images."""
    folder = tmp_path_factory.mktemp("shapes")
    data = UserData("shapes", "folder", str(write_folder(folder / "images")))
    return imported(data, folder / "data").path


def changes(files: Path, **keys: object) -> dict:
    return {
        "dataset": "shapes", "model": f"{files}/my_models.py:Net", "model_args": {"width": 6},
        "epochs": 3, "global_batch_size": 36, "learning_rate": 0.05, "checkpoint_every": 0,
        "shift": 2,
    } | keys  # fmt: skip


@pytest.fixture(scope="module")
def trained(shapes: Path, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "run"
    training = Training(output, shapes, **changes(files))
    assert training.end() == 0, training.said
    return output


def test_the_weights_bring_their_network(trained: Path, files: Path) -> None:
    path = trained / "model.safetensors"
    with pytest.raises(Refusal, match=r"brings Python code \(my_models.py\) that would run here"):
        weights.load(path)
    sha256 = sources_sha256(local_sources(files / "my_models.py"))
    with pytest.raises(Refusal, match="--trust-code"):
        weights.load(path, "0" * 64)
    classifier = weights.load(path, sha256)
    assert classifier.network.head.in_features == 12
    assert json.loads((trained / "run.json").read_text())["network_sha256"] == sha256
    assert (trained / "network/classifier.py").read_text() == LAYERS
    # The files where it was trained are not needed any more, and may have changed.
    (files / "classifier.py").write_text("raise RuntimeError('not these')")
    try:
        assert weights.load(path, sha256).network.head.in_features == 12
    finally:
        (files / "classifier.py").write_text(LAYERS)


def test_the_same_weights_on_any_geometry_and_after_a_kill(
    trained: Path, shapes: Path, files: Path, tmp_path: Path
) -> None:
    """Mapped and in memory; killed and resumed."""
    wanted = (trained / "model.safetensors").read_bytes()
    memory = Training(tmp_path / "memory", shapes, "--images-in", "memory", **changes(files))
    assert memory.end() == 0, memory.said
    assert (tmp_path / "memory/model.safetensors").read_bytes() == wanted
    killed = Training(tmp_path / "killed", shapes, **changes(files))
    until(lambda: 1 in killed.epochs)
    killed.process.kill()
    killed.process.wait()
    again = Training(tmp_path / "killed", shapes, **changes(files))
    assert again.end() == 0, again.said
    assert (tmp_path / "killed/model.safetensors").read_bytes() == wanted


def test_evaluation_runs_only_the_code_that_was_configured(
    trained: Path, shapes: Path, files: Path, tmp_path: Path
) -> None:
    where = ["--data", shapes, "--model", trained / "model.safetensors"]
    foreign = program("evaluate", *where, "--output", tmp_path / "e.json")
    assert foreign.returncode == 1
    assert foreign.stderr.count("\n") == 1
    sha256 = sources_sha256(local_sources(files / "my_models.py"))
    done = program("evaluate", *where, "--trust-code", sha256, "--output", tmp_path / "e.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "e.json").read_text())
    assert (found["n"], found["class_names"]) == (30, ["circle", "cross", "stripes"])
    assert found["accuracy"] > 0.6


@pytest.mark.parametrize(("model", "args", "line"), [
    ("my_models.py:Net", {"depth": 3}, "unexpected keyword argument 'depth'"),
    ("my_models.py:broken", {}, "my_models.py:22: ZeroDivisionError: division by zero"),
    ("my_models.py:None_", {}, "my_models.py has no None_"),
    ("other.py:Net", {}, "other.py is not there"),
    ("my_models.py:Block", {}, "Block.__init__() takes 3 positional arguments"),
    ("no.such.package:build", {}, "there is no module no.such.package here"),
])  # fmt: skip
def test_a_network_that_cannot_be_made(files: Path, model: str, args: dict, line: str) -> None:
    model = f"{files}/{model}" if ".py:" in model else model
    with pytest.raises(Refusal) as refusal:
        refuse_unfit_model(with_model(model, **args), FORM)
    assert line in str(refusal.value)


TROUBLE = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, classes, channels, size):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.same = self.one
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.head = nn.Linear(channels * size[0] * size[1], classes)

    def forward(self, images):
        return self.head(self.same(self.one(images)).flatten(1))

    def parameter_groups(self, weight_decay, muon):
        return [{"params": self.head.parameters()}]

class Unused(Tied):
    def __init__(self, classes, channels, size):
        super().__init__(classes, channels, size)
        self.idle = nn.Linear(3, 3)

def lazy(classes, channels, size):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

class View(Tied):
    def forward(self, images):
        return self.head(images.view(len(images), -1))

class Pair(Tied):
    def forward(self, images):
        logits = super().forward(images)
        return (logits, images) if self.training == self.when else logits

    when = False

class PairInTraining(Pair):
    when = True

def frozen(classes, channels, size):
    return Tied(classes, channels, size).requires_grad_(False)

def ends(classes, channels, size):
    raise SystemExit(4)

class Sometimes(Unused):
    def forward(self, images):
        self.passes = getattr(self, "passes", 0) + 1
        logits = super().forward(images)
        return logits + 0 * self.idle(images[:, 0, :3, :3]).sum() if self.passes == 1 else logits


class Float(Unused):
    def forward(self, images):
        logits = super().forward(images) + 0 * sum(each.sum() for each in self.idle.parameters())
        chosen = torch.zeros(logits.shape)
        chosen[torch.arange(len(logits))] = logits
        return chosen

class Squeezed(Tied):
    def forward(self, images):
        return super().forward(images).squeeze()

class Four(Tied):
    def forward(self, images):
        return super().forward(images).reshape(4, -1)

class Makes(Tied):
    def forward(self, images):
        logits = super().forward(images)
        if not hasattr(self, "last"):
            self.last = nn.Linear(3, 3, device=images.device)
        return self.last(logits)

class Grows(Tied):
    def forward(self, images):
        self.mask = torch.cat((self.mask, self.mask[:1]))
        return super().forward(images)

class Complex(Tied):
    def __init__(self, classes, channels, size):
        super().__init__(classes, channels, size)
        self.wave = nn.Parameter(torch.zeros(3, dtype=torch.complex64))

class Wide(Tied):
    def __init__(self, classes, channels, size):
        super().__init__(classes, channels, size)
        self.register_buffer("wave", torch.zeros(3, dtype=torch.complex128), persistent=False)

class Extra(Tied):
    def get_extra_state(self):
        return {"steps": 3}

class Generator(Tied):
    def __init__(self, classes, channels, size):
        super().__init__(classes, channels, size)
        self.one.noise = torch.Generator()

class NoGrad(Tied):
    @torch.no_grad()
    def forward(self, images):
        return super().forward(images)

class Flat(Tied):
    def parameter_groups(self, weight_decay, muon):
        return self.head.parameters()

class Twice(Tied):
    def parameter_groups(self, weight_decay, muon):
        return [{"params": self.head.weight}, {"params": self.head.parameters()}]

class Rated(Tied):
    def parameter_groups(self, weight_decay, muon):
        return [{"params": self.head.parameters(), "lr": 0.01}]

class Rows(Tied):
    def parameter_groups(self, weight_decay, muon):
        return [{"params": list(self.head.weight)}]

class Fails(Tied):
    def parameter_groups(self, weight_decay, muon):
        return 1 / 0

class Unfit(Tied):
    def fit_to(self, images):
        raise ValueError("no such images")

    def parameter_groups(self, weight_decay, muon):
        return [{"params": self.head.weight, "rate": 2.0}]

class Centred(Tied):
    def __init__(self, classes, channels, size):
        super().__init__(classes, channels, size)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("odd", torch.tensor([True]))
        self.register_buffer("centre", torch.zeros(classes))
        strided = torch.arange(6.0).view(3, 2)[:, 1]
        self.register_buffer("strided", strided, persistent=False)
        self.register_buffer("expanded", torch.ones(1).expand(3), persistent=False)

    def forward(self, images):
        logits = super().forward(images)
        if self.training:
            self.steps += 1
            self.centre.copy_(logits.detach().mean(0))
        return logits - 9 * self.centre

class Batch(Tied):
    def forward(self, images):
        logits = super().forward(images)
        return logits - logits.mean(0)

class Noisy(Tied):
    def forward(self, images):
        return super().forward(images) + torch.rand(1)

class Reads(Tied):
    def __init__(self, classes, channels, size):
        super().__init__(classes, channels, size)
        from pathlib import Path
        Path(__file__).with_name("mean.txt").read_text()
"""


@pytest.mark.parametrize(("name", "line"), [
    ("View", "Use .reshape(...) instead"),
    ("Pair", "returns auxiliary outputs as well"),
    ("PairInTraining", "returns auxiliary outputs as well"),
    ("frozen", "has no parameter to train"),
    ("ends", "ends Python; raise an error instead"),
    ("Squeezed", "returns (3,) for a single image; logits (1, 3) are needed"),
    ("Four", "does not take a single image of 48x64x2: shape"),
    ("Makes", "makes last.weight in forward; make it in __init__"),
    ("Grows", "changes mask in forward from float32 (2,) to float32 (5,); give it one size"),
    ("Complex", "trains complex numbers, wave; make its real and imaginary parts the parameter"),
    ("Wide", "has wave as complex128, which no weights file holds"),
    ("Extra", "has _extra_state in its state_dict, a dict; make it a tensor"),
    ("Generator", "keeps random numbers of its own, one.noise, which no state holds"),
    ("NoGrad", "gives logits without a gradient; leave torch.no_grad out of forward"),
    ("Flat", "parameter_groups gives a Parameter; give groups such as"),
    ("Twice", "parameter_groups gives head.weight twice; give it once"),
    ("Rated", "gives lr, which learning_rate and schedule set in each step; give rate, a factor"),
    ("Rows", "gives a Tensor that is no parameter of the network; give those of its layers"),
    ("Fails", "ZeroDivisionError: division by zero"),
    ("Reads", "mean.txt is not there: of the files beside the network only Python files are copie"),
])  # fmt: skip
def test_networks_that_a_dry_run_refuses(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / "nets.py").write_text(TROUBLE)
    with pytest.raises(Refusal, match=re.escape(line)):
        refuse_unfit_model(with_model(f"{tmp_path}/nets.py:{name}"), Form(48, 64, 2, 3))


def test_tied_weights_infinite_masks_and_groups_without_a_rate(
    shapes: Path, tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(TROUBLE)
    run = changes(tmp_path, model=f"{tmp_path}/nets.py:Tied", model_args={}, epochs=1)
    training = Training(tmp_path / "run", shapes, **run | {"learning_rate": 0.001})
    assert training.end() == 0, training.said
    loaded = weights.load(tmp_path / "run/model.safetensors", "any").network
    assert loaded.one.weight is loaded.same.weight


@pytest.mark.parametrize(("name", "processes", "line"), [
    ("Unused", 2, "does not use network.idle.weight in every pass"),
    ("Sometimes", 2, "this pass did not use every parameter"),
    ("Unfit", 1, "ValueError: no such images"),
    ("lazy", 1, "lazy of nets.py has lazy layers; give them their sizes"),
    ("Float", 1, "Float does not compute in bf16: Index put requires"),
    ("Float", 2, "the source.; use precision: fp32"),
])  # fmt: skip
def test_networks_that_cannot_be_trained_are_refused_in_a_line(
    shapes: Path, tmp_path: Path, name: str, processes: int, line: str
) -> None:
    (tmp_path / "nets.py").write_text(TROUBLE)
    run = changes(tmp_path, model=f"{tmp_path}/nets.py:{name}", model_args={}, epochs=1)
    run |= {"precision": "bf16"}
    command = train_command(
        json.dumps(RUN | run | {"nproc_per_node": processes}), shapes, tmp_path / "run"
    )
    ranks = run_ranks(command, processes)
    said = "".join(rank.stdout for rank in ranks)
    assert [rank.returncode for rank in ranks] == processes * [1], said
    assert line in said
    assert "Traceback" not in said


def test_the_validation_is_that_of_the_published_weights(digits: Path, tmp_path: Path) -> None:
    """Also if the network has buffers that differ between the ranks, both of which validate."""
    (tmp_path / "nets.py").write_text(TROUBLE)
    run = changes(tmp_path, model=f"{tmp_path}/nets.py:Centred", model_args={}, epochs=2)
    run |= {"dataset": "digits", "global_batch_size": 24, "validation_fraction": 0.7}
    run |= {"precision": "fp32", "learning_rate": 0.001, "nproc_per_node": 2}
    command = train_command(json.dumps(RUN | run), digits, tmp_path / "run")
    ranks = run_ranks(command, 2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stdout
    classifier = weights.load(tmp_path / "run/model.safetensors", "any").eval()
    images, labels = DataFolder.read(digits).split("train")
    _, held_out = validation_split(len(labels), round(0.7 * len(labels)), 0)
    with torch.no_grad():
        logits = classifier(centred(torch.from_numpy(images[held_out]), (16, 16)))
    true = torch.from_numpy(labels[held_out]).long()
    *_, last = csv.DictReader((tmp_path / "run/metrics.csv").open())
    loss = torch.nn.functional.cross_entropy(logits, true).item()
    assert float(last["val_loss"]) == pytest.approx(loss, rel=1e-4)


def test_a_network_whose_logits_depend_on_the_batch_is_told(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(TROUBLE)
    found = {
        name: depends_on_others(with_model(f"{tmp_path}/nets.py:{name}"), FORM)
        for name in ("Tied", "Centred", "Batch", "Noisy", "Four")
    }
    # What is random, or takes no such batch at all, is no matter of the others in it.
    assert {name for name, depends in found.items() if depends} == {"Batch"}


def test_trusted_code_does_not_vouch_for_another_module(files: Path, tmp_path: Path) -> None:
    classifier = build(f"{files}/my_models.py:Net", (8, 8, 8), 3, (48, 64, 1))
    trusted = sources_sha256(classifier.description["sources"])
    classifier.description["model"] = "json.tool:main"
    weights.write(classifier.state_dict(), classifier.description, tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match="is not the one that this network was trained with"):
        weights.load(tmp_path / "model.safetensors", trusted)


def test_names_and_arguments_are_checked_before_the_images_are_known(files: Path) -> None:
    refuse_uncallable(f"{files}/my_models.py:Net", {"width": 12})
    with pytest.raises(Refusal, match="my_models.py has no Nett"):
        refuse_uncallable(f"{files}/my_models.py:Nett", {})
    with pytest.raises(Refusal, match="got an unexpected keyword argument 'widht'"):
        refuse_uncallable(f"{files}/my_models.py:Net", {"widht": 12})


@pytest.mark.parametrize(("model", "form", "line"), [
    ("vit_b_16", Form(48, 64, 3, 3), "does not take 48x64x3 images: Wrong image height"),
    ("squeezenet1_0", Form(64, 64, 2, 3), "takes grey or RGB images, these have 2 channels; give"),
    ("airbench", Form(4, 4, 3, 3), "airbench does not take 4x4x3 images"),
])  # fmt: skip
def test_a_network_that_does_not_take_the_size(model: str, form: Form, line: str) -> None:
    with pytest.raises(Refusal) as refusal:
        refuse_unfit_model(with_model(model), form)
    assert line in str(refusal.value)


@pytest.mark.parametrize("model", BUILT_IN_MODELS)
@pytest.mark.parametrize("form", [Form(48, 64, 1, 3), Form(100, 70, 5, 11), Form(32, 32, 3, 10)])
def test_built_in_networks_take_other_sizes(model: str, form: Form) -> None:
    refuse_unfit_model(with_model(model), form)


@pytest.mark.parametrize("model", BUILT_IN_MODELS)
def test_the_least_size_of_a_built_in_network_is_what_it_takes(model: str) -> None:
    least = LEAST_EDGE.get(model, 1)
    refuse_unfit_model(with_model(model), Form(least, least, 3, 10))
    if least > 1:
        with pytest.raises(Refusal, match=f"{model} does not take {least}x{least - 1}x3 images"):
            refuse_unfit_model(with_model(model), Form(least, least - 1, 3, 10))


def test_a_network_of_torchvision_takes_grey_images() -> None:
    refuse_unfit_model(with_model("squeezenet1_0"), Form(64, 64, 1, 3))
    grey = build("squeezenet1_0", (), 3, image_shape=(64, 64, 1)).eval()
    colour = build("squeezenet1_0", (), 3, image_shape=(64, 64, 3)).eval()
    colour.network.load_state_dict(grey.network.state_dict())
    images = torch.rand(2, 64, 64, 1)
    torch.testing.assert_close(grey(images), colour(images.repeat(1, 1, 1, 3)))


def test_a_package_s_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    network = NETWORK.replace("from classifier", "from .classifier")
    (tmp_path / "package/nets.py").write_text(network)
    (tmp_path / "package/classifier.py").write_text(LAYERS)
    monkeypatch.syspath_prepend(tmp_path)
    classifier = build("package.nets:Net", (8, 8, 8), 3, (48, 64, 1), {"width": 4})
    weights.write(classifier.state_dict(), classifier.description, tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match="--trust-code"):
        weights.load(tmp_path / "model.safetensors")
    assert weights.load(tmp_path / "model.safetensors", "any").network.head.in_features == 8


def test_sources_in_a_weights_file_stay_in_their_folder(tmp_path: Path) -> None:
    classifier = build("airbench", (8, 8, 8), 3)
    classifier.description |= {"model": "x.py:Net", "sources": {"../x.py": "print('here')"}}
    weights.write(classifier.state_dict(), classifier.description, tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match="its code is not that of a network"):
        weights.load(tmp_path / "model.safetensors", "any")


def test_the_next_process_removes_the_copy_of_a_killed_one() -> None:
    loaded = (
        "from manynodes.base.sources import run_sources; print(run_sources({'a.py': ''}).__file__)"
    )
    killed = f"{loaded}; import os, sys; sys.stdout.flush(); os.kill(os.getpid(), 9)"

    def folder_of(code: str) -> Path:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=SCRIPTS, stdout=subprocess.PIPE, text=True, check=False)
        return Path(done.stdout.strip()).parent

    left = folder_of(killed)
    assert left.exists()
    time.sleep(1.1)  # a younger folder might not have its lock yet
    assert not folder_of(loaded).exists()
    assert not left.exists()


def test_warm_start_takes_what_fits_and_names_the_rest(
    trained: Path, shapes: Path, files: Path, tmp_path: Path
) -> None:
    first = trained / "model.safetensors"
    more = Training(
        tmp_path / "more", shapes, **changes(files, initial_weights=str(first), epochs=1)
    )
    assert more.end() == 0
    assert "train: initial_weights: 18 of 18 tensors from" in more.said
    before, after = (
        float(rows_of(path)[row]["train_loss"])
        for path, row in ((trained, -1), (tmp_path / "more", 0))
    )
    start = float(rows_of(trained)[0]["train_loss"])
    assert abs(after - before) < abs(after - start)
    wider = Training(
        tmp_path / "wider", shapes,
        **changes(files, initial_weights=str(first), epochs=1, model_args={"width": 5}),
    )  # fmt: skip
    assert wider.end() == 0
    assert (
        "these do not fit and start anew: network.body.0.0.weight (5, 1, 3, 3), there (6, 1, 3, 3)"
        in wider.said
    )
    nothing = Training(
        tmp_path / "nothing", shapes,
        **changes(files, initial_weights=str(first), model="airbench", model_args={}),
    )  # fmt: skip
    assert nothing.end() == 1
    assert "no tensor of" in nothing.said


def rows_of(run: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((run / "metrics.csv").read_text())))


def test_a_state_dict_of_torch_s_own_is_read_without_running_anything(
    trained: Path, shapes: Path, files: Path, tmp_path: Path
) -> None:
    classifier = weights.load(trained / "model.safetensors", "any")
    # Of a compiled network in DistributedDataParallel.
    state = {f"module._orig_mod.{k}": v for k, v in classifier.network.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "net.pt")
    run = changes(files, initial_weights=str(tmp_path / "net.pt"), epochs=1)
    done = Training(tmp_path / "run", shapes, **run)
    assert done.end() == 0
    assert "16 of 16 tensors" in done.said
    assert "start anew" not in done.said
    assert "images are normalised by the mean and std of these training images" in done.said
    (tmp_path / "net.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'touch here'\ntR.")
    hostile = Training(tmp_path / "hostile", shapes, **run)
    assert hostile.end() == 1
    assert "net.pt is not a weights file" in hostile.said
    torch.save({1: torch.zeros(1)}, tmp_path / "net.pt")
    with pytest.raises(Refusal, match="net.pt is not a weights file: it holds other things"):
        weights.read_tensors(tmp_path / "net.pt")


def test_a_checkpoint_of_another_program_is_read_or_told_its_prefix(tmp_path: Path) -> None:
    classifier, path = build("airbench", (8, 8, 8), 3), tmp_path / "net.pt"
    state = classifier.network.state_dict()
    torch.save({"model_state_dict": state, "epoch": 3}, path)
    given = weights.in_classifier(weights.read_tensors(path), classifier.state_dict().keys())
    assert set(given) == {f"network.{name}" for name in state}
    told: list[str] = []
    weights.warm_start(classifier, path, told.append)
    assert f"{len(state)} of {len(state)} tensors" in told[0]
    torch.save({f"backbone.{name}": each for name, each in state.items()}, path)
    with pytest.raises(Refusal, match=r"all names begin with backbone\. there; save it without"):
        weights.warm_start(classifier, path, told.append)


WRAPPING = """
from torch import nn

class Wrap(nn.Module):
    def __init__(self, classes, {layer}):
        super().__init__()
        self.{layer} = {layer}
        self.head = nn.Linear(4, classes)

    def forward(self, images):
        return self.head(self.{layer}(images).mean((2, 3)))

def net(classes, channels, image_size):
    body = nn.Sequential()
    body.conv, body.head = nn.Conv2d(channels, 4, 3), nn.Conv2d(4, 4, 1)
    return Wrap(classes, body)
"""


@pytest.mark.parametrize("layer", ["module", "_orig_mod", "network"])
def test_a_layer_may_be_called_like_what_is_wrapped_around_networks(tmp_path, layer: str) -> None:
    (tmp_path / "wrapping.py").write_text(WRAPPING.format(layer=layer))
    first, other = (
        build(f"{tmp_path}/wrapping.py:net", (8, 8, 8), 3, (48, 64, 1)) for _ in range(2)
    )
    weights.write(first.state_dict(), first.description, tmp_path / "run.safetensors")
    bare = first.network.state_dict()
    conv = f"{layer}.conv."
    states = {
        "bare": bare,
        "distributed": {f"module.{name}": each for name, each in bare.items()},
        "both": {f"_orig_mod.module.{name}": each for name, each in bare.items()},
        # Of a compiled layer.
        "inner": {name.replace(conv, f"{conv}_orig_mod."): each for name, each in bare.items()},
    }
    for name, state in states.items():
        torch.save(state, tmp_path / f"{name}.pt")
    for path in [tmp_path / "run.safetensors", *(tmp_path / f"{name}.pt" for name in states)]:
        told: list[str] = []
        for tensor in other.network.parameters():
            torch.nn.init.zeros_(tensor)
        weights.refuse_unfit_weights(weights.shapes_in(path), path, other)
        weights.warm_start(other, path, told.append)
        assert "start anew" not in told[0]
        assert "not used" not in told[0]
        for name, tensor in other.network.state_dict().items():
            assert torch.equal(tensor, bare[name]), (path, name)


def test_predictions_as_a_table(trained: Path, tmp_path: Path) -> None:
    for label in range(3):
        Image.fromarray(picture(label, 77, 48, 64)).save(tmp_path / f"{label}.png")
    (tmp_path / "bad.png").write_text("no image")
    model = ["--model", trained / "model.safetensors", "--trust-code"]
    good = program("predict", *model, "--", *(tmp_path / f"{label}.png" for label in range(3)))
    assert good.returncode == 0, good.stderr
    rows = list(csv.DictReader(io.StringIO(good.stdout)))
    assert list(rows[0]) == ["image", "predicted", "probability", "circle", "cross", "stripes"]
    for row in rows:
        shares = [float(row[name]) for name in ("circle", "cross", "stripes")]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert float(row[row["predicted"]]) == max(shares) == float(row["probability"])
    folder = program("predict", *model, "--", tmp_path)
    assert folder.returncode == 1
    assert folder.stderr == f"predict: {tmp_path}/bad.png: not an image\n"
    assert len(folder.stdout.splitlines()) == 4
    other = shutil.copytree(trained, tmp_path / "other") / "model.safetensors"
    other.write_bytes(other.read_bytes()[:-1] + b"x")
    refused = program("predict", "--model", other, "--trust-code", "--", tmp_path / "0.png")
    assert refused.returncode == 1
    assert "model.safetensors is not the file that the training has written" in refused.stderr


def test_a_prediction_sees_what_the_evaluation_sees(
    shapes: Path, files: Path, tmp_path: Path
) -> None:
    """Of images stored at 48 x 64, training sees 32 x 40 and evaluation the middle 40 x 48."""
    run = changes(files, epochs=1, crop_size=[32, 40], test_size=[40, 48])
    assert Training(tmp_path / "run", shapes, **run).end() == 0
    weights_file = tmp_path / "run/model.safetensors"
    classifier = weights.load(weights_file, "any").eval()
    assert classifier.description["stored_size"] == [48, 64]
    Image.fromarray(picture(1, 5, 48, 64)).save(tmp_path / "x.png")
    done = program("predict", "--model", weights_file, "--trust-code", "--", tmp_path / "x.png")
    middle = torch.from_numpy(picture(1, 5, 48, 64)[4:44, 8:56])[None, :, :, None]
    with torch.no_grad():
        wanted = classifier(middle).double().softmax(1)[0].tolist()
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert [float(row[name]) for name in ("circle", "cross", "stripes")] == pytest.approx(
        wanted, abs=1e-5
    )
