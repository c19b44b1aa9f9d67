"""Interrupted trainings resume, and end like uninterrupted ones.

Weights, history and checkpoints are equal bit for bit. Every process here is real.
"""

import hashlib
import json
import mmap
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import leftovers
from classifier.states import state
from forked import server
from manynodes.base.errors import Refusal
from manynodes.experiment.config import read_run
from programs import KILLED_AT, SCRIPTS, MakesFolder, train_command
from session.finished import code_of_state
from trainings import (
    ALONE_AND_NOT,
    CONNECTED,
    ONE_THREAD,
    RUN,
    SMALL,
    Training,
    attempts,
    complete,
    in_this_process,
    newest_place,
    result,
    rows_of,
)  # fmt: skip

SEED = 20261121


@pytest.mark.faults
def test_stopped_after_the_last_step_of_an_epoch(digits, tmp_path) -> None:
    """With one step per epoch, every stop comes between the last step of an epoch and its end."""
    whole_set = {"global_batch_size": 1298, "epochs": 40}
    training = Training(tmp_path / "out", digits, **whole_set)
    training.reach(2)
    os.kill(training.process.pid, signal.SIGTERM)
    assert training.end() == 75, training.said
    epoch, step = newest_place(tmp_path / "out")
    assert 2 <= epoch < 40
    assert step == 1
    complete(tmp_path / "out", digits, **whole_set)
    complete(tmp_path / "alone", digits, **whole_set)
    assert result(tmp_path / "out") == result(tmp_path / "alone")


@pytest.fixture
def left(interrupted: Path, tmp_path: Path) -> Path:
    """An interrupted training that this test may damage."""
    return Path(shutil.copytree(interrupted, tmp_path / "left"))


def states(output: Path) -> list[Path]:
    """Newest first."""
    return [path for path, _ in state.states(output / "state")]


def truncate(output: Path) -> Path:
    (path, *_) = states(output)
    os.truncate(path, path.stat().st_size * 2 // 3)
    return path


def flip_a_bit(output: Path) -> Path:
    (path, *_) = states(output)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def empty(output: Path) -> Path:
    (path, *_) = states(output)
    path.write_bytes(b"")
    return path


def lose_the_sum(output: Path) -> Path:
    (path, *_) = states(output)
    state.sum_of(path).unlink()
    return path


def damage_the_sum(output: Path) -> Path:
    (path, *_) = states(output)
    state.sum_of(path).write_bytes(b"\xff\xfe no sum")
    return path


def put_a_program(output: Path) -> Path:
    (path, *_) = states(output)
    content = pickle.dumps(MakesFolder(f"{output}/code-was-run"))
    path.write_bytes(content)
    state.sum_of(path).write_text(f"{hashlib.sha256(content).hexdigest()}  {path.name}\n")
    return path


def rename(output: Path) -> Path:
    (path, *_) = states(output)
    later = path.with_name("epoch=0015_step=000001.safetensors")
    path.rename(later)
    state.sum_of(path).rename(state.sum_of(later))
    return later


def add_a_file(output: Path) -> Path:
    path = output / "state" / "x.safetensors"
    path.write_bytes(b"x")
    return path


def damage_a_checkpoint(output: Path) -> Path:
    kept = state.checkpoint(output / "state", 4)
    os.truncate(kept, 1000)
    return states(output)[0]


def damage_all(output: Path) -> Path:
    for path in states(output):
        path.write_bytes(b"all alike")
    return path


DAMAGED = "does not match the SHA-256 beside it: it is truncated or damaged"
# By damage: the message, and the index of the state that is resumed; None if it starts from
# scratch.
DAMAGES: dict[Callable[[Path], Path], tuple[str, int | None]] = {
    truncate: (DAMAGED, 1),
    flip_a_bit: (DAMAGED, 1),
    empty: ("is empty", 1),
    lose_the_sum: ("has no SHA-256 beside it", 1),
    damage_the_sum: (DAMAGED, 1),
    put_a_program: ("is not a state of this version of the workflow", 1),
    rename: ("was renamed", 1),
    add_a_file: ("is not named like a state", 0),
    damage_a_checkpoint: ("needs epoch=004.safetensors, which is missing or damaged", None),
    damage_all: (DAMAGED, None),
}


# With a training: the state before, the newest one, and from scratch. Of the others only what is
# told and chosen.
TRAINED = (truncate, put_a_program, add_a_file, damage_a_checkpoint)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage, marks=pytest.mark.faults if damage == damage_a_checkpoint else ())
        for damage in DAMAGES
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_state_that_cannot_be_used_is_named_and_skipped(digits, reference, left, damage) -> None:
    told, number = DAMAGES[damage]
    before = states(left)
    newest = state.read(before[0])[0]
    path = damage(left)
    lines: list[str] = []
    if damage in TRAINED:
        lines = complete(left, digits).said.splitlines()
        assert result(left) == reference(1)
        assert not (left / "code-was-run").exists()
    else:
        request = state.Request(
            read_run(json.dumps(newest.run)), newest.data_sha256, newest.code_sha256,
            "process 1 on here", "exact",
        )  # fmt: skip
        state.newest(left / "state", request, lambda line: lines.append(f"train: {line}"))
    (named,) = [line for line in lines if line.startswith(f"train: skipped: {path} ")]
    assert told in named
    if number is None:
        line = (
            f"train: no usable state in {left}/state, {len(before)} skipped; starting from scratch"
        )
        assert line in lines
    else:
        resumed = rf"train: resumed after .*, of 16 epochs, from {before[number]}"
        assert [line for line in lines if re.fullmatch(resumed, line)], lines


