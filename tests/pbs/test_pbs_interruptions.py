"""Trainings on a real OpenPBS and over ssh that lose a node, the network, the server or their time.

With `-s` they print the rows of docs/failures.md.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

import sleeping
from checkout import PbsCheckout
from cluster.handle import PbsCluster
from launched import Launched, left
from pausing import paused, ranks_of
from submissions import cheap, sha256
from trainings import train_on_ranks
from waiting import until, until_none

pytestmark = pytest.mark.faults
# More than pass before the last fault.
EPOCHS = 30
RUN = {
    **sleeping.FEW_STEPS, "epochs": EPOCHS, "learning_rate": 0.01, "optimizer": "sgd",
    "weight_decay": 0.0013, "flip": False, "cpus_per_proc": 1, "nodes": 2,
    # Those of the quickstart otherwise, which Snakemake takes as a base.
    "checkpoint_every": 0, "widths": [8, 8, 8],
}  # fmt: skip
TRAINING = ["--config", "dataset={name: digits}", 'scratch=["/scratch"]',
            *(f"{key}={value if isinstance(value, str) else json.dumps(value)}"
              for key, value in RUN.items())]  # fmt: skip


class Submitted:
    """A training on two nodes through Snakemake; ended with the test."""

    def __init__(self, checkout: PbsCheckout, name: str, *options: str) -> None:
        self.cluster = checkout.cluster
        self.results = checkout.path / f"results/{name}/run"
        self.said = checkout.path / f"{name}.out"
        with self.said.open("w") as out:
            self.process = checkout.start(
                *TRAINING, f"experiment={name}", *options, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def text(self) -> str:
        return self.said.read_text()

    @property
    def epochs(self) -> int:
        path = self.results / "metrics.csv"
        return len(path.read_text().splitlines()) - 1 if path.exists() else 0

    @property
    def job(self) -> str:
        """The id of its last job."""
        return re.findall(r"pbs: job (\d+\.login), stage and train", self.text)[-1]

    @property
    def hosts(self) -> list[str]:
        """The nodes of its last job, as Snakemake has shown them."""
        return re.findall(r"stage and train .*: runs on (.*)", self.text)[-1].split(", ")

    def go_on(self, epochs: int = 5) -> None:
        """Wait for so many more epochs."""
        before = self.epochs
        until(lambda: self.epochs >= before + epochs, self.process)

    def paused(self) -> AbstractContextManager[None]:
        return paused(ranks_of(self.cluster, f"results/{self.results.parent.name}/"))

    def end(self) -> int:
        return self.process.wait()


@pytest.fixture
def submitted(checkout: PbsCheckout) -> Iterator[Callable[..., Submitted]]:
    started = []

    def start(name: str, *options: str) -> Submitted:
        started.append(Submitted(checkout, name, *options))
        return started[-1]

    yield start
    for training in started:
        if training.process.poll() is None:
            training.process.send_signal(signal.SIGINT)
            training.process.wait()


@pytest.fixture(scope="module")
def whole(checkout: PbsCheckout) -> Path:
    """The same training left alone, on this machine."""
    output = checkout.path / "results/whole/run"
    data = checkout.path / "results/data/digits"
    train_on_ranks(RUN | {"dataset": "digits"}, data, output, 2, cwd=checkout.path)
    return output


# Lost is lost for the agents, whichever way they were started.
@pytest.mark.parametrize(("how", "way"), [("kill", "pbs"), ("cut", "ssh")])
def test_a_lost_node_is_named_and_ends_the_training(
    cluster: PbsCluster,
    checkout: PbsCheckout,
    launched: Callable[..., Launched],
    how: str,
    way: str,
) -> None:
    training = launched(f"lost-{how}", way, options=("--launcher", "none"), waits=True)
    training.trains()
    getattr(cluster, how)("n3")
    try:
        seconds = until(lambda: "status " in training.text)
        rest = until_none(lambda: left(checkout))
    finally:
        cluster.start("n3")
    print(f"n3 {how} by {way}: told after {seconds:.0f} s, over after {seconds + rest:.0f} s")
    assert re.search(r"launch: train failed: n3 is lost: it has not answered", training.text)


def test_a_training_longer_than_its_walltime_continues_in_another_job(
    submitted: Callable[..., Submitted], whole: Path
) -> None:
    """Three minutes, of which the last is kept for the end. PBS gives no warning before the end,
    and a user cannot requeue.
    """
    training = submitted("walltime", "--set-resources", "stage:runtime=1", "train:runtime=2")
    until(lambda: ": runs on " in training.text, training.process)
    start = time.monotonic()
    # Almost to the end, so that few jobs more are needed.
    until(lambda: training.epochs >= EPOCHS - 5 or time.monotonic() > start + 100, training.process)
    with training.paused():
        time.sleep(max(0, start + 125 - time.monotonic()))
    assert training.end() == 0, training.text
    continued = re.findall(r"it continues as job", training.text)
    print(f"walltime: {len(continued)} more jobs, no epoch trained twice")
    assert continued
    assert sha256(training.results / "model.safetensors") == sha256(whole / "model.safetensors")


@pytest.mark.parametrize("which", ["first", "other"])
def test_after_a_lost_node_the_same_command_continues(
    cluster: PbsCluster, submitted: Callable[..., Submitted], whole: Path, which: str
) -> None:
    training = submitted(f"{which}-killed", "--until", "train")
    training.go_on()
    node = training.hosts[0 if which == "first" else 1]
    cluster.kill(node)
    done = training.epochs
    try:
        seconds = until(lambda: training.epochs > done + 1)
        assert training.end() == 0, training.text
    finally:
        cluster.start(node)
    print(f"{which} node killed: trains again after {seconds:.0f} s")
    assert sha256(training.results / "model.safetensors") == sha256(whole / "model.safetensors")


def test_over_ssh_the_first_node_loses_power(
    cluster: PbsCluster, checkout: PbsCheckout, whole: Path
) -> None:
    """Snakemake runs there, so it ends too, and the same command continues."""
    over_ssh = [
        sys.executable, "-m", "snakemake", "--profile", "profiles/ssh", "--cores", "2", *TRAINING,
        "hosts=[n1, n2]", "experiment=dark", "--until", "train",
    ]  # fmt: skip
    results = checkout.path / "results/dark/run"
    history = results / "metrics.csv"
    with (checkout.path / "dark.out").open("w") as out:
        process = cluster.popen(*over_ssh, node="n1", cwd=checkout.path, stdout=out, stderr=out)
        until(lambda: history.exists() and len(history.read_text().splitlines()) > 5)
        cluster.kill("n1")
        assert process.wait() != 0
    try:
        seconds = until_none(lambda: left(checkout))
    finally:
        cluster.start("n1")
    print(f"first node of ssh: the other node's ranks have ended after {seconds:.0f} s")
    for command in ([*over_ssh, "--unlock"], over_ssh):
        done = cluster.run(*command, node="n1", cwd=checkout.path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((results / "run.json").read_text())["attempts"]) == 2
    assert sha256(results / "model.safetensors") == sha256(whole / "model.safetensors")


def test_a_restarted_server_and_a_suspension_cost_no_job(
    cluster: PbsCluster, submitted: Callable[..., Submitted], whole: Path
) -> None:
    """PBS stops the sessions that it has started; torchrun's ranks have sessions of their own."""
    training = submitted("server", "--until", "train")
    training.go_on()
    with training.paused():
        stopped = cluster.run("qterm", "-t", "quick", as_root=True)
        assert stopped.returncode == 0, stopped.stderr
        until(lambda: "no job states" in training.text)
    training.go_on()
    cluster.start_daemon("/opt/pbs/sbin/pbs_server")
    with training.paused():
        until(lambda: "job states again" in training.text, training.process)
    ranks = [psutil.Process(pid) for pid in ranks_of(cluster, "results/server/")]
    assert len(ranks) == 2
    # A server that has just begun may not have found the node yet.
    suspend = ("qsig", "-s", "suspend", training.job)
    until(lambda: cluster.run(*suspend, as_root=True).returncode == 0, training.process)
    until(lambda: {rank.status() for rank in ranks} == {psutil.STATUS_STOPPED}, training.process)
    done = training.epochs
    until(lambda: "is suspended" in training.text, training.process)
    assert training.epochs == done
    assert cluster.run("qsig", "-s", "resume", training.job, as_root=True).returncode == 0
    assert training.end() == 0, training.text
    assert sha256(training.results / "model.safetensors") == sha256(whole / "model.safetensors")


