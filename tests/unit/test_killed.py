"""Programs that are killed at any moment and run again give the same files.

These are fetch, stage, evaluate and aggregate. Those that only write results say in one line
if they cannot.
"""

import errno
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from forked import Forked, server
from manynodes.base import atomic
from programs import KILLED_AT, SCRIPTS, in_namespace, program
from waiting import until

SEED = 8
# How often each program is killed before a change of its folder, at any time, and during a write.
CHANGES, ANY_TIME, WRITING = 2, 1, 1
CONFIG = {
    "experiment": "killed",
    "dataset": {"name": "digits"},
    "widths": [8, 8, 8],
    "epochs": 2,
    "global_batch_size": 64,
    "flip": False,
}
# One thread each: several run at once.
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Job:
    """A program with its arguments, except for its output folder."""

    name: str
    arguments: Callable[[Path], list[object]]

    def command(self, folder: Path) -> list[str]:
        return [str(SCRIPTS / f"{self.name}.py"), *map(str, self.arguments(folder))]

    def start(self, folder: Path, *before: object) -> Forked:
        command = [*map(str, before), *self.command(folder)]
        return server().start(command, None, os.environ | VARIABLES)

    def run(self, folder: Path, *before: object) -> str:
        """The last line on stderr, if there is one."""
        process = self.start(folder, *before)
        said = process.communicate()[1].splitlines()
        assert process.returncode == 0, said
        return said[-1] if said else ""


@pytest.fixture(scope="module")
def jobs(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """All four by name, with a small trained run to evaluate, and its tables."""
    results = tmp_path_factory.mktemp("trained") / "results"
    trained = results / "run"
    run = {key: value for key, value in CONFIG.items() if key != "experiment"} | {
        "dataset": "digits"
    }
    done = program(
        "train",
        "--run",
        json.dumps(run),
        "--data",
        digits,
        "--output",
        trained,
    )
    assert done.returncode == 0, done.stderr
    weights = [
        "--model",
        trained / "model.safetensors",
        "--checkpoints",
        trained / "checkpoints",
        "--device",
        "cpu",
    ]
    config = ["--config", json.dumps(CONFIG)]
    listed = [
        Job("fetch", lambda folder: ["--dataset", "digits", "--output", folder]),
        Job("stage", lambda folder: ["--data", digits, "--scratch", folder]),
        Job(
            "evaluate",
            lambda folder: ["--data", digits, *weights, "--output", folder / "evaluation.json"],
        ),
        Job("aggregate", lambda folder: [*config, "--results", results, "--output", folder]),
    ]
    by_name = {job.name: job for job in listed}
    for name, folder in (("evaluate", trained), ("aggregate", results)):
        done = program(name, *by_name[name].arguments(folder))
        assert done.returncode == 0, done.stderr
    return by_name


def entries(folder: Path) -> dict[str, bytes]:
    """All entries of a folder, except lock files."""
    paths = [path for path in folder.rglob("*") if path.suffix != ".lock" and path.name != ".lock"]
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a folder"
        for path in paths
    }


def writing(folder: Path) -> bool:
    """Whether a file exists under a temporary name."""
    try:
        return any(
            "/." in str(path) and path.suffix != ".lock" and path.name != ".lock" and path.is_file()
            for path in folder.rglob("*")
        )
    except FileNotFoundError:
        return False  # something was removed while it was looked at


def halve_one(folder: Path, chance: random.Random) -> None:
    """Damage a file of an earlier run, but not a manifest, which nobody reads in a copy."""
    names = [
        name
        for name in entries(folder)
        if (folder / name).is_file() and not name.endswith("manifest.json")
    ]
    path = folder / chance.choice(sorted(names))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.faults
