"""The profiles for Slurm, on a machine without Slurm."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from checkout import Checkout
from forked import server


def without_slurm(
    untouched: Checkout, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Snakemake with the profile, where none of Slurm's commands are on PATH, installed on this
    machine or not.
    """
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("bash", "git", "which"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(f"/usr/bin/{tool}")
    python, *snakemake = untouched.command[: untouched.command.index("--profile")]
    command = [*snakemake, "--profile", "profiles/slurm", *arguments]
    environment = untouched.environment | {
        "PATH": os.pathsep.join([str(tools), str(Path(python).parent)])
    }
    return server().run(command, untouched.path, environment, merged=True)


def resources(said: str, rule: str) -> str:
    found = re.search(rf"^ *rule {rule}:\n(?: .*\n)*? *resources: (.*)$", said, re.MULTILINE)
    assert found, said
    return found[1]


def test_a_dry_run_needs_no_slurm_and_shows_what_jobs_ask_for(
    untouched: Checkout, tmp_path: Path
) -> None:
    done = without_slurm(
        untouched,
        tmp_path,
        "-n",
        "--config",
        "nodes=4",
        "nproc_per_node=2",
        "global_batch_size=512",
        "device=cuda",
        # Also names of Python's and of Snakemake's own.
        "--default-resources",
        "slurm_partition=open",
        "pbs_queue=input",
        "attempts=attempt",
        "--set-resources",
        "train:qos=id",
    )
    assert done.returncode == 0, done.stdout
    for rule in ("stage", "train"):
        found = set(resources(done.stdout, rule).split(", "))
        assert {"slurm_partition=open", "pbs_queue=input", "attempts=1"} <= found
        assert ("qos=id" in found) == (rule == "train")
        assert {"nodes=4", "tasks=4", "mpi=srun", "cpus_per_task=8", "gres=gpu:2"} <= found
        assert {"tasks_per_gpu=0", "ngpus=2"} <= found
    found = set(resources(done.stdout, "evaluate").split(", "))
    assert {"nodes=1", "tasks=1", "cpus_per_task=4", "gres=gpu:1", "ngpus=1"} <= found
    assert "--transport auto" in done.stdout


def test_a_site_s_profile_lies_over_it(untouched: Checkout, tmp_path: Path) -> None:
    done = without_slurm(
        untouched, tmp_path, "--profile", "profiles/example-site", "-n", "--config", "nodes=[2]"
    )
    assert done.returncode == 0, done.stdout
    for rule in ("stage", "train", "evaluate"):
        assert "slurm_partition=main, slurm_account=users" in resources(done.stdout, rule)
    assert "runtime=60" in resources(done.stdout, "train")
    assert "mpi=srun" in resources(done.stdout, "train")


def test_without_slurm_a_run_is_refused_in_one_line(untouched: Checkout, tmp_path: Path) -> None:
    done = without_slurm(untouched, tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == (
        "slurm: scontrol, Slurm's own command, is not on PATH here; go to where it is, or use "
        "profiles/local"
    )
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("profile", ["local", "slurm", "example-site"])
def test_every_key_of_a_profile_has_its_reason(profile: str) -> None:
    lines = (
        (Path(__file__).parents[2] / "profiles" / profile / "config.yaml").read_text().splitlines()
    )
    keys = [number for number, line in enumerate(lines) if re.match(r"[a-z]", line)]
    assert keys
    assert all(lines[number - 1].startswith("#") for number in keys)