def test_a_deleted_job_saves_and_is_told(
    cluster: PbsCluster, checkout: PbsCheckout, submitted: Callable[..., Submitted]
) -> None:
    training = submitted("deleted", "epochs=2000")
    training.go_on()
    job = training.job
    assert cluster.run("qdel", job).returncode == 0
    seconds = until_none(lambda: left(checkout))
    assert training.end() == 1
    print(f"qdel: over on all nodes after {seconds:.0f} s")
    assert re.search(r"launch: .*stopped \(SIGTERM\) after .*saved in ", training.text)
    assert re.search(rf"pbs: job {job}, .*: was deleted \(qdel\)", training.text)
    # The program itself cannot know why it was stopped.
    why = re.escape(f"; PBS job {job} was deleted (qdel); log: ")
    assert re.search(f"/run: not finished: train: .*stopped .*{why}", training.text), training.text


def test_ctrl_c_deletes_the_jobs(cluster: PbsCluster, checkout: PbsCheckout) -> None:
    script = 'touch "$LAUNCH_RESULTS/begun $RANK"; exec sleep 1000'
    snakemake = checkout.start(*cheap(checkout, script), "nodes=2", "experiment=interrupted",
                               stderr=subprocess.PIPE)  # fmt: skip
    work = checkout.path / "results/interrupted/run/work"
    until(lambda: len(list(work.glob("begun *"))) == 2, snakemake)
    snakemake.send_signal(signal.SIGINT)
    assert any("Terminating processes on user request" in line for line in snakemake.stderr)
    for _ in range(2):
        time.sleep(0.2)
        snakemake.send_signal(signal.SIGINT)
    said = snakemake.communicate()[1]
    assert snakemake.returncode == 1
    assert "Traceback" not in said
    until_none(lambda: left(checkout))
    until(lambda: not cluster.jobs())


