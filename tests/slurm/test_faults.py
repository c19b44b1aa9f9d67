"""Failures on a real Slurm: what ends, how soon, what the user sees, and that nothing is left."""

import os
import re
import signal
import subprocess
from collections.abc import Callable

import pytest
from conftest import SlurmCheckout

from cluster.handle import Cluster
from waiting import until

# Seconds in which a job must be over on all nodes after a rank of it has failed.
LIMIT = 60
ENDLESS = ["--config", "dataset={name: digits}", "widths=[8, 8, 8]", "epochs=1000000", "global_batch_size=72", "learning_rate=0.01",
           "flip=false", "cpus_per_proc=1", "checkpoint_every=0", 'scratch=["/scratch"]', "nodes=3"]  # fmt: skip


def on(cluster: Cluster, node: str, program: str) -> list[int]:
    """Processes of a node that run a program, less those that only have it on their command line."""
    return [pid for pid, line in cluster.processes(node).items() if re.match(rf"\S*python\S* (-u |-m )?\S*{re.escape(program)}( |$)", line)]


def left(cluster: Cluster) -> list[str]:
    """What runs of any job on any node: all but the daemon and what holds the node."""
    lines = [line for node in cluster.nodes for line in cluster.processes(node).values()]
    return [line for line in lines if "slurmd -D" not in line and "node.py" not in line]


class Training:
    """An endless training on three nodes, under way."""

    def __init__(self, cluster: Cluster, checkout: SlurmCheckout, name: str, *arguments: str) -> None:
        self.cluster = cluster
        self.results = checkout.path / f"results/{name}/run"
        self.said = checkout.path / f"{name}.out"
        with self.said.open("w") as out:
            self.snakemake = checkout.start(*ENDLESS, f"experiment={name}", *arguments, stdout=out, stderr=subprocess.STDOUT)
        until(lambda: (self.results / "history.csv").exists(), 90)

    def await_end(self) -> tuple[float, str]:
        """Seconds until nothing of the job is left on any node, and what the user saw in the end."""
        seconds = until(lambda: not left(self.cluster), LIMIT)
        assert self.snakemake.wait(180) == 1
        return seconds, self.said.read_text()


def kill(cluster: Cluster) -> None:
    os.kill(on(cluster, "n2", "workflow/scripts/train.py")[0], signal.SIGKILL)


def exit_(cluster: Cluster) -> None:
    os.kill(on(cluster, "n2", "workflow/scripts/train.py")[0], signal.SIGTERM)


def raise_(cluster: Cluster) -> None:
    os.kill(on(cluster, "n2", "workflow/scripts/train.py")[0], signal.SIGINT)


def exhaust(cluster: Cluster) -> None:
    """From now on the rank gets no more memory."""
    (rank,) = on(cluster, "n2", "workflow/scripts/train.py")
    subprocess.run(["prlimit", f"--pid={rank}", "--as=1000000"], check=True)


def kill_launcher(cluster: Cluster) -> None:
    os.kill(on(cluster, "n3", "torch.distributed.run")[0], signal.SIGKILL)


FAULTS: dict[str, tuple[Callable[[Cluster], None], str]] = {
    "killed": (kill, r"rank 1 on n2 was ended by SIGKILL; the system does that when memory runs out"),
    "exits": (exit_, r"rank 1 on n2 was ended by SIGTERM"),
    "raises": (raise_, r"rank 1 on n2: KeyboardInterrupt"),
    "out of memory": (exhaust, r"rank 1 on n2: .*(memory|Memory|alloc).*"),
    "launcher killed": (kill_launcher, r"n3: .*Killed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_ends_the_job_and_is_named(cluster: Cluster, checkout: SlurmCheckout, record_property, fault: str) -> None:
    name = fault.replace(" ", "-")
    training = Training(cluster, checkout, name)
    do, error = FAULTS[fault]
    do(cluster)
    seconds, said = training.await_end()
    record_property("seconds", seconds)
    print(f"{fault}: over on all nodes {seconds:.1f} s later")
    last = [line for line in said.splitlines() if "launch: " in line]
    assert re.search(rf"launch: train failed: {error}.*; see results/{name}/run/train.log", said), last
    # The log of the rule is the last that is shown, and this its last line.
    assert re.search(rf"^    launch: {error}", said, re.MULTILINE), last
    assert not (training.results / "model.safetensors").exists()
    assert (training.results / "logs/rank=1.log").exists()


def test_ctrl_c_cancels_the_jobs(cluster: Cluster, checkout: SlurmCheckout) -> None:
    training = Training(cluster, checkout, "interrupted")
    training.snakemake.send_signal(signal.SIGINT)
    training.await_end()
    states = cluster.run("sacct", "-X", "--noheader", "--parsable2", "--format=State").stdout.splitlines()
    assert states[-1].startswith("CANCELLED")


def test_scancel_leaves_nothing(cluster: Cluster, checkout: SlurmCheckout) -> None:
    training = Training(cluster, checkout, "cancelled")
    job = cluster.run("squeue", "--noheader", "--format=%i").stdout.split()[0]
    assert cluster.run("scancel", job).returncode == 0
    _, said = training.await_end()
    assert "SLURM status is: 'CANCELLED" in said