@pytest.mark.parametrize("generator", ["python", "numpy"])
def test_a_state_with_an_impossible_generator_is_refused(digits, generator: str) -> None:
    """Whoever has edited it can have written its sum too."""
    training = in_this_process(digits)
    training.attempts.append({"by": "me", "started": "now", "commit": None, "seconds": 0.0})
    own = training.rank_state()
    own["rng"][generator][1][3] = -1
    with pytest.raises(Refusal, match=r"after epoch 0 does not fit the network \(.*=fresh"):
        training.restore(training.state([own]))


@pytest.mark.faults
def test_it_is_skipped_while_another_rank_waits_as_with_nccl(digits, reference, tmp_path) -> None:
    how: dict[str, Any] = {"processes": 2, "environment": CONNECTED["nccl"]}
    training = Training(tmp_path / "out", digits, **how)
    training.reach(2)
    training.process.terminate()
    assert training.end() == 75
    path = put_a_program(tmp_path / "out")
    said = complete(tmp_path / "out", digits, **how).said
    assert f"train: skipped: {path} {DAMAGES[put_a_program][0]}" in said
    assert result(tmp_path / "out") == reference(2)


def invert(images: Path) -> None:
    """As a page of a mapping: tmpfs does not note that as a change."""
    with images.open("r+b") as file, mmap.mmap(file.fileno(), 0) as page:
        page[5000:15_000] = bytes(255 - byte for byte in page[5000:15_000])


@pytest.mark.parametrize(
    ("killed", "processes"),
    [
        (False, 1),
        pytest.param(True, 1, marks=pytest.mark.faults),
        pytest.param(False, 2, marks=pytest.mark.faults),
    ],
)
def test_images_that_change_meanwhile_leave_no_trace(
    digits, reference, tmp_path, killed, processes
) -> None:
    """On a disk that notes it, nothing is saved of them, and the same command continues."""
    command = (tmp_path / "out", digits, "--scratch", tmp_path)
    environment = CONNECTED["gloo" if processes == 1 else "nccl"]
    how: dict[str, Any] = {"processes": processes, "environment": environment}
    training = Training(*command, **how)
    training.reach(3)
    invert(next(tmp_path.glob("ddp-data-*/*/train_images.npy")))
    if killed:
        training.process.kill()
    assert training.end() != 0
    who = "train" if processes == 1 else r"launch: train failed: rank 0 on \S+"
    line = rf"^{who}: \S+/train_images.npy on \S+ changed while it was read; run the same command"
    assert killed or re.search(line, training.said, re.MULTILINE), training.said
    complete(*command, **how)
    assert result(tmp_path / "out") == reference(processes)
    assert len(attempts(tmp_path / "out")) == 2


