"""Small trainings on the digits, started as a user would, and their results."""

import csv
import hashlib
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from classifier.models.classifier import Classifier, images_sums, moments, some
from classifier.states import state
from classifier.training import loop
from forked import Forked, run_ranks, server
from manynodes.data.folder import DataFolder
from manynodes.data.staging import stage
from manynodes.experiment.config import read_run
from manynodes.ranks.process_group import Process
from programs import SCRIPTS, train_command
from waiting import until

# About 0.2 s per epoch. 72 images can be divided among 1, 2 and 3 processes.
RUN = {
    "dataset": "digits",
    "widths": [8, 8, 8],
    "crop_size": 16,
    "epochs": 16,
    "global_batch_size": 72,
    "learning_rate": 0.5,
    "flip": False,
    "checkpoint_every": 4,
    # The same on every CPU.
    "precision": "fp32",
}
# Like a rank that a launch starts: direct and launched trainings must be equal.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SIMULATED = Path(__file__).with_name("simulated")
# By how ranks are connected: their environment. NCCL is simulated, see nccl_over_gloo.py.
CONNECTED = {"gloo": {}, "nccl": {"PYTHONPATH": str(SIMULATED)}}
# What rank 0 alone notices: by itself, and while another one waits for it as with NCCL.
ALONE_AND_NOT = pytest.mark.parametrize(
    ("processes", "environment"), [(1, CONNECTED["gloo"]), (2, CONNECTED["nccl"])], ids=[1, 2]
)


class Training:
    """A running training, on one process by itself or on several through `launch`.

    Args:
        options: of train.py.
        logs: folder for the logs of `launch`.
        launch: further options of `launch`.
        changes: to RUN.
    """

    def __init__(
        self,
        output: Path,
        data: Path,
        *options: object,
        processes: int = 1,
        environment: dict[str, str] | None = None,
        scripts: Path = SCRIPTS,
        logs: Path | None = None,
        launch: Sequence[object] = (),
        **changes: object,
    ) -> None:
        self.output = output
        run = RUN | {"nproc_per_node": processes} | changes
        train = train_command(json.dumps(run), data, output, *options, scripts=scripts)
        self.logs = logs or output.with_name(f"{output.name}.logs")
        where = ["--log", self.logs / "log", "--rank-logs", self.logs / "ranks"]
        start = [scripts / "launch.py", "--nproc-per-node", processes, *where, *launch, "--"]
        command = list(map(str, [*start, *train] if processes > 1 else train))
        self.process: subprocess.Popen[bytes] | Forked
        if processes == 1 and not environment:
            self.process = server().start(command, None, os.environ | ONE_THREAD, merged=True)
        else:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | ONE_THREAD | (environment or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.bytes = b""

    @property
    def said(self) -> str:
        """Its output so far."""
        assert self.process.stdout is not None
        self.bytes += self.process.stdout.read() or b""
        return self.bytes.decode()

    @property
    def epochs(self) -> list[int]:
        """The epochs that it has printed, in order."""
        return [
            int(number) for number in re.findall(r"^\S+: epoch (\d+)/", self.said, re.MULTILINE)
        ]

    def reach(self, epoch: int) -> None:
        """Wait until it has printed this epoch.

        Each line is read as it comes: four epochs of a small network passed between two questions
        of `until`, so that a signal found a training that had ended (measured).
        """
        while self.epochs[-1:] < [epoch] and self.process.poll() is None:
            select.select([self.process.stdout], [], [], 1)
        assert self.epochs[-1:] >= [epoch], self.said

    def await_start(self, what: str) -> list[int]:
        """Wait for a process with this command; returns their numbers."""
        until(lambda: self.find(what))
        return self.find(what)

    def end(self) -> int:
        """Wait until no process is left; returns its exit status."""
        until(lambda: self.said is not None and self.process.poll() is not None)
        until(lambda: not self.find(""))
        return self.process.returncode

    def find(self, what: str) -> list[int]:
        """Numbers of its processes with this command: a program of ours, or a module of torch's."""
        if isinstance(self.process, Forked):
            return [] if self.process.poll() is not None else [self.process.pid]
        # All processes of a launch have the arguments of train.py among their own.
        return [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if str(self.output) in (words := process.info["cmdline"] or [])
            and any(word.endswith(what) for word in words[1:3])
        ]


def complete_on_ranks(
    output: Path, data: Path, processes: int, *options: object, **changes: Any
) -> str:
    """Train to the end on several processes, without `launch`; returns what rank 0 printed."""
    run = RUN | {"nproc_per_node": processes} | changes
    return train_on_ranks(run, data, output, processes, *options)


def train_on_ranks(
    run: Mapping[str, object],
    data: Path,
    output: Path,
    processes: int,
    *options: object,
    cwd: Path | None = None,
) -> str:
    """The same of any run; a launched one, here or on a cluster, must be equal."""
    ranks = run_ranks(train_command(json.dumps(run), data, output, *options), processes, cwd)
    assert [rank.returncode for rank in ranks] == processes * [0], [rank.stdout for rank in ranks]
    return ranks[0].stdout


def complete(output: Path, data: Path, *options: object, **how: Any) -> Training:
    """Train to the end."""
    training = Training(output, data, *options, **how)
    assert training.end() == 0, training.said
    return training


def in_this_process(data: Path, **changes: Any) -> loop.Training:
    """A training that has not begun, on the CPU.

    Args:
        changes: to RUN.
    """
    run, folder = read_run(json.dumps(RUN | changes)), DataFolder.read(data)
    return loop.Training(run, Process(0, 0, 1, torch.device("cpu")), folder, stage(folder, []), "")


def fitted(classifier: Classifier, images: torch.Tensor) -> Classifier:
    """A network as a training begins it, with images (n, h, w, c)."""
    classifier.fit(*moments(images_sums(images), images), images[: some(images)])
    return classifier


def result(output: Path) -> dict[str, Any]:
    """Everything of a finished training that must not depend on interruptions."""
    files = [output / "model.safetensors", *sorted((output / "checkpoints").iterdir())]
    return {"rows": rows_of(output)} | {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def rows_of(output: Path) -> list[dict[str, str]]:
    with (output / "metrics.csv").open() as file:
        return [
            {key: row[key] for key in row if key not in ("seconds", "images_per_second")}
            for row in csv.DictReader(file)
        ]


def attempts(output: Path) -> list[dict[str, Any]]:
    return json.loads((output / "run.json").read_text())["attempts"]


def newest_place(output: Path) -> tuple[int, int]:
    """Epoch and step of the newest valid state."""
    whole = [state.read(path)[0] for path, _ in state.states(output / "state")]
    return (whole[0].epoch, whole[0].step) if whole else (0, 0)
