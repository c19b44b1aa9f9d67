"""Failures on a real Slurm: what ends, when, with which message, and that nothing stays."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sleeping
from checkout import SlurmCheckout
from cluster.handle import Cluster
from launched import WAITS
from programs import program, train_command
from submissions import TINY, cheap, on, submitted
from waiting import until, until_none

# Seconds that ranks wait for one that hangs.
HUNG = 15
ENDLESS = [
    "--config",
    "dataset={name: digits}",
    *(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in sleeping.FEW_STEPS.items()
    ),
    "optimizer=sgd",
    "epochs=1000000",
    "learning_rate=0.01",
    "flip=false",
    "cpus_per_proc=1",
    "checkpoint_every=0",
    'scratch=["/scratch"]',
    "nodes=2",
    "save_every_epochs=1000000",
]
# A fault that needs no training: a program of the same name waits, without torch.
WAITING = "launcher-killed"
# Their ranks are started by Slurm's tasks. The others show how torchrun ends, whose agents take
# three CPU seconds on each node to import torch.
BY_TASKS = ("stops", "out-of-memory", "slow", "raises")
RUN = {
    **sleeping.FEW_STEPS,
    "dataset": "digits",
    "optimizer": "sgd",
    "epochs": 1_000_000,
    "learning_rate": 0.01,
    "flip": False,
    "checkpoint_every": 0,
    "nodes": 2,
}


def left(training: "Submitted | Launched") -> list[str]:
    """What there is of a training: its job, and its processes on all nodes."""
    cluster = training.cluster
    jobs = [job for job in cluster.jobs() if job == training.job]
    return [*jobs, *cluster.left(training.results.parent).values()]


class Submitted:
    """An endless training on two nodes through Snakemake.

    It saves nothing, so that it is not requeued after a failure.
    """

    def __init__(self, cluster: Cluster, checkout: SlurmCheckout, name: str, *options: str) -> None:
        self.cluster = cluster
        self.results = checkout.path / f"results/{name}/run"
        self.said = checkout.path / f"{name}.out"
        with self.said.open("w") as out:
            self.snakemake = checkout.start(
                *ENDLESS, f"experiment={name}", *options, stdout=out, stderr=subprocess.STDOUT
            )
        until((self.results / "metrics.csv").exists, self.snakemake)
        self.job = submitted(self.said.read_text())[0]

    def await_end(self) -> tuple[float, str]:
        """Seconds until nothing of the job is left on any node, and all that the user saw."""
        seconds = until_none(lambda: left(self))
        assert self.snakemake.wait() == 1
        return seconds, self.said.read_text()


class Launched:
    """The same through `launch` in a job script: Snakemake takes a minute to notice a job's end,
    and one fault shows what it says.
    """

    def __init__(
        self, cluster: Cluster, checkout: SlurmCheckout, name: str, **changes: object
    ) -> None:
        self.cluster = cluster
        self.status = 75 if name == "stops" else 1
        self.results = checkout.path / f"results/{name}/run"
        self.results.mkdir(parents=True)
        self.said = self.results / "job.out"
        data = checkout.path / "results/data/digits"
        done = program("fetch", "--dataset", "digits", "--output", data)
        assert done.returncode == 0, done.stderr
        folder = f"results/{name}/run"
        run = RUN | changes
        train = train_command(json.dumps(run), "results/data/digits", folder,
                              scripts=Path("workflow/scripts"))  # fmt: skip
        if name == WAITING:
            waiting = self.results / "train.py"
            waiting.write_text(WAITS)
            train = [str(waiting), str(self.results)]
        launch = [
            "workflow/scripts/launch.py", "--nodes", str(run["nodes"]),
            "--launcher", "srun" if name in BY_TASKS else "torchrun",
            "--log", f"{folder}/train.log", "--rank-logs", f"{folder}/logs",
            "--timeout", str(HUNG), "--", *train,
        ]  # fmt: skip
        script = self.results / "job.sh"
        script.write_text(f"#!/bin/bash\n{shlex.join([sys.executable, *launch])}\necho status $?\n")
        size = [f"--nodes={run['nodes']}", f"--ntasks={run['nodes']}"]
        done = cluster.run("sbatch", *size, f"--output={self.said}", script, cwd=checkout.path)
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.split()[-1]
        until(
            lambda: (
                (self.results / "metrics.csv").exists()
                or len(list(self.results.glob("begun-*"))) == run["nodes"]
                or self.job not in cluster.jobs()
            )
        )

    def await_end(self) -> tuple[float, str]:
        seconds = until_none(lambda: left(self))
        said = self.said.read_text()
        assert said.endswith(f"status {self.status}\n")
        return seconds, said


def send(number: signal.Signals) -> Callable[[Cluster], None]:
    """To the rank on n2."""
    return lambda cluster: os.kill(on(cluster, "n2", "/train.py")[0], number)


def exhaust(cluster: Cluster) -> None:
    """From now on the rank cannot allocate memory."""
    (rank,) = on(cluster, "n2", "/train.py")
    subprocess.run(["prlimit", f"--pid={rank}", "--as=1000000"], check=True)


def kill_launcher(cluster: Cluster) -> None:
    os.kill(on(cluster, "n2", "torchrun.py")[0], signal.SIGKILL)


FAULTS: dict[str, tuple[Callable[[Cluster], None], type[Submitted | Launched], str]] = {
    "killed": (
        send(signal.SIGKILL),
        Submitted,
        r"rank 1 on n2 was ended by SIGKILL; the system does that when memory runs out",
    ),
    "raises": (send(signal.SIGINT), Launched, r"rank 1 on n2: KeyboardInterrupt"),
    "stops": (
        send(signal.SIGTERM),
        Launched,
        r"rank 1 on n2 got SIGTERM; stopped \(SIGTERM\) after .*; saved in results/stops/run/state",
    ),
    # The name of the run contains the word too.
    "out of memory": (exhaust, Launched, r"rank 1 on n2: [^;]*([Mm]emory|alloc).*"),
    "hangs": (
        send(signal.SIGSTOP),
        Launched,
        r"rank 1 on n2 hung \(stopped by a signal, in \S+ \(\S+:\d+\)\), and the others waited "
        r"for it; its own log is results/hangs/run/logs/rank=1.log",
    ),
    "launcher killed": (kill_launcher, Launched, r"n2: .*Killed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_ends_the_job_and_is_named(
    cluster: Cluster, checkout: SlurmCheckout, fault: str
) -> None:
    name = fault.replace(" ", "-")
    do, way, error = FAULTS[fault]
    training = way(cluster, checkout, name)
    do(cluster)
    seconds, said = training.await_end()
    print(f"{fault}: over on all nodes {seconds:.1f} s later")
    last = [line for line in said.splitlines() if "launch: " in line]
    how = "was interrupted" if fault == "stops" else "failed"
    assert re.search(rf"launch: train {how}: {error}.*; see results/{name}/run/train.log", said), (
        last
    )
    assert re.match(
        rf"launch: {error}", (training.results / "train.log").read_text().splitlines()[-1]
    )
    if fault == "killed":
        # Snakemake shows the rule's log last, and this is its last line.
        assert re.search(rf"^    launch: {error}.*\n    =+\n", said, re.MULTILINE), last
    if fault == "raises":
        # Its beginning is left out if it is long.
        assert re.search(r"^.*rank 1 on n2 \|   File ", said, re.MULTILINE), last
    assert not (training.results / "model.safetensors").exists()
    assert (training.results / "logs/rank=1.log").exists()


def test_a_slow_host_is_named(cluster: Cluster, checkout: SlurmCheckout) -> None:
    training = Launched(
        cluster, checkout, "slow", model_args={"seconds": 0.12, "slow": "n2"}, nodes=3
    )
    log = training.results / "train.log"
    until(lambda: "n2 computes" in log.read_text() or training.job not in cluster.jobs())
    warnings = [line for line in log.read_text().splitlines() if "warning: n" in line]
    cluster.cancel([training.job])
    until_none(lambda: left(training))
    assert len(warnings) == 1
    assert re.search(r"train: warning: n2 computes \d+\.\d times slower", warnings[0])


@pytest.mark.faults
def test_a_slow_link_is_named_in_log_results_and_report(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    cluster.throttle("n2")
    try:
        checkout.run(*TINY, "nodes=3", "launcher=srun", "probe=true", "experiment=link")
    finally:
        cluster.join("n2")
    results = checkout.path / "results/link"
    line = r"n2 is \d+\.\d times slower than the median of the nodes: link bytes \S+ per second"
    log = (results / "run/train.log").read_text()
    print(*[text for text in log.splitlines() if "probe" in text], sep="\n")
    assert re.search(f"train: warning: probe: {line}$", log, re.MULTILINE)
    # On a loaded machine, its processors may be named too.
    assert not re.search("probe: n[13] is .* link", log)
    about = json.loads((results / "run/run.json").read_text())
    rates = {node["host"]: node["link_bytes_per_second"] for node in about["probe"]["nodes"]}
    assert rates["n2"] < min(rates["n1"], rates["n3"]) / 2
    assert any(re.fullmatch(f"probe: {line}", each["text"]) for each in about["incidents"])
    page = (results / "report.html").read_text()
    assert "Interruptions and slow nodes" in page
    assert re.search(f"<td>probe: {line}</td>", page)


def test_ctrl_c_cancels_the_jobs(cluster: Cluster, checkout: SlurmCheckout) -> None:
    script = 'touch "$LAUNCH_RESULTS/begun $RANK"; exec sleep 1000'
    options = [*cheap(checkout, script), "nodes=3", "experiment=interrupted"]
    said = checkout.path / "interrupted.out"
    with said.open("w") as out:
        snakemake = checkout.start(*options, stdout=out, stderr=subprocess.STDOUT)
    work = checkout.path / "results/interrupted/run/work"
    until(lambda: len(list(work.glob("begun *"))) == 3, snakemake)
    (job,) = submitted(said.read_text())
    snakemake.send_signal(signal.SIGINT)
    until_none(lambda: [*({job} & set(cluster.jobs())), *cluster.left(work.parents[1]).values()])
    assert snakemake.wait() == 1
    assert job_state(cluster, job).startswith("CANCELLED")


def test_a_cancelled_job_leaves_nothing_and_nobody_waits_for_it(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    training = Submitted(cluster, checkout, "cancelled", "launcher=srun")
    assert cluster.run("scancel", training.job).returncode == 0
    _, said = training.await_end()
    assert job_state(cluster, training.job).startswith("CANCELLED")
    saved = "saved in results/cancelled/run/state"
    assert re.search(
        (
            rf"launch: stopped \(SIGTERM\) after .*; {saved}; the reason: sacct -X -j "
            rf"{training.job}; run the same command again"
        ),
        said,
    )


def job_state(cluster: Cluster, job: str) -> str:
    (state,) = cluster.ask(
        "sacct", "-X", "--noheader", "--parsable2", f"--jobs={job}", "--format=State"
    ).stdout.splitlines()
    return state


@pytest.mark.parametrize(("launcher", "nodes"), [("none", 1), ("torchrun", 2)])
def test_an_end_that_slurm_has_not_seen_is_no_good_end(
    cluster: Cluster, checkout: SlurmCheckout, launcher: str, nodes: int
) -> None:
    """It has lost touch with all nodes of a step: srun ends with 0, and the processes live on."""
    folder = checkout.path / f"results/unseen-{launcher}"
    folder.mkdir(parents=True)
    waiting, script, said = folder / "waits.py", folder / "job.sh", folder / "job.out"
    waiting.write_text(WAITS)
    launch = [
        sys.executable, "workflow/scripts/launch.py", "--nodes", str(nodes), "--launcher", launcher,
        "--log", str(folder / "log"), "--", str(waiting), str(folder),
    ]  # fmt: skip
    script.write_text(f"#!/bin/bash\n{shlex.join(launch)}\necho status $?\n")
    hosts = [f"n{number + 1}" for number in range(nodes)]
    size = [f"--nodelist={','.join(hosts)}", f"--ntasks={nodes}", "--no-requeue"]
    done = cluster.run("sbatch", *size, f"--output={said}", script, cwd=checkout.path)
    assert done.returncode == 0, done.stderr
    until(lambda: len(list(folder.glob("begun-*"))) == nodes)
    daemons = [
        pid
        for host in hosts
        for pid, line in cluster.processes(host).items()
        if line.endswith("slurmd -D")
    ]
    assert len(daemons) == nodes
    for pid in daemons:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: "status " in said.read_text())
        assert any("waits.py" in line for line in cluster.left(folder).values())
    finally:
        for pid in daemons:
            os.kill(pid, signal.SIGCONT)
    until_none(lambda: cluster.left(folder))
    until(lambda: not cluster.out_of_service())
    unknown = rf"it is not known how {nodes} of {nodes} processes ended: Node failure on n[12]"
    assert re.search(rf"launch: waits failed: {unknown}; see .*\nstatus 1\n", said.read_text()), (
        said.read_text()
    )
    assert json.loads((folder / "failure.json").read_text())["kind"] == "lost"
