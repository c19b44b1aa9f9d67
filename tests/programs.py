"""The programs, run as a user would."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from forked import SCRIPTS, server
from manynodes.data.folder import DataFolder
from manynodes.data.user.declaration import UserData
from manynodes.experiment.config import Experiment

ROOT = Path(__file__).resolve().parents[1]
# Runs a program and kills it right before one of its changes of a folder.
KILLED_AT = ROOT / "tests" / "unit" / "killed_at.py"


def program(name: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run one of the programs as a user would; its output is text.

    Args:
        options: of `subprocess.run`, for a Python of its own; see forked.py.
    """
    command = [str(SCRIPTS / f"{name}.py"), *map(str, arguments)]
    if not options:
        return server().run(command)
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, **options
    )


def python(
    code: str, *arguments: object, before: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own that can import our modules; its output is text.

    Args:
        before: command that runs a command, such as one in a control group.
        variables: of its environment, besides ours.
    """
    return subprocess.run(
        [*before, sys.executable, "-c", dedent(code), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def fetch_from(url: str, output: Path) -> subprocess.CompletedProcess[str]:
    """Fetch CIFAR-10 from an address."""
    source = ["--source", "url", "--url", url]
    return program("fetch", "--dataset", "cifar10", *source, "--output", output)


def import_own(data: UserData, output: Path, **options) -> subprocess.CompletedProcess[str]:
    """Import images of the user's own.

    Args:
        options: as of `program`.
    """
    declared = ["--dataset", data.name, "--user-data", data.to_json()]
    return program("fetch", *declared, "--output", output, **options)


def imported(data: UserData, output: Path) -> DataFolder:
    """What is imported of them."""
    done = import_own(data, output)
    assert done.returncode == 0, done.stderr
    folder = DataFolder.read(output)
    folder.refuse_changed("train", "test")
    return folder


def refused_import(data: UserData, output: Path) -> str:
    """The line with which their import is refused, without its beginning."""
    done = import_own(data, output)
    assert done.returncode == 1, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert len(last) <= 200
    assert "Traceback" not in done.stderr
    assert not (output / "manifest.json").exists()
    return last.removeprefix("fetch: ")


def shell(name: str, *arguments: object) -> str:
    """The same, as a line for a shell."""
    return shlex.join([sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, arguments)])


def committed(folder: Path, *paths: str) -> None:
    """Make a repository of a folder, with one commit of some paths, or of all."""
    git = ["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["add", *(paths or ["."])], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)


@dataclass(frozen=True)
class MakesFolder:
    """Makes a folder when it is unpickled."""

    path: Path | str

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def in_namespace(line: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in a mount namespace of its own, as its root, whose number is 0.

    Args:
        options: of `subprocess.run`.
    """
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", line]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def train_command(
    run: str, data: object, output: object, *options: object, scripts: Path = SCRIPTS
) -> list[str]:
    """train.py with its arguments, as it follows `--` of launch.py.

    Args:
        run: as JSON.
    """
    where = ["--data", data, "--output", output]
    return list(map(str, [scripts / "train.py", "--run", run, *where, *options]))


# A run.json of a program.
ABOUT = {
    "config": {"lr": 0.1}, "git": {"commit": None, "dirty": None}, "files": {"a": "0" * 64},
    "sources_sha256": "", "data_sha256": None, "files_sha256": None, "versions": {"python": "3"},
    "attempts": [{}], "incidents": [], "started": "", "ended": "", "seconds": 1,
    "directory": None, "outputs": ["a"],
}  # fmt: skip


def finished(
    folder: Path,
    keys: Mapping[str, Any],
    numbers: Sequence[Mapping[str, Any]],
    abouts: Sequence[Mapping[str, Any]] = ({},),
    evaluations: Sequence[Mapping[str, Any]] = (),
    metrics: Sequence[str] = ("",),
) -> Path:
    """The results of an experiment with a program whose first runs are finished; its folder.

    Args:
        keys: of the configuration, besides its name, that of the folder, and `program`.
        numbers: result.json of each finished run.
        abouts: what their run.json has otherwise than ABOUT, of each, or one of all.
        evaluations: evaluation.json, metrics: metrics.csv of each, or one of all.
    """
    config = {"experiment": folder.name, "program": "t.py", **keys}
    folder.mkdir()
    (folder / "experiment.json").write_text(json.dumps(config))
    each = [given if len(given) > 1 else [*given] * len(numbers)
            for given in (abouts, evaluations or [None], metrics)]  # fmt: skip
    runs = list(Experiment.from_config(config).runs.items())[: len(numbers)]
    for (name, run), found, other, evaluation, rows in zip(runs, numbers, *each, strict=True):
        written = {"metrics.csv": rows, "result.json": json.dumps(found)}
        sums = {file: hashlib.sha256(text.encode()).hexdigest() for file, text in written.items()}
        about = ABOUT | {"config": json.loads(run.to_json()), "files": sums, "outputs": []} | other
        written["run.json"] = json.dumps(about)
        if evaluation is not None:
            written["evaluation.json"] = json.dumps(evaluation)
            both = {file: hashlib.sha256(written[file].encode()).hexdigest()
                    for file in ("run.json", "evaluation.json")}  # fmt: skip
            written["evaluated.json"] = json.dumps({"sources_sha256": "", "files": both})
        (folder / name).mkdir()
        for file, text in written.items():
            (folder / name / file).write_text(text)
    return folder
