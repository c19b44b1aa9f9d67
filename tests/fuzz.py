"""Hostile files for every reader, seeded, so that a case can be repeated by its number.

A case passes if the reader accepts the file, or refuses it within seconds in one line of at most
200 characters without control characters or a traceback. Every payload tries to make a file, the
canary, which must not exist afterwards.

    python tests/fuzz.py --seed 1 --cases 4000 --programs 300
"""

# ruff: noqa: E402
import argparse
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SCRIPTS = ROOT / "workflow" / "scripts"
sys.path[:0] = [str(TESTS), str(SCRIPTS)]

import numpy as np
import yaml
from PIL import Image
from rich.console import Console

import programs
import publish
import watch
from classifier.models import weights
from classifier.states import state
from manynodes.base import failure
from manynodes.base.errors import LONGEST, OF_A_LINE, Refusal, error_line
from manynodes.base.failure import Failure
from manynodes.base.provenance import now
from manynodes.checkpointing import incidents, owner
from manynodes.data import sources
from manynodes.data.datasets import DATASETS
from manynodes.data.folder import DataFolder
from manynodes.data.staging import stage
from manynodes.data.user.arrays import from_arrays
from manynodes.data.user.declaration import UserData
from manynodes.data.user.folder_of_images import list_images
from manynodes.data.user.origins import files_of, write_origins
from manynodes.data.user.pictures import Unreadable, read_header, read_image
from manynodes.experiment.config import Experiment, read_run
from manynodes.experiment.file import read_config
from manynodes.experiment.keys import keys_of
from manynodes.programs.folders import Folders, prepare
from manynodes.programs.user_numbers import read_user_metrics, read_user_result
from manynodes.reporting import predictions, sums
from manynodes.reporting.events import points_of
from manynodes.reporting.measures import parse_result, read_measured, read_result
from manynodes.reporting.metrics import read_metrics
from manynodes.reporting.progress import read_all, read_record
from manynodes.reporting.results import read_about, read_evaluation, why_missing

SECONDS = 20  # of a CPU for a case in process; the slowest good ones take one
WAITING = 300  # seconds of waiting, such as for a pipe
PROGRAM_SECONDS = 600  # of a case with a program of its own
CONFIG = {
    "experiment": "fuzz",
    "dataset": {"name": "digits"},
    "widths": [8, 8, 8],
    "epochs": 2,
    "global_batch_size": 72,
    "learning_rate": 0.5,
    "flip": False,
    "seed": [0, 1],
}

Draw = random.Random


class Canary:
    """Makes a file if it is unpickled, or run as a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@dataclass(frozen=True)
class Material:
    """The material of the cases.

    Attributes:
        results: of a small finished experiment on digits, with a state.
        canary: path of the file that no case may make.
    """

    results: Path
    canary: Path

    @property
    def run(self) -> Path:
        return self.results / "fuzz" / "seed~0"

    @property
    def data(self) -> Path:
        return self.results / "data" / "digits"


def hostile_texts(canary: Path) -> list[str]:
    return [
        "",
        "\x1b[31mred\x1b[0m",
        "line\nline",
        "\r\rx",
        "\u202egnp.exe",
        "\ud800",
        "x" * 5000,
        "../../../etc/passwd",
        "/etc/passwd",
        "..",
        f"$(touch {canary})",
        f"`touch {canary}`",
        f"; touch {canary} #",
        f"' touch {canary} '",
        "=cmd|' /C calc'!A0",
        "@SUM(1)",
        "%s%n{0}",
        "nan",
        "Infinity",
        "٣",
        "0x10",
        "1e999",
        "~nosuchuser/x",
        "$HOME",
        "a/b",
        "\0",
        "null",
        "true",
        "<script>alert(1)</script>",
        "http://me:s3cret@host/x",
        "__class__",
        "é" * 300,
    ]


def hostile_value(draw: Draw, canary: Path) -> Any:
    """A JSON value that no user would give."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice(hostile_texts(canary))
    if kind == 1:
        return draw.choice([0, -1, 1 << 31, 1 << 63, 1 << 64, -(1 << 70), 10**400, 2, 3])
    if kind == 2:
        return draw.choice(
            [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 2.0, 0.5, -0.0]
        )
    if kind == 3:
        return draw.choice([None, True, False, [], {}, [[]], {"": {}}])
    if kind == 4:
        return [hostile_value(draw, canary) for _ in range(draw.randrange(4))]
    if kind == 5:
        return {
            draw.choice(hostile_texts(canary)): hostile_value(draw, canary)
            for _ in range(draw.randrange(3))
        }
    if kind == 6:
        nested: Any = 0
        for _ in range(draw.choice([5, 50, 300])):
            nested = [nested]
        return nested
    return [draw.randrange(10)] * draw.choice([1, 1000, 200_000])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value inside a JSON value."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, part in inside for place in places(part, (*path, key)))]