@pytest.mark.faults
@ALONE_AND_NOT
def test_images_that_change_unnoticed_fail_the_training_at_its_end(
    digits, tmp_path, processes, environment
) -> None:
    with tempfile.TemporaryDirectory(prefix=leftovers.FOLDERS, dir="/dev/shm") as memory:
        data = Path(shutil.copytree(digits, f"{memory}/data"))
        training = Training(tmp_path / "out", data, processes=processes, environment=environment)
        training.reach(1)
        invert(data / "train_images.npy")
        assert training.end() == 1
    who = "train" if processes == 1 else r"launch: train failed: rank 0 on \S+"
    line = rf"^{who}: \S+/train_images.npy on \S+ changed while it was read; the states are removed"
    assert re.search(line, training.said, re.MULTILINE), training.said
    assert list(states(tmp_path / "out")) == []
    assert not (tmp_path / "out/run.json").exists()


def other_code(folder: Path) -> Path:
    """The programs with a change in one computation."""
    shutil.copytree(
        SCRIPTS.parent, folder / "workflow", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = folder / "workflow" / "scripts" / "classifier" / "pixels" / "batches.py"
    path.write_text(path.read_text().replace("PASS = 500", "PASS = 499"))
    return path.parents[2]


@pytest.mark.parametrize("other", ["configuration", "code"])
def test_what_is_of_another_run_is_refused_and_kept_until_it_is_to_start_over(
    digits, left, tmp_path, other
) -> None:
    how: dict = {"learning_rate": 0.25, "epochs": 2} if other == "configuration" else {}
    scripts = other_code(tmp_path) if other == "code" else SCRIPTS
    there = {path: path.read_bytes() for path in left.rglob("*") if path.is_file()}
    training = Training(left, digits, scripts=scripts, **how)
    assert training.end() == 1
    *_, last = training.said.splitlines()
    commit = attempts_of_newest(left)[-1]["commit"]
    different = {
        "configuration": "epochs was 16 and is 2, learning_rate was 0.5 and is 0.25",
        "code": f"the code has changed since commit {str(commit)[:12]}",
    }[other]
    assert last.endswith(
        f".safetensors is a state of another run: {different}; undo that, or start over: "
        "--config resume=fresh"
    ), last
    assert {
        path: path.read_bytes()
        for path in left.rglob("*")
        if path.is_file() and path.name != "owner.json"
    } == there
    newest = state.read(states(left)[0])[0]
    assert code_of_state(left / "state") == (newest.code_sha256, str(commit))
    if other == "configuration":
        (left / "state" / "owner.json").unlink()
        assert (
            f"train: no usable state in {left}/state, {len(states(left))} skipped; "
            "starting from scratch" in complete(left, digits, "--resume=fresh", **how).said
        )
        complete(tmp_path / "alone", digits, **how)
        assert result(left) == result(tmp_path / "alone")


# Each has its own state: all that is drawn per image, step or epoch; compiled code for two batch
# sizes. Other optimizers and precisions: test_recipe.py.
OTHER_RECIPES = (
    {
        "trivial_augment": True,
        "random_erasing": 0.5,
        "mixup": 0.2,
        "cutmix": 1.0,
        "class_weights": {"3": 2.0},
        "sampling": "balanced",
    },
    {"compile": "default", "ema": 0.9},
)


@pytest.mark.faults
@pytest.mark.parametrize("recipe", OTHER_RECIPES, ids=lambda recipe: "-".join(recipe))
def test_every_recipe_goes_on_to_the_same_weights(digits, tmp_path, recipe) -> None:
    alone, output = tmp_path / "alone", tmp_path / "out"
    if "compile" in recipe:
        network = tmp_path / "small.py"
        network.write_text(SMALL)
        recipe = recipe | {"model": f"{network}:net", "learning_rate": 0.01}
    # Compiled, an epoch takes 0.03 s: there must be some left when the signal comes.
    epochs = 60 if "compile" in recipe else 6
    recipe = recipe | {"epochs": epochs, "checkpoint_every": epochs // 3}
    complete(alone, digits, **recipe)
    training = Training(output, digits, **recipe)
    training.reach(2)
    os.kill(training.find("train.py")[0], signal.SIGUSR1)
    assert training.end() == 75, training.said
    assert (0, 0) < newest_place(output) < (epochs, 0)
    complete(output, digits, **recipe)
    assert len(attempts(output)) == 2
    assert result(output) == result(alone)
    if "compile" in recipe:
        plain = tmp_path / "plain"
        complete(plain, digits, **recipe | {"compile": "none"})
        one, other = (float(rows_of(folder)[0]["train_loss"]) for folder in (alone, plain))
        assert one == pytest.approx(other, rel=1e-2)


def attempts_of_newest(output: Path) -> list[dict]:
    return state.read(states(output)[0])[0].attempts


@pytest.mark.faults
def test_another_number_of_processes_goes_on(digits, reference, tmp_path) -> None:
    """The loss is near that of the other number, but not equal: every process has its own
    BatchNorm statistics.

    They cover 36 images on each of two processes, or 72 on one, and training amplifies the
    difference while the loss falls steeply. Uninterrupted trainings on 1, 2 and 3 processes
    differed by up to 0.17 in an epoch's training loss, and by up to 0.07 in each of the last six
    (measured); trainings that changed the number by up to 0.16 and 0.04. One with fresh weights
    would be off by 0.8 at first.
    """
    output = tmp_path / "out"
    training = Training(output, digits, "--save-every-seconds", 1, processes=2)
    training.reach(4)
    os.kill(training.find("train.py")[0], signal.SIGUSR2)
    assert training.end() == 75, training.said
    there = sorted(path.name for path in (output / "state").glob("*.safetensors*"))
    epoch, step = newest_place(output)
    training = Training(output, digits)
    assert training.end() == 1
    assert training.said.splitlines()[-1].endswith(
        ".safetensors is a state of another run: it was on 2 processes and is on 1 "
        "(--config resume=anyway continues); undo that, "
        "or start over: --config resume=fresh"
    )
    assert sorted(path.name for path in (output / "state").glob("*.safetensors*")) == there
    training = complete(output, digits, "--resume=anyway")
    assert "warning: the state is of 2 processes: BatchNorm's statistics are" in training.said
    assert training.epochs == list(range(epoch + 1, 17))
    *_, last = attempts(output)
    assert last["from"] == {"epoch": epoch, "step": step}
    rows, on_one, on_two = rows_of(output), reference(1)["rows"], reference(2)["rows"]
    assert rows[:epoch] == on_two[:epoch]
    assert [(row["epoch"], row["step"], row["lr"]) for row in rows] == [
        (row["epoch"], row["step"], row["lr"]) for row in on_one
    ]
    losses, due = ([float(row["train_loss"]) for row in some] for some in (rows, on_one))
    assert losses == pytest.approx(due, abs=0.2)
    assert losses[-6:] == pytest.approx(due[-6:], abs=0.08)


# Notes each image that it is trained on.
SEEN = """
import hashlib, os, time
import torch
from torch import nn

class Seen(nn.Module):
    def __init__(self, classes, channels, image_size):
        super().__init__()
        pixels = channels * image_size[0] * image_size[1]
        self.head = nn.Sequential(
            nn.BatchNorm2d(channels), nn.Flatten(), nn.Linear(pixels, classes)
        )

    def forward(self, images):
        # Not in the looks at a network before its training: of blank images, and of two.
        if self.training and len(images) > 2 and images.std() > 0:
            time.sleep(0.02)
            with open(f"{os.environ['SEEN']}/{os.getpid()}.draws", "a") as file:
                print(torch.rand(()).item(), file=file)
            with open(f"{os.environ['SEEN']}/{os.getpid()}.images", "a") as file:
                for image in images:
                    print(hashlib.sha256(image.numpy().tobytes()).hexdigest(), file=file)
        return self.head(images)
"""


@pytest.mark.faults
def test_within_an_epoch_another_number_of_processes_sees_every_image_once(
    digits, tmp_path
) -> None:
    (tmp_path / "nets.py").write_text(SEEN)
    how: dict[str, Any] = {
        "model": f"{tmp_path}/nets.py:Seen", "epochs": 2, "shift": 0, "crop_size": 32,
        "learning_rate": 0.01,
    }  # fmt: skip
    for attempt in count():
        output, seen = tmp_path / f"{attempt}", tmp_path / f"{attempt}.seen"
        seen.mkdir()
        where = {"environment": {"SEEN": str(seen)}}
        training = Training(output, digits, processes=2, **where, **how)
        training.reach(1)
        os.kill(training.find("train.py")[0], signal.SIGUSR2)
        assert training.end() == 75, training.said
        # It may have stopped between two epochs.
        if newest_place(output)[1]:
            break
    complete(output, digits, "--resume=anyway", processes=3, **where, **how)
    images = Counter(
        line for file in seen.glob("*.images") for line in file.read_text().splitlines()
    )
    assert images.total() == 2 * 1298
    assert all(times % 2 == 0 for times in images.values())
    # Dropout would not cover the same on two of three ranks.
    assert len({file.read_text().splitlines()[0] for file in seen.glob("*.draws")}) == 3


@pytest.mark.faults
def test_a_changed_processor_is_warned_of_and_computes_in_the_precision_of_before(
    digits, tmp_path
) -> None:
    """The same machine, with oneDNN and torch's own kernels limited to older instructions, which
    have no bf16.
    """
    network = tmp_path / "small.py"
    network.write_text(SMALL)
    how = {"model": f"{network}:net", "learning_rate": 0.01, "epochs": 3}
    output = tmp_path / "out"
    complete(output, digits, precision="bf16", **how)
    state.remove(states(output)[0])
    # Not always 2: a state is left out while the one before is being written.
    epoch, _ = newest_place(output)
    older = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
    training = complete(output, digits, environment=older, precision="auto", **how)
    assert training.epochs == list(range(epoch + 1, 4))
    (warning,) = (
        line for line in training.said.splitlines() if line.startswith("train: warning: ")
    )
    assert re.search(r"onednn_isa was .+ and is .*SSE4", warning)
    assert re.search(r"aten was \S+ and is DEFAULT", warning)
    assert warning.endswith("uninterrupted training, although it goes on in bf16")
    before, after = attempts(output)
    assert before["cpu"] == after["cpu"]
    assert before["onednn_isa"] != after["onednn_isa"]


def test_a_finished_training_gives_its_files_again_without_training(
    digits, finished, reference, tmp_path
) -> None:
    output = Path(shutil.copytree(finished(1), tmp_path / "out"))
    shutil.rmtree(output / "checkpoints")
    (output / "model.safetensors").write_bytes(b"damaged")
    training = complete(output, digits)
    assert "train: resumed after epoch 16, of 16 epochs" in training.said
    assert training.epochs == []
    assert result(output) == reference(1)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["interrupted", "finished"])
def test_killed_right_before_it_changes_its_output(
    digits, finished, interrupted, reference, tmp_path, name
) -> None:
    """Before any of its changes, and before the last ones, when the last state is written and the
    outputs are not complete.
    """
    source = interrupted if name == "interrupted" else finished(1)
    rng = random.Random(f"{SEED} {name}")
    # Saved every epoch and not by the clock, so that each run makes the same changes.
    options = ["--save-every-seconds", 1000]

    def left() -> Path:
        output = Path(shutil.copytree(source, tmp_path / str(rng.random())))
        (output / "state" / "owner.json").unlink(missing_ok=True)
        return output

    def killed(at: int, output: Path) -> subprocess.CompletedProcess[str]:
        train = train_command(json.dumps(RUN), digits, output, *options)
        command = [str(KILLED_AT), str(at), str(output), *train]
        return server().run(command, None, os.environ | ONE_THREAD)

    # Before the threads: it may have to be trained, once.
    expected = reference(1)
    alone = left()
    done = killed(0, alone)
    assert done.returncode == 0, done.stderr
    changes = int(done.stderr.splitlines()[-1])
    # Each file is written under another name and renamed: model.safetensors, run.json, and at last
    # the record of the owner.
    moments = (
        rng.sample(range(1, changes - 5), 2)
        if name == "interrupted"
        else [changes - 5, changes - 2]
    )

    def end(at: int, output: Path) -> None:
        assert killed(at, output).returncode == -signal.SIGKILL, (at, changes)
        complete(output, digits, *options)
        assert result(output) == expected, (at, changes)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(end, moments, [left() for _ in moments]))
