"""Trainings on a real Slurm that are interrupted like on any cluster.

Each resumes, ends with the weights of an uninterrupted one, and loses at most the work since its
last save. With `-s` it prints the table of docs/failures.md.
"""

import csv
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import sleeping
from checkout import SlurmCheckout
from cluster.handle import Cluster
from pausing import ranks_of, slowed
from programs import program
from submissions import on, sha256, submitted
from trainings import train_on_ranks
from waiting import until

SEED = 20261121
# More than pass between the faults.
EPOCHS = 45
HUNG = 15  # seconds that ranks wait for each other
KEPT = 15
RUN = {
    **sleeping.FEW_STEPS,
    "dataset": "digits",
    "widths": [8, 8, 8],
    "epochs": EPOCHS,
    "learning_rate": 0.01,
    "flip": False,
    "checkpoint_every": KEPT,
    "optimizer": "sgd",
    "weight_decay": 0.0013,
}


pytestmark = pytest.mark.faults

RANK, AGENT, LAUNCH = (
    "workflow/scripts/train.py",
    "torchrun.py",
    "workflow/scripts/launch.py",
)


class Training:
    """The progress of a training in its folder, and its current Slurm job."""

    def __init__(self, cluster: Cluster, results: Path, job: str = "") -> None:
        self.cluster, self.results, self.id = cluster, results, job

    @property
    def state(self) -> str:
        return self.cluster.run(
            "squeue", "--noheader", f"--jobs={self.id}", "--format=%T"
        ).stdout.strip()

    @property
    def hosts(self) -> list[str]:
        """The nodes of the running job."""
        listed = self.cluster.run(
            "squeue", "--noheader", f"--jobs={self.id}", "--states=RUNNING", "--format=%N"
        ).stdout.strip()
        return (
            self.cluster.run("scontrol", "show", "hostnames", listed).stdout.split()
            if listed
            else []
        )

    @property
    def epochs(self) -> list[dict[str, str]]:
        """The rows of metrics.csv without the times."""
        try:
            with (self.results / "metrics.csv").open() as file:
                rows = list(csv.DictReader(file))
        except FileNotFoundError:
            return []
        return [
            {
                key: value
                for key, value in row.items()
                if key not in ("seconds", "images_per_second")
            }
            for row in rows
        ]

    @property
    def attempts(self) -> list[dict]:
        return json.loads((self.results / "run.json").read_text())["attempts"]

    def go_on(self, epochs: int, *starts: subprocess.Popen) -> int:
        """Wait for so many more epochs, see `until`; returns the number of epochs."""
        before = len(self.epochs)
        until(lambda: len(self.epochs) >= before + epochs, *starts)
        return len(self.epochs)

    def find(self, what: str) -> list[int]:
        return [pid for node in self.cluster.nodes for pid in on(self.cluster, node, what)]


def fetched(checkout: SlurmCheckout) -> Path:
    """The data folder."""
    data = checkout.path / "results/data/digits"
    done = program("fetch", "--dataset", "digits", "--output", data)
    assert done.returncode == 0, done.stderr
    return data


class Job(Training):
    """A training in its own job, submitted with sbatch."""

    def __init__(
        self,
        cluster: Cluster,
        checkout: SlurmCheckout,
        name: str,
        nodes: int = 2,
        more: Mapping[str, object] = {},
        setup: str = "",
        launcher: str = "torchrun",
    ) -> None:
        super().__init__(cluster, checkout.path / f"results/{name}/run")
        self.checkout, self.nodes = checkout, nodes
        self.results.mkdir(parents=True)
        data = fetched(checkout)
        output = f"results/{name}/run"
        train = [
            RANK,
            "--run",
            json.dumps(RUN | {"nodes": nodes} | more),
            "--data",
            str(data),
            "--output",
            output,
        ]
        launch = [
            LAUNCH,
            "--launcher",
            launcher,
            "--nodes",
            str(nodes),
            "--restart",
            "--timeout",
            str(HUNG),
            "--log",
            f"{output}/train.log",
            "--rank-logs",
            f"{output}/logs",
        ]
        self.script = self.results / "job.sh"
        self.script.write_text(
            f"#!/bin/bash\n{setup}\n{shlex.join([sys.executable, *launch])} --end-with $$ -- "
            f"{shlex.join(train)}\nexit $?\n"
        )
        self.submit()

    def submit(self) -> None:
        options = [
            f"--nodes={self.nodes}",
            f"--ntasks={self.nodes}",
            "--requeue",
            "--open-mode=append",
            "--parsable",
        ]
        done = self.cluster.run(
            "sbatch",
            *options,
            f"--output={self.results}/job.out",
            self.script,
            cwd=self.checkout.path,
        )
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    def await_end(self) -> None:
        until(lambda: (self.results / "run.json").exists())
        until(lambda: self.state in ("", "COMPLETED", "FAILED"))