def mutated(value: Any, draw: Draw, canary: Path) -> Any:
    """The JSON value with one to three values replaced, removed, renamed or added."""
    value = json.loads(json.dumps(value))
    there = places(value)
    if draw.random() < 0.05:
        return hostile_value(draw, canary)
    for _ in range(draw.randint(1, 3)):
        *way, key = draw.choice(there[1:])
        # It may have been removed already.
        with suppress(KeyError, IndexError, TypeError, AttributeError):
            parent = value
            for step in way:
                parent = parent[step]
            mutate(parent, key, draw, canary)
    return value


def mutate(parent: Any, key: Any, draw: Draw, canary: Path) -> None:
    deed = draw.randrange(6)
    if deed < 3:
        parent[key] = hostile_value(draw, canary)
    elif deed == 3:
        del parent[key]
    elif isinstance(parent, dict):
        parent[draw.choice(hostile_texts(canary)) if deed == 4 else draw.choice([*parent])] = (
            parent[key]
        )
    else:
        parent.insert(0, parent[key])


def mutated_bytes(content: bytes, draw: Draw, canary: Path) -> bytes:
    """The bytes with some changed, cut out, doubled or inserted; or entirely different bytes."""
    deed = draw.randrange(8)
    at, other = sorted((draw.randrange(len(content) + 1), draw.randrange(len(content) + 1)))
    if deed == 0:
        return content[:at]
    if deed == 1:
        return content[:at] + content[other:]
    if deed == 2:
        return content[:other] + content[at:]
    if deed == 3:
        return draw.choice(
            [
                b"",
                b"\0" * 100,
                b"\xff" * 1000,
                pickle.dumps(Canary(canary)),
                b"PK\x03\x04",
                b"{}",
                b"[]",
                b"null",
            ]
        )
    if deed == 4:
        return (
            content[:at]
            + draw.choice(hostile_texts(canary)).encode(errors="replace")
            + content[at:]
        )
    changed = bytearray(content)
    for _ in range(draw.choice([1, 3, 30])):
        if changed:
            changed[draw.randrange(min(len(changed), draw.choice([16, 4000, len(changed)])))] = (
                draw.randrange(256)
            )
    return bytes(changed)


