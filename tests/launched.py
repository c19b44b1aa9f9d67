"""A training that `launch` starts on nodes of the PBS cluster: in a job, or over ssh."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import sleeping
from checkout import PbsCheckout
from cluster.handle import PbsCluster
from waiting import until

NODES = ("n1", "n2", "n3")
WAYS = ("pbs", "ssh")
RUN = {
    "dataset": "digits", "model": sleeping.MODEL, "optimizer": "sgd", "epochs": 1_000_000,
    "global_batch_size": 72, "learning_rate": 0.01, "flip": False, "checkpoint_every": 0,
}  # fmt: skip
WAITS = """
import os, pathlib, sys, time
rank = os.environ.get("RANK", os.environ["LAUNCH_NODE_RANK"])
pathlib.Path(sys.argv[1], f"begun-{rank}").touch()
time.sleep(10_000)
"""
# sshd waits for minutes for a client that was cut off.
DAEMONS = re.compile(r"pbs_mom|^sshd: |node\.py")


class Launched:
    """A training, endless unless told otherwise.

    Args:
        way: pbs or ssh.
        changes: of the run.
        options: of launch.
        program: instead of the training, with its arguments.
        waits: instead of the training, a program of the same name that needs no torch.
        nodes: how many, n1 first.
    """

    def __init__(
        self, cluster: PbsCluster, checkout: PbsCheckout, name: str, way: str,
        changes: Mapping[str, object] = {}, options: tuple[str, ...] = (),
        program: tuple[str, ...] = (), waits: bool = False, nodes: int = len(NODES),
    ) -> None:  # fmt: skip
        self.cluster, self.way, self.job = cluster, way, ""
        self.nodes = NODES[:nodes]
        folder = f"results/{name}-{way}/run"
        self.results = checkout.path / folder
        self.results.mkdir(parents=True)
        cluster.give(self.results.parent)
        self.said = self.results / "said"
        run = json.dumps(RUN | dict(changes) | {"nodes": nodes})
        training = (
            "workflow/scripts/train.py", "--run", run, "--data", "results/data/digits", "--scratch",
            "/scratch", "--output", folder,
        )  # fmt: skip
        if waits:
            waiting = self.results / "train.py"
            waiting.write_text(WAITS)
            program = (str(waiting), str(self.results))
        hosts = ("--hosts", *self.nodes) if way == "ssh" else ()
        launch = [
            sys.executable, "workflow/scripts/launch.py", "--transport", way, *hosts, "--nodes",
            str(nodes), "--log", f"{folder}/train.log", "--rank-logs", f"{folder}/logs", "--state",
            f"{folder}/state", *options, "--", *(program or training),
        ]  # fmt: skip
        self.script = self.results / "job.sh"
        lines = [
            "#!/bin/bash",
            f"cd {shlex.quote(str(checkout.path))}",
            f"exec >>{shlex.quote(str(self.said))} 2>&1",
            "trap : TERM",
            shlex.join(launch),
            "status=$?",
            "echo status $status",
            "exit $status",
        ]
        self.script.write_text("\n".join(lines) + "\n")
        self.start()

    def start(self) -> None:
        if self.way != "pbs":
            self.process = self.cluster.popen("bash", self.script, node="n1")
            return
        chunks = "+".join(f"1:ncpus=1:host={node}" for node in self.nodes)
        size = ["-l", f"select={chunks}", "-l", "place=scatter", "-l", "walltime=600"]
        with self.script.open() as script:
            done = subprocess.run(
                [*self.cluster.inside(), "qsub", *size, "-o", "/dev/null", "-j", "oe", "-r", "y"],
                stdin=script, env=self.cluster.environment(), capture_output=True, text=True,
                check=False,
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.strip()

    def trains(self) -> None:
        """Wait until it has trained an epoch, or all of its ranks wait."""
        until(
            lambda: (
                (self.results / "metrics.csv").exists()
                or len(list(self.results.glob("begun-*"))) == len(self.nodes)
                or "status " in self.text
            )
        )
        assert "status " not in self.text, self.text

    @property
    def text(self) -> str:
        return self.said.read_text() if self.said.exists() else ""

    def ranks(self, node: str) -> list[int]:
        return self.find(node, "train")

    def find(self, node: str, program: str) -> list[int]:
        """Processes of Python on a node that run one of the programs, whose path has a blank."""
        return [
            pid
            for pid, line in self.cluster.processes(node).items()
            if re.match(rf"\S*python\S* ((?!\.py).)*{re.escape(program)}\.py( |$)", line)
        ]

    def stop(self) -> None:
        """End it as a user would."""
        if self.job:
            self.cluster.run("qdel", self.job)
            return
        for pid in self.find("n1", "launch"):
            os.kill(pid, signal.SIGTERM)
        self.process.wait()


def left(checkout: PbsCheckout) -> dict[int, str]:
    """Processes of jobs and of ssh sessions of this checkout on all nodes."""
    found = checkout.cluster.left(checkout.path.parent)
    return {pid: line for pid, line in found.items() if line and not DAEMONS.search(line)}


# What three ranks leave in the folder of their logs.
LOGS = ["launcher.log", "rank=0.log", "rank=1.log", "rank=2.log", "train.log"]


def logs_in(results: Path) -> list[str]:
    return sorted(path.name for path in (results / "logs").iterdir())