def test_a_job_that_a_killed_snakemake_has_left_in_the_queue_is_refused(
    cluster: PbsCluster, checkout: PbsCheckout
) -> None:
    def change(started: bool) -> None:
        cluster.configure(f"set queue workq started = {started}")

    command = [*cheap(checkout), "experiment=queued"]
    record = checkout.path / "results/queued/jobs.json"
    change(False)
    try:
        snakemake = checkout.start(*command, stderr=subprocess.DEVNULL)
        # Long before the first query.
        until(record.exists, snakemake)
        snakemake.kill()
        snakemake.wait()
        job = json.loads(record.read_text())["run"]["job"]
        checkout.run("--unlock", *command)
        left = (f"job {job} (run) of an earlier command is still in the queue: qdel {job}, then "
                "run the same command again")  # fmt: skip
        for _ in range(2):
            done = checkout.snakemake(*command)
            assert done.returncode == 1
            assert done.stdout.splitlines()[-1] == left
        assert list(cluster.jobs()) == [job]
        assert cluster.run("qdel", job).returncode == 0
    finally:
        change(True)
    checkout.run(*command)


@pytest.mark.parametrize("status", [0, 1])
def test_a_start_file_that_ends_the_shell_of_a_job_is_named(
    cluster: PbsCluster, checkout: PbsCheckout, status: int
) -> None:
    profile = Path(cluster.run("sh", "-c", "echo ~").stdout.strip(), ".bash_profile")
    cluster.run("sh", "-c", f"echo exit {status} > {profile}")
    try:
        done = checkout.snakemake(*cheap(checkout), "experiment=ended", "--latency-wait", "2")
    finally:
        cluster.run("rm", str(profile))
    assert done.returncode == 1
    assert re.search(
        r"ended/run: not finished: PBS job \S+ (has ended|ended with status 1); it did not reach "
        r"its script: does a start file of your shell \(~/.bash_profile\) end it on the node\?",
        done.stdout,
    ), done.stdout


def test_without_job_history_the_job_s_own_status_counts(
    cluster: PbsCluster, checkout: PbsCheckout
) -> None:
    def history(value: bool) -> None:
        cluster.configure(f"set server job_history_enable = {value}")

    history(False)
    try:
        checkout.run(*cheap(checkout), "experiment=nohistory")
        failing = checkout.snakemake(*cheap(checkout), "experiment=bad", "parameters={status: 1}")
    finally:
        history(True)
    assert failing.returncode == 1
    assert "ended with status 1" in failing.stdout


def test_jobs_beyond_a_limit_are_submitted_when_others_have_ended(
    cluster: PbsCluster, checkout: PbsCheckout
) -> None:
    cluster.configure("set server max_queued = [u:PBS_GENERIC=1]")
    try:
        said = checkout.run(*cheap(checkout), "seed=[0, 1]", "experiment=limited")
    finally:
        cluster.configure("unset server max_queued")
    assert said.count("; jobs are submitted when others have ended") == 1, said
    assert len(list((checkout.path / "results/limited").glob("*/result.json"))) == 2