def put(path: Path, content: bytes, draw: Draw) -> None:
    """Write the file, or sometimes a folder, a link or a pipe."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    kind = draw.randrange(40)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("/dev/zero")
    elif kind == 3:
        path.symlink_to("nowhere")
    elif kind == 4:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind != 5:
        path.write_bytes(content)


def tampered_json(path: Path, draw: Draw, canary: Path) -> None:
    value = json.loads(path.read_text())
    if draw.random() < 0.7:
        # Surrogates cannot be encoded, except as JSON escapes.
        put(path, json.dumps(mutated(value, draw, canary)).encode(), draw)
    else:
        put(path, mutated_bytes(path.read_bytes(), draw, canary), draw)


def tampered_bytes(path: Path, draw: Draw, canary: Path) -> None:
    put(path, mutated_bytes(path.read_bytes(), draw, canary), draw)


def tampered_tree(path: Path, draw: Draw, canary: Path) -> None:
    """A state with another JSON in its header and the right SHA-256; or other bytes."""
    if draw.random() < 0.6:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        if draw.random() < 0.7:
            ((key, text),) = header["__metadata__"].items()
            header["__metadata__"][key] = json.dumps(mutated(json.loads(text), draw, canary))
        else:
            header = mutated(header, draw, canary)
        text = json.dumps(header).encode()
        put(path, len(text).to_bytes(8, "little") + text + content[8 + length :], draw)
    else:
        tampered_bytes(path, draw, canary)
    if (
        path.is_file()
        and not path.is_symlink()
        and path.stat().st_size < 1 << 30
        and path.suffix == state.SUFFIX
    ):
        state.sum_of(path).write_text(
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        )


def hostile_tar(path: Path, draw: Draw, canary: Path) -> None:
    names = [
        "cifar-10-batches-py/data_batch_1",
        f"../{canary.name}",
        str(canary),
    ]
    kinds = [
        tarfile.REGTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.FIFOTYPE,
        tarfile.DIRTYPE,
        tarfile.CHRTYPE,
    ]
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for _ in range(draw.randint(0, 4)):
            member = tarfile.TarInfo(draw.choice([*names, "x" * 200]))
            member.type, member.linkname = (
                draw.choice(kinds),
                draw.choice(["", "..", "/etc/passwd", str(canary)]),
            )
            content = draw.choice(
                [b"", b"[]", b"\x89PNG\r\n\x1a\n", pickle.dumps(Canary(canary)), bytes(100_000)]
            )
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))
    if draw.random() < 0.5:
        tampered_bytes(path, draw, canary)


def hostile_config(path: Path, draw: Draw, canary: Path) -> None:
    kind = draw.randrange(8)
    if kind < 4:
        text = json.dumps(mutated(CONFIG, draw, canary), indent=draw.choice([None, 1, "\t"]))
    elif kind < 6:
        text = yaml.safe_dump(mutated(CONFIG, draw, canary))
    elif kind == 6:
        text = mutated_bytes(yaml.safe_dump(CONFIG).encode(), draw, canary).decode("latin-1")
    else:
        depth, width = draw.choice([(12, 10), (30, 2), (3, 3)])
        bomb = [
            "a0: &a0 [x]",
            *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)),
        ]
        last = [
            f"{draw.choice([*CONFIG])}: *a{depth - 1}",
            f"x: !!python/object/apply:os.system ['touch {canary}']",
        ]
        text = "\n".join([*bomb, *last[: draw.randint(1, 2)]])
    put(path, text.encode(errors="replace"), draw)


EXPERIMENT = Experiment.from_config(CONFIG)
OF_PROGRAM = Experiment.from_config(
    {"experiment": "program", "command": ["true"], "evaluate": ["true"]}
)


def read_state(results: Path) -> None:
    """As `newest` reads it, and then as a training loads it."""
    run = read_run(
        json.dumps(
            {
                "dataset": "digits",
                "widths": [8, 8, 8],
                "epochs": 2,
                "global_batch_size": 72,
                "flip": False,
            }
        )
    )
    for path, _ in state.states(results / "fuzz/seed~0/state"):
        with suppress(ValueError):
            found, _content = state.read(path)
            _ = found.finished
            state.Request(run, "d" * 64, "c" * 64, "x", "exact").differs(found)


def read_owner(results: Path) -> None:
    found = owner.look(results / "fuzz/seed~0/state/owner.json")
    if found:
        owner.is_gone(found[0])
        owner.still_there(results / "fuzz/seed~0/state/owner.json", found[0])


def staged(results: Path) -> None:
    scratch = results / "scratch"
    scratch.mkdir(exist_ok=True)
    stage(DataFolder.read(results / "data/digits"), [str(scratch)])


def read_test_split(results: Path) -> None:
    folder = DataFolder.read(results / "data/digits")
    folder.refuse_changed("test")
    folder.split("test")


def read_picture(results: Path) -> None:
    for path in results.glob("picture.*"):
        try:
            read_header(path)
            read_image(path, (8, 8), 3)
        except Unreadable as error:
            raise Refusal(f"{path}: {error}") from None


def import_arrays(results: Path) -> None:
    user_data = UserData("own", "arrays", str(results / "own.npz"), test_fraction=0.5)
    work = results / "imported"
    work.mkdir(exist_ok=True)
    from_arrays(user_data, work, lambda _line: None)


def list_table(results: Path) -> None:
    table = str(results / "labels.csv")
    user_data = UserData("own", "folder", str(results / "table"), table=table, test_fraction=0.5)
    list_images(user_data, lambda _line: None)


def read_official(results: Path) -> None:
    """With the size and MD5 of this archive as the official ones."""
    work, archive = results / "work", results / "x.tgz"
    work.mkdir(exist_ok=True)
    right: dict[str, Any] = {}
    if archive.is_file() and archive.stat().st_size < 1 << 30:
        right = {
            "size": archive.stat().st_size,
            "tgz_md5": hashlib.md5(archive.read_bytes()).hexdigest(),
        }
    sources.from_archive(
        type("Forged", (sources.official(DATASETS["cifar10"]),), right), archive, work
    )


def configured(results: Path) -> None:
    config = read_config(results / "config.yaml")
    Experiment.from_config(keys_of(config).with_types(config))


def watched(results: Path) -> None:
    """What `watch` shows while somebody trains the run."""
    record = owner.Record("0" * 16, "process 1 on host", "host", owner.this_process())
    (results / RUN / "state/owner.json").write_text(owner.text(record))
    found = read_all(EXPERIMENT, results / "fuzz")
    for each in found:
        if bad := bad_line(watch.in_one_line(each), 400):
            raise AssertionError(bad)
    console = Console(file=io.StringIO(), height=24)
    console.print(watch.view("fuzz", found, console))


# By kind of file: how to make it hostile, its path in the results, and its reader.
RUN = "fuzz/seed~0"
PROGRAM = "program/run"  # of a user's program
READERS: dict[str, tuple[Callable[[Path, Draw, Path], None], str, Callable[[Path], Any]]] = {
    "configuration": (hostile_config, "config.yaml", configured),
    "manifest": (
        tampered_json,
        "data/digits/manifest.json",
        lambda results: DataFolder.read(results / "data/digits").manifest,
    ),
    "manifest, staged": (tampered_json, "data/digits/manifest.json", staged),
    "array": (
        tampered_bytes,
        "data/digits/test_labels.npy",
        read_test_split,
    ),
    "picture": (tampered_bytes, "picture.png", read_picture),
    "photograph": (tampered_bytes, "picture.jpg", read_picture),
    "own arrays": (tampered_bytes, "own.npz", import_arrays),
    "table": (tampered_bytes, "labels.csv", list_table),
    "array, staged": (tampered_bytes, "data/digits/test_labels.npy", staged),
    "owner": (tampered_json, f"{RUN}/state/owner.json", read_owner),
    "state": (tampered_tree, f"{RUN}/state/epoch=0002_step=000000.safetensors", read_state),
    "state's sum": (
        tampered_bytes,
        f"{RUN}/state/epoch=0002_step=000000.safetensors.sha256",
        read_state,
    ),
    "weights": (
        tampered_bytes,
        f"{RUN}/model.safetensors",
        lambda results: weights.load(results / RUN / "model.safetensors"),
    ),
    "weights' header": (
        tampered_tree,
        f"{RUN}/weights",
        lambda results: weights.load(results / RUN / "weights"),
    ),
    "evaluation": (
        tampered_json,
        f"{RUN}/evaluation.json",
        lambda results: read_evaluation(results / RUN / "evaluation.json"),
    ),
    "predictions": (
        tampered_bytes,
        f"{RUN}/predictions.csv",
        lambda results: predictions.read(results / RUN),
    ),
    "origins": (
        tampered_bytes,
        "data/digits/files.csv",
        lambda results: files_of(DataFolder.read(results / "data/digits"), "test"),
    ),
    "run": (
        tampered_json,
        f"{RUN}/run.json",
        lambda results: read_about(results / RUN / "run.json"),
    ),
    "failure": (
        tampered_json,
        f"{RUN}/failure.json",
        lambda results: why_missing("seed~0", results / RUN),
    ),
    "archive, official": (hostile_tar, "x.tgz", read_official),
    "sums": (tampered_bytes, "fuzz/SHA256SUMS", lambda results: sums.changed(results / "fuzz")),
    "evaluated": (
        tampered_json,
        f"{PROGRAM}/evaluated.json",
        lambda results: read_measured(OF_PROGRAM, results / PROGRAM),
    ),
    "progress": (
        tampered_bytes,
        f"{RUN}/metrics.csv",
        lambda results: read_all(EXPERIMENT, results / "fuzz"),
    ),
    "record": (
        tampered_json,
        "fuzz/experiment.json",
        lambda results: read_record(results / "fuzz"),
    ),
    "request": (
        tampered_json,
        f"{PROGRAM}/state/request.json",
        lambda results: publish.about(Folders(results / PROGRAM), [], {}),
    ),
    "classifier's metrics": (
        tampered_bytes,
        f"{RUN}/metrics.csv",
        lambda results: read_metrics(results / RUN / "metrics.csv"),
    ),
    "metrics": (
        tampered_bytes,
        f"{PROGRAM}/metrics.csv",
        lambda results: read_metrics(results / PROGRAM / "metrics.csv"),
    ),
    "result": (
        tampered_json,
        f"{PROGRAM}/result.json",
        lambda results: read_result(results / PROGRAM / "result.json"),
    ),
    "environment": (
        tampered_json,
        f"{PROGRAM}/state/environment.json",
        lambda results: publish.versions(publish.read_environment(Folders(results / PROGRAM))),
    ),
    "user metrics": (
        tampered_bytes,
        f"{PROGRAM}/work/rows.jsonl",
        lambda results: read_user_metrics(results / PROGRAM / "work", "rows.jsonl"),
    ),
    "user result": (
        tampered_json,
        f"{PROGRAM}/work/result.json",
        lambda results: parse_result(
            read_user_result(results / PROGRAM / "work", "result.json"), results
        ),
    ),
    "live view": (tampered_json, f"{RUN}/state/live.json", watched),
    "jobs": (tampered_json, "fuzz/jobs.json", watched),
    "incidents": (tampered_bytes, f"{RUN}/state/incidents.jsonl", watched),
    "events": (
        tampered_bytes,
        f"{RUN}/metrics.csv",
        lambda results: points_of(EXPERIMENT, results),
    ),
}


def commands(results: Path, kind: str) -> list[str]:
    """A program that reads this kind of file, as the rules start it."""
    run, data = results / RUN, results / "data/digits"
    config = json.dumps(CONFIG)
    one = json.dumps(
        {
            "dataset": "digits",
            "widths": [8, 8, 8],
            "epochs": 2,
            "global_batch_size": 72,
            "learning_rate": 0.5,
            "flip": False,
        }
    )
    train = ["train", "--run", one, "--data", data, "--output", run]
    evaluate = [
        "evaluate",
        "--data",
        data,
        "--model",
        run / "model.safetensors",
        "--device",
        "cpu",
        "--output",
        run / "new.json",
    ]
    aggregate = [
        "aggregate",
        "--config",
        config,
        "--results",
        results / "fuzz",
        "--data",
        results / "data",
        "--output",
        results / "out",
    ]
    chosen: dict[str, list[Any]] = {
        "configuration": ["check", results / "config.yaml"],
        "manifest": evaluate,
        "manifest, staged": ["stage", "--data", data, "--scratch", results / "scratch"],
        "array": evaluate,
        "owner": train,
        "state": train,
        "weights": evaluate,
        "weights' header": [*evaluate[:4], run / "weights", *evaluate[5:]],
        "evaluation": aggregate,
        "predictions": aggregate,
        "origins": evaluate,
        "run": aggregate,
        "classifier's metrics": aggregate,
        "archive, official": [
            "fetch",
            "--dataset",
            "cifar10",
            "--source",
            "archive",
            "--archive",
            results / "x.tgz",
            "--output",
            results / "fetched",
        ],
    }
    if kind not in chosen:
        return []
    name, *arguments = map(str, chosen[kind])
    return [sys.executable, str(SCRIPTS / f"{name}.py"), *arguments]


def make_material(folder: Path) -> Material:
    """A finished experiment with a state, made by the programs themselves."""

    def program(name: str, *arguments: object) -> None:
        done = programs.program(name, *arguments)
        assert done.returncode == 0, done.stderr

    results = folder / "results"
    data = results / "data" / "digits"
    program("fetch", "--dataset", "digits", "--output", data)
    digits = DataFolder.read(data)
    labels = {split: digits.split(split)[1].tolist() for split in ("train", "test")}
    origins = {split: (found, map(Path, map(str, found))) for split, found in labels.items()}
    write_origins(data / "files.csv", digits.class_names, origins)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8))
    picture.save(results / "picture.png")
    picture.save(results / "picture.jpg")
    rows = "".join(f"{n}.png,{n % 2},g{n // 2}\n" for n in range(8))
    (results / "labels.csv").write_text(f"file,label,group\n{rows}")
    for number in range(8):
        (results / "table").mkdir(exist_ok=True)
        picture.save(results / "table" / f"{number}.png")
    np.savez(results / "own.npz", images=np.zeros((8, 3, 3), np.uint8), labels=np.arange(8) % 2)
    for name in ("seed~0", "seed~1"):
        run, seed = results / "fuzz" / name, int(name[-1])
        settings = {
            key: value for key, value in CONFIG.items() if key not in ("experiment", "dataset")
        } | {
            "dataset": "digits",
            "seed": seed,
        }
        program("train", "--run", json.dumps(settings), "--data", data, "--output", run)
        program(
            "evaluate",
            "--data",
            data,
            "--model",
            run / "model.safetensors",
            "--checkpoints",
            run / "checkpoints",
            "--device",
            "cpu",
            "--output",
            run / "evaluation.json",
        )
        failure.write(run, "evaluate", Failure("no", who="rank 1", where="n2"))
        shutil.copy(run / "model.safetensors", run / "weights")
    live = {"epoch": 1, "step": 2, "steps": 3, "loss": 0.5, "images_per_second": 9.5, "slow": "n1"}
    (results / RUN / "state/live.json").write_text(json.dumps(live))
    (results / "fuzz/experiment.json").write_text(json.dumps(CONFIG))
    folders = Folders(results / PROGRAM)
    asked = {"sources_sha256": "", "data_sha256": None, "files_sha256": None, "directory": None}
    values = json.loads(OF_PROGRAM.runs["run"].to_json())
    prepare(folders, values, asked, "exact", {"by": "process 1", "started": now()})
    (folders.work / "metrics.csv").write_text("epoch,loss\n1,0.5\n2,0.25\n")
    (folders.work / "result.json").write_text('{"accuracy": 0.9, "loss": 0.25}')
    (folders.work / "rows.jsonl").write_text('{"epoch": 1, "loss": 0.5}\n{"epoch": 2, "a": "b"}\n')
    seen = {
        "host": "n1",
        "python": "3.11.7",
        "distributions": {"torch": "2.14.1"},
        "imports": ["os"],
    }
    (folders.state / "environment.json").write_text(json.dumps(seen))
    program("publish", "--output", folders.run)
    folders.evaluation.mkdir()
    (folders.evaluation / "result.json").write_text('{"accuracy": 0.8}')
    program("publish", f"--evaluation={'0' * 64}", "--output", folders.run)
    waits = {"job": "7", "state": "PENDING (Priority)", "waits": True, "since": "10:00:00"}
    (results / "fuzz/jobs.json").write_text(json.dumps({"seed~0": waits}))
    for kind in (incidents.INTERRUPTION, incidents.SLOW):
        incidents.add(results / RUN / "state", kind, "n1 is lost")
    program(
        "aggregate",
        "--config",
        json.dumps(CONFIG),
        "--results",
        results / "fuzz",
        "--output",
        results / "fuzz",
    )
    shutil.copyfile(results / "fuzz/summary.csv", results / "x.tgz")
    return Material(results, folder / "canary")


def bad_line(text: str, most: int) -> str | None:
    if len(text) > most or not text.isprintable():
        return f"not a line of {most} printable characters: {text[:300]!r}"
    return "shows a password" if "s3cret" in text else None


class TooLong(BaseException):
    """Not an OSError like TimeoutError, which readers take for an unreadable file."""


def in_process(kind: str, results: Path) -> str | None:
    """Read the file; the problem with the outcome, or None."""

    def too_long(_number: int, _frame: object) -> None:
        raise TooLong

    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(WAITING)
    try:
        READERS[kind][2](results)
    except TooLong:
        return f"not done after {SECONDS} s of a CPU, or {WAITING} s"
    except (Refusal, OSError) as error:
        return bad_line(error_line(error), OF_A_LINE)
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return None


def as_program(kind: str, results: Path) -> str | None:
    command = commands(results, kind)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            check=False,
            errors="surrogateescape",
        )
    except subprocess.TimeoutExpired:
        return f"not done after {PROGRAM_SECONDS} s"
    if "Traceback" in done.stderr:
        return done.stderr
    if done.returncode not in (0, 1, 75):
        return f"status {done.returncode}: {done.stderr}"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode and not lines:
        return "failed without a word"
    return next((bad for line in lines if (bad := bad_line(line, LONGEST))), None)


def tried(
    material: Material,
    seed: int,
    number: int,
    kind: str,
    check: Callable[[str, Path], str | None],
    work: Path,
) -> str | None:
    """Make one case and try it."""
    draw = Draw(f"{seed} {number} {kind}")
    make, name, _ = READERS[kind]
    results = work / "results"
    shutil.copytree(material.results, results, symlinks=True)
    try:
        make(results / name, draw, material.canary)
        problem = check(kind, results)
        return "the canary was made" if material.canary.exists() else problem
    finally:
        with suppress(FileNotFoundError):
            material.canary.unlink()
        shutil.rmtree(results, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=4000, help="read in this process")
    parser.add_argument("--programs", type=int, default=300, help="read by the programs")
    parser.add_argument("--only", metavar="KIND", help="of file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddp-fuzz-") as folder:
        work = Path(folder)
        material = make_material(work / "material")
        sys.exit(1 if fuzz(material, SimpleNamespace(**vars(args)), work) else 0)


def fuzz(material: Material, args: Any, work: Path) -> int:
    """Try all cases and print the problems; returns their number."""
    kinds = [args.only] if args.only else list(READERS)
    with_programs = [kind for kind in kinds if commands(material.results, kind)]
    start, bad, count = time.monotonic(), 0, Counter[str]()
    for check, number_of, of in (
        (in_process, args.cases, kinds),
        (as_program, args.programs, with_programs),
    ):
        for number in range(number_of if of else 0):
            kind = of[number % len(of)]
            count[kind] += 1
            if problem := tried(material, args.seed, number, kind, check, work):
                bad += 1
                print(
                    (
                        f"--- {check.__name__}, seed {args.seed}, case {number}, "
                        f"{kind}:\n{problem.strip()[-1500:]}"
                    ),
                    flush=True,
                )
    seconds = time.monotonic() - start
    print(
        f"fuzz: seed {args.seed}: {args.cases} cases in process, {args.programs} with programs, "
        f"{bad} bad, {seconds:.0f} s"
    )
    return bad


if __name__ == "__main__":
    main()
