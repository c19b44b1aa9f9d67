"""Shared by the tests on Slurm: a small experiment, its jobs and their processes."""

import hashlib
import json
import re
from pathlib import Path

from checkout import Checkout, SlurmCheckout
from cluster.handle import Cluster

# Small, with uneven batches: 1,297 images in batches of at most 72 are 19 batches, 5 of 69 and 14
# of 68.
TINY = [
    "--config",
    "dataset={name: digits}",
    "widths=[8, 8, 8]",
    "epochs=2",
    "global_batch_size=72",
    "learning_rate=0.5",
    "flip=false",
    "cpus_per_proc=1",
    'scratch=["/scratch"]',
]


def cheap(checkout: Checkout, script: str = "exit {status}") -> list[str]:
    """The options of Snakemake for a shell script instead of a training, without a report, where it
    matters only how its job comes and goes; further keys may follow.

    On Slurm its tasks start the script: an agent of torchrun's takes three CPU seconds on each node
    to import torch.
    """
    launcher = "srun" if isinstance(checkout, SlurmCheckout) else "torchrun"
    (checkout.path / "cheap.yaml").write_text(
        f"command: [sh, -c, {json.dumps(script)}]\npreflight: false\nparameters: {{status: 0}}\n"
        f"launcher: {launcher}\n"
    )
    return ["--until", "train", "--configfile", "cheap.yaml", "--config"]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def submitted(said: str) -> list[str]:
    """Ids of the submitted Slurm jobs in Snakemake's output."""
    return re.findall(r"has been submitted with SLURM jobid (\d+)", said)


def on(cluster: Cluster, node: str, program: str) -> list[int]:
    """Processes of a node that run a program, without those that only have it as an argument."""
    # A path may have blanks.
    first = re.compile(r"\S*python.*?\.py(?= |$)")
    lines = cluster.processes(node).items()
    return [pid for pid, line in lines if (m := first.match(line)) and m[0].endswith(program)]