Fault = Callable[[Training, random.Random], None]


def send(number: signal.Signals, what: str) -> Fault:
    def fault(job: Training, rng: random.Random) -> None:
        os.kill(rng.choice(job.find(what)), number)

    return fault


def send_to_script(number: signal.Signals) -> Fault:
    def fault(job: Training, _rng: random.Random) -> None:
        lines = {
            pid: line
            for node in job.cluster.nodes
            for pid, line in job.cluster.processes(node).items()
        }
        (script,) = [
            pid for pid, line in lines.items() if re.search(r"^/bin/bash \S*/slurm_script", line)
        ]
        os.kill(script, number)

    return fault


def ask(*command: str) -> Fault:
    def fault(job: Training, _rng: random.Random) -> None:
        done = job.cluster.run(*command, job.id)
        assert done.returncode == 0, done.stderr

    return fault


def restart_controller(job: Training) -> None:
    """Not an interruption: the job continues without the controller, which finds it again."""
    (controller,) = (
        pid for pid, line in job.cluster.processes().items() if line.startswith("slurmctld")
    )
    os.kill(controller, signal.SIGKILL)
    job.cluster.start_daemon("slurmctld")


def preempt(job: Training, _rng: random.Random) -> None:
    """A higher-priority job takes all nodes for three seconds."""
    done = job.cluster.run(
        "sbatch",
        "--partition=urgent",
        "--nodes=3",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 3",
    )
    assert done.returncode == 0, done.stderr


