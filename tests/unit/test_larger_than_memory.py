"""A data set larger than the memory that is allowed: the same weights, all images."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import leftovers
from forked import server
from manynodes.data.user.declaration import UserData
from programs import SCRIPTS, import_own, train_command
from trainings import ONE_THREAD

pytestmark = pytest.mark.faults

# Bytes; Python with torch takes 390 MB, and batches of 20 images 80 more (of 60: 280).
ALLOWED = 700_000_000
EDGE = 160
IMAGES = 5 * ALLOWED // 4 // (EDGE * EDGE * 3)
NET = f"""
from torch import nn

def build(classes, channels, size):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 16, 16), nn.BatchNorm2d(8), nn.Flatten(),
        nn.Linear(8 * {EDGE // 16} ** 2, classes),
    )
"""


@pytest.fixture(scope="module")
def limited() -> Iterator[list[str]]:
    """The command that enters a control group with little memory."""
    limits = dict.fromkeys(("memory.max", "memory.limit_in_bytes"), ALLOWED)
    with leftovers.control_group("memory", limits) as enter:
        yield enter


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    np.save(folder / "labels.npy", np.arange(IMAGES) % 5)
    images = np.lib.format.open_memmap(
        folder / "images.npy", "w+", np.uint8, (IMAGES, EDGE, EDGE, 3)
    )
    random = np.random.default_rng(0)
    for start in range(0, IMAGES, 1000):
        some = images[start : start + 1000]
        some[:] = random.integers(0, 256, some.shape, np.uint8)
    del images
    images, labels = (str(folder / f"{name}.npy") for name in ("images", "labels"))
    data = UserData("large", "arrays", images, labels=labels, test_fraction=0.05)
    done = import_own(data, folder / "data")
    assert done.returncode == 0, done.stderr
    (folder / "images.npy").unlink()
    (folder / "net.py").write_text(NET)
    return folder


def arguments(large: Path, name: str) -> list[str]:
    """Of train.py."""
    run = {
        "dataset": "large", "model": f"{large}/net.py:build", "epochs": 1, "crop_size": 160,
        "global_batch_size": 20, "learning_rate": 0.001, "checkpoint_every": 0,
    }  # fmt: skip
    return train_command(json.dumps(run), large / "data", large / name)


@pytest.fixture(scope="module")
def in_memory(large: Path) -> Path:
    """Weights trained without the limit."""
    command = [*arguments(large, "memory"), "--images-in", "memory"]
    done = server().run(command, None, os.environ | ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return large / "memory/model.safetensors"


@pytest.fixture(scope="module")
def mapped(large: Path, limited: list[str], in_memory: Path) -> Path:
    """Weights trained from the disk; after the others, so that torch's libraries are in the page
    cache and do not count.
    """
    assert in_memory
    done = subprocess.run(
        [*limited, sys.executable, *arguments(large, "disk")], capture_output=True, text=True,
        check=False, env=os.environ | ONE_THREAD,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return large / "disk/model.safetensors"


def test_from_the_disk_and_from_memory_come_the_same_weights(in_memory: Path, mapped: Path) -> None:
    assert mapped.read_bytes() == in_memory.read_bytes()


def test_evaluation_counts_every_image(large: Path, limited: list[str], mapped: Path) -> None:
    weights = mapped
    output = large / "evaluation.json"
    command = [
        sys.executable, SCRIPTS / "evaluate.py", "--data", large / "data", "--model", weights,
        "--trust-code", "--output", output,
    ]  # fmt: skip
    subprocess.run([*limited, *map(str, command)], check=True, capture_output=True)
    assert json.loads(output.read_text())["n"] == 5 * round(0.05 * IMAGES / 5)