@pytest.mark.parametrize("name", ["fetch", "stage", "evaluate", "aggregate"])
def test_killed_at_any_moment_and_run_again(jobs, tmp_path, name) -> None:
    job = jobs[name]
    # The pages and figures contain the folder's name.
    alone = tmp_path / "alone" / "results"
    alone.mkdir(parents=True)
    since = time.monotonic()
    changes = int(job.run(alone, KILLED_AT, 0, alone))
    seconds = time.monotonic() - since
    whole = entries(alone)
    assert whole
    chance = random.Random(f"{SEED} {name}")
    moments: list[tuple[str, float]] = [
        ("change", n) for n in chance.sample(range(1, changes + 1), min(changes, CHANGES))
    ]
    moments += [("seconds", chance.uniform(0, seconds)) for _ in range(ANY_TIME)]
    moments += [("seconds into the writing", chance.uniform(0, 0.02)) for _ in range(WRITING)]

    def end(number: int) -> bool:
        """Kill it once and run it again; returns whether it was killed before its own end."""
        what, moment = moments[number]
        draw = random.Random(f"{SEED} {name} {number}")
        how = signal.SIGKILL if what == "change" else draw.choice([signal.SIGKILL, signal.SIGTERM])
        folder = tmp_path / str(number) / "results"
        folder.mkdir(parents=True)
        if draw.random() < 0.5:
            shutil.copytree(alone, folder, dirs_exist_ok=True)
            halve_one(folder, draw)
        earlier = entries(folder)
        told = (
            f"seed {SEED}, {name}, ended with {how.name} at {what} {moment}, "
            f"{'over an earlier run' if earlier else 'in an empty folder'}"
        )
        process = job.start(folder, *([KILLED_AT, moment, folder] if what == "change" else []))
        if what == "seconds":
            time.sleep(moment)
        if what == "seconds into the writing":
            while process.poll() is None and not writing(folder):
                time.sleep(0.0002)
            time.sleep(moment)
        if what != "change":
            process.send_signal(how)
        said = process.communicate()
        assert process.returncode in (0, -how), (told, said)
        visible = {
            name: content
            for name, content in entries(folder).items()
            if not any(p.startswith(".") for p in Path(name).parts)
        }
        for path, content in visible.items():
            assert content in (whole.get(path), earlier.get(path)), (told, path)
        if not earlier and any(Path(path).name == "manifest.json" for path in visible):
            assert visible == whole, told
        job.run(folder)
        assert sorted(entries(folder)) == sorted(whole), told
        assert entries(folder) == whole, told
        return process.returncode != 0

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ended = sum(pool.map(end, range(len(moments))))
    assert ended >= min(changes, CHANGES), (
        f"of {len(moments)} runs, {ended} were ended before their own end"
    )


def test_the_temporary_file_of_a_writer_that_lives_stays(tmp_path) -> None:
    """One on this machine, and a recent one from another machine."""
    atomic.write_text(tmp_path / "first", "")
    with atomic.replacing(tmp_path / "mine") as mine:
        mine.touch()
        elsewhere = tmp_path / f".mine.another-node.1{atomic.TEMPORARY}"
        elsewhere.touch()
        atomic.write_text(tmp_path / "first", "again")
        assert mine.exists()
        assert elsewhere.exists()
    long_ago = time.time() - atomic.ABANDONED - 60
    os.utime(elsewhere, (long_ago, long_ago))
    atomic.write_text(tmp_path / "first", "and again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "mine"]
    # A file server's clock may be behind.
    with atomic.replacing(tmp_path / "mine") as mine:
        mine.touch()
        os.utime(mine, (long_ago, long_ago))
        atomic.write_text(tmp_path / "first", "once more")
        assert mine.exists()


def test_one_of_several_creates_a_file_without_hard_links_too(tmp_path, monkeypatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert atomic.create(tmp_path / "owner", "a")
    assert not atomic.create(tmp_path / "owner", "b")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("owner", "a")]


@pytest.mark.parametrize(
    ("name", "first"),
    [("evaluate", "predictions.csv"), ("aggregate", "summary.csv")],
)
@pytest.mark.parametrize(("hindrance", "reason"), [
    ("dd if=/dev/zero of=full bs=4k 2>/dev/null", "No space left on device"),
    ("mount -o remount,bind,ro .", "Read-only file system; choose a folder that can be written to"),
], ids=["full", "read-only"])  # fmt: skip
def test_results_that_cannot_be_written(jobs, tmp_path, name, first, hindrance, reason) -> None:
    """On a real file system of 1 MB: nothing new stays, and existing files are unchanged."""
    folder = tmp_path / "results"
    folder.mkdir()
    line = shlex.join([sys.executable, *jobs[name].command(folder)])
    before = (
        f"mount -t tmpfs -o size=1m tmpfs {folder} && cd {folder} && echo earlier > "
        f"{first} && {{ {hindrance}; }}"
    )
    inside = f"{before}; {line}; ls -A; cat {first}"
    done = in_namespace(inside, env=os.environ | VARIABLES)
    # A long path is shortened in its middle.
    start, _, end = done.stderr.partition("…")
    assert f"{name}: {folder / first}: {reason}".startswith(start) or not end
    assert f"/{first}: {reason}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert set(done.stdout.split()) - {"full"} == {first, "earlier"}


def test_npm_ends_with_a_fetch_that_is_killed(tmp_path) -> None:
    """Otherwise it would continue to download beside the next fetch."""
    out = tmp_path / "out"

    def npm() -> list[str]:
        """The npm processes that work in this folder, or in a removed one that was in it."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                there = str((process / "cwd").readlink()).startswith(str(out))
                found += (
                    [process.name]
                    if there and b"pack" in (process / "cmdline").read_bytes()
                    else []
                )
            except OSError:
                continue  # it has ended meanwhile
        return found

    with socket.create_server(("127.0.0.1", 0)) as silent:
        registry = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = (
            os.environ
            | VARIABLES
            | {
                "npm_config_registry": registry,
                "npm_config_cache": str(tmp_path / "cache"),
            }
        )
        command = [
            sys.executable,
            str(SCRIPTS / "fetch.py"),
            "--dataset",
            "cifar10",
            "--source",
            "npm",
            "--output",
            str(out),
        ]
        process = subprocess.Popen(command, env=environment)
        until(npm)
        process.kill()
        process.wait()
        until(lambda: not npm())