# In two trainings, each in random order: faults after which Slurm or launch restarts it, and faults
# that need the same command.
GROUPS: dict[str, tuple[bool, dict[str, Fault]]] = {
    "by itself": (False, {
        "a rank killed": send(signal.SIGKILL, RANK),
        "SIGTERM to torchrun": send(signal.SIGTERM, AGENT),
        "preempted": preempt,
        "scontrol requeue": ask("scontrol", "requeue"),
        "warned (--signal=USR1)": ask("scancel", "--signal=USR1"),
    }),
    "by hand": (True, {
        "launch killed": send(signal.SIGKILL, LAUNCH),
        "SIGTERM to launch": send(signal.SIGTERM, LAUNCH),
        "batch script killed": send_to_script(signal.SIGKILL),
        "SIGTERM to the batch script": send_to_script(signal.SIGTERM),
        "scancel": ask("scancel"),
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(cluster: Cluster, checkout: SlurmCheckout) -> Training:
    """An uninterrupted training, on this machine."""
    return left_alone(cluster, checkout, 2)


def left_alone(cluster: Cluster, checkout: SlurmCheckout, nodes: int) -> Training:
    output = checkout.path / f"results/whole-{nodes}/run"
    run = RUN | {"nodes": nodes}
    train_on_ranks(run, fetched(checkout), output, nodes, cwd=checkout.path)
    return Training(cluster, output)


def assert_same(job: Training, whole: Training) -> None:
    assert job.epochs == whole.epochs
    for file in (
        "model.safetensors",
        *(f"checkpoints/epoch={epoch:03}.safetensors" for epoch in range(KEPT, EPOCHS + 1, KEPT)),
    ):
        assert sha256(job.results / file) == sha256(whole.results / file), file


def tell(fault: str, seconds: float, before: int, resumed: dict[str, int]) -> None:
    """Print a row of the table; at most one interval, an epoch, was lost."""
    at = (
        f"resumed after epoch {resumed['epoch']}, step {resumed['step']}; before, epoch "
        f"{before} was finished"
    )
    print(f"| {fault} | training again after {seconds:.0f} s | {at} |")
    assert before - resumed["epoch"] <= 1


@pytest.mark.parametrize("group", GROUPS)
def test_whatever_ends_a_job_its_training_goes_on(
    cluster: Cluster, checkout: SlurmCheckout, whole: Training, group: str
) -> None:
    by_hand, faults = GROUPS[group]
    rng = random.Random(f"{SEED}-{group}")
    # The other launcher too, and its ranks start without an agent of torchrun's.
    launcher = "srun" if by_hand else "torchrun"
    job = Job(cluster, checkout, group.replace(" ", "-"), launcher=launcher)
    done = []
    job.go_on(1)
    restart_controller(job)
    for name in rng.sample(list(faults), len(faults)):
        before = job.go_on(3)
        time.sleep(rng.uniform(0, 0.5))
        faults[name](job, rng)
        start = time.monotonic()
        if by_hand:
            until(lambda: job.state not in ("RUNNING", "COMPLETING"))
            assert not (job.results / "model.safetensors").exists()
            job.submit()
        job.go_on(2)
        done.append((name, time.monotonic() - start, before))
    job.await_end()
    assert_same(job, whole)
    assert len(job.attempts) == len(faults) + 1, job.attempts
    for (name, seconds, before), attempt in zip(done, job.attempts[1:], strict=True):
        tell(name, seconds, before, attempt["from"])


def test_a_job_that_is_suspended_for_longer_than_its_ranks_wait_continues(
    cluster: Cluster, checkout: SlurmCheckout, whole: Training
) -> None:
    job = Job(cluster, checkout, "suspended", launcher="srun")
    job.go_on(3)
    assert cluster.run("scontrol", "suspend", job.id).returncode == 0
    time.sleep(HUNG + 15)
    before = len(job.epochs)
    assert cluster.run("scontrol", "resume", job.id).returncode == 0
    start = time.monotonic()
    job.go_on(1)
    print(f"| suspended | training again {time.monotonic() - start:.0f} s after it was resumed |")
    job.await_end()
    assert_same(job, whole)
    assert all(attempt["from"]["epoch"] >= before - 1 for attempt in job.attempts[1:])


def test_a_node_that_trains_on_while_it_is_cut_off_gives_way(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    """Its storage still within reach, it does not notice; Slurm has given it up and begins the job
    anew elsewhere.
    """
    alone = left_alone(cluster, checkout, 1)
    job = Job(cluster, checkout, "cut", 1)
    job.go_on(3)
    (node,) = job.hosts
    (rank,) = ranks_of(cluster, "results/cut/")
    before, start = len(job.epochs), time.monotonic()
    cluster.cut(node)
    # Slurm needs most of a minute.
    with slowed([rank], 0.05):
        until(lambda: job.hosts and job.hosts != [node])
        assert Path(f"/proc/{rank}").exists()
    until(lambda: not Path(f"/proc/{rank}").exists())
    log = (job.results / "state" / "owner.json").read_text()
    assert json.loads(log)["host"] != node
    job.go_on(2)
    seconds = time.monotonic() - start
    # Slurm asks a node that has been away for long only now and then whether it is back; one that
    # starts says so.
    cluster.kill(node)
    cluster.start(node)
    job.await_end()
    assert_same(job, alone)
    print(
        f"| node cut, rank 0 on it | training elsewhere after {seconds:.0f} s | at epoch {before} "
        "when it was cut |"
    )


def config(name: str, nodes: int, **more: object) -> list[str]:
    """The same run through Snakemake."""
    science = (
        RUN
        | {"dataset": "{name: digits}", "nodes": nodes, "cpus_per_proc": 1, "experiment": name}
        | more
    )
    return [
        "--config",
        *(
            f"{key}={json.dumps(value) if not isinstance(value, str) else value}"
            for key, value in science.items()
        ),
    ]


def test_a_limit_that_is_lowered_meanwhile_is_noticed(
    cluster: Cluster, checkout: SlurmCheckout, whole: Training
) -> None:
    """Three minutes, of which the last is kept for the end. `launch` asks once a minute. A busy
    controller requeues the job before it answers: the job still says why.
    """
    # Where the nodes see it.
    late = checkout.path / "late/scontrol"
    late.parent.mkdir()
    late.write_text(
        f'#!/bin/bash\n{shlex.quote(shutil.which("scontrol") or "")} "$@" || exit 1\n'
        '[ "$1" != requeue ] || sleep 3\n'
    )
    late.chmod(0o755)
    job = Job(cluster, checkout, "lowered", setup=f"export PATH='{late.parent}':$PATH")
    job.go_on(1)
    lowered = ["scontrol", "update", f"JobId={job.id}", "TimeLimit=3"]
    assert cluster.run(*lowered).returncode == 0
    # Slow enough to last, and fast enough for the ranks that wait for each other.
    with slowed(ranks_of(cluster, "results/lowered/"), 0.1):
        until(lambda: job.state != "RUNNING")
    job.await_end()
    assert_same(job, whole)
    assert len(job.attempts) == 2
    log = (job.results / "job.out").read_text()
    assert re.search(r"launch: train was interrupted: .*\(SIGUSR1\)", log), log


def test_snakemake_needs_no_help_when_jobs_make_way_and_nodes_die(
    cluster: Cluster, checkout: SlurmCheckout, whole: Training
) -> None:
    said = checkout.path / "survivor.out"
    with said.open("w") as out:
        snakemake = checkout.start(*config("survivor", 2), stdout=out, stderr=subprocess.STDOUT)
    training = Training(cluster, checkout.path / "results/survivor/run")
    training.go_on(3, snakemake)
    preempt(training, random.Random(SEED))
    until(lambda: len(training.epochs) == 0)
    before = training.go_on(12)
    training.id = submitted(said.read_text())[0]
    node = training.hosts[-1]
    cluster.kill(node)
    try:
        assert snakemake.wait() == 0, said.read_text()
    finally:
        cluster.start(node)
    assert_same(training, whole)
    assert len(training.attempts) == 3
    assert before - training.attempts[-1]["from"]["epoch"] <= 1
    assert len(submitted(said.read_text())) == 2
    assert not (training.results / "state").exists()


def test_a_snakemake_that_was_killed_finds_its_jobs_work(
    cluster: Cluster, checkout: SlurmCheckout, whole: Training
) -> None:
    said = checkout.path / "orphan.out"
    orphan = ["--until", "train", *config("orphan", 2)]
    with said.open("w") as out:
        snakemake = checkout.start(*orphan, stdout=out, stderr=subprocess.STDOUT)
    training = Training(cluster, checkout.path / "results/orphan/run")
    training.go_on(3, snakemake)
    snakemake.kill()
    snakemake.wait()
    training.id = submitted(said.read_text())[0]
    # On a loaded machine, Snakemake takes longer to ask than the training to end.
    with slowed(ranks_of(cluster, "results/orphan/"), 0.2):
        checkout.run("--unlock", *orphan)
        done = checkout.snakemake(*orphan)
    assert done.returncode == 1
    refused = f"results/orphan/run is being trained by Slurm job {training.id} on "
    assert refused in done.stdout, done.stdout
    assert not submitted(done.stdout)
    until(lambda: not training.hosts)
    checkout.run(*orphan)
    assert_same(training, whole)
    # Nothing of the first job was touched, and nothing is trained again.
    assert [attempt["from"]["epoch"] for attempt in training.attempts] == [0]
    assert (training.results / "train.log").read_text().count(f"epoch {EPOCHS}/{EPOCHS} ") == 1
    assert "epoch 1/" in (training.results / "train.log").read_text()
