"""`launch` through srun, inside jobs of a real Slurm."""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cluster.handle import Cluster
from launched import WAITS
from programs import ROOT, SCRIPTS, program

RUN = {
    "dataset": "digits", "widths": [8, 8, 8], "epochs": 1, "global_batch_size": 66, "flip": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(cluster: Cluster) -> Path:
    """A new folder that all nodes see, with the digits in it."""
    folder = cluster.shared / "launch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    done = program("fetch", "--dataset", "digits", "--output", folder / "digits")
    assert done.returncode == 0, done.stderr
    return folder


def job(
    cluster: Cluster,
    folder: Path,
    *launches: list[object],
    nodes: int = 3,
    options: tuple[str, ...] = (),
    before: str = "",
) -> str:
    """Run launches one after the other in one job; returns the job's output, with the status after
    each launch.
    """
    lines = [
        f"{shlex.join([sys.executable, str(SCRIPTS / 'launch.py'), *map(str, launch)])}; echo "
        "status $?"
        for launch in launches
    ]
    script = folder / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", before, *lines]))
    output = folder / "job.out"
    output.unlink(missing_ok=True)
    size = [f"--nodes={nodes}", f"--ntasks={nodes}"]
    cluster.batch(*size, *options, f"--output={output}", script, cwd=folder)
    return output.read_text()


def training(
    folder: Path,
    name: str,
    *options: object,
    nodes: int = 3,
    device: str = "cpu",
    scratch: str = "/scratch",
) -> list[object]:
    """Arguments of a launch of one epoch, into a folder of the name."""
    output = folder / name
    run = json.dumps(RUN | {"nodes": nodes, "device": device})
    own = [
        "--transport",
        "srun",
        "--nodes",
        nodes,
        "--device",
        device,
        "--log",
        output / "log",
        "--rank-logs",
        output / "logs",
        *options,
    ]
    data = ["--data", folder / "digits", "--scratch", scratch, "--output", output]
    return [*own, "--", SCRIPTS / "train.py", "--run", run, *data]


def test_every_launcher_comes_to_the_same_weights(cluster: Cluster, folder: Path) -> None:
    """From a scratch of the job's own, which they leave empty."""
    launchers = ["torchrun", "torchrun-c10d", "srun", "accelerate", "torch.distributed.launch"]
    before = temporary_files(cluster)
    (folder / "launcher").mkdir()
    (folder / "launcher" / "of the user's").touch()
    scratch = ["--data", folder / "digits", "--scratch", "$SLURM_TMPDIR"]
    stage = ["--transport", "srun", "--launcher", "none", "--nodes", 2, "--", SCRIPTS / "stage.py"]
    launches = (
        training(folder, name, "--launcher", name, nodes=2, scratch="$SLURM_TMPDIR")
        for name in launchers
    )
    made = "export SLURM_TMPDIR=/scratch/own; srun --ntasks-per-node=1 mkdir -p $SLURM_TMPDIR"
    nodes = ("--nodelist=n1,n2",)
    said = job(cluster, folder, [*stage, *scratch], *launches, nodes=2, options=nodes, before=made)
    assert said.count("status 0") == 1 + len(launchers), said
    staged = said.partition("status 0")[0]
    assert len(re.findall(r"stage: n\d: fresh /scratch/own/ddp-data-", staged)) == 2
    assert (folder / "launcher" / "of the user's").exists()
    for node in cluster.nodes[:2]:
        left = cluster.run("find", "/scratch/own", "-name", "*.npy", node=node)
        assert (left.returncode, left.stdout) == (0, "")
    found = {
        name: hashlib.sha256((folder / name / "model.safetensors").read_bytes()).hexdigest()
        for name in launchers
    }
    assert len(set(found.values())) == 1, found
    for name in launchers:
        # c10d numbers the nodes as they arrive.
        found_on = re.search(
            r"preflight: 2 ranks on (.*): cpu", (folder / name / "log").read_text()
        )
        assert found_on
        assert len(set(found_on[1].split(", "))) == 2
        assert sorted(path.name for path in (folder / name / "logs").iterdir()) == [
            "launcher.log",
            "log",
            "rank=0.log",
            "rank=1.log",
        ]
    assert temporary_files(cluster) == before


def test_by_itself_it_needs_no_options(cluster: Cluster, folder: Path) -> None:
    program = folder / "hello.py"
    program.write_text("import os\nprint(os.uname().nodename, os.environ['RANK'], flush=True)\n")
    nodes = ("--nodelist=n1,n2",)
    said = job(cluster, folder, ["--nodes", 2, "--", program], nodes=2, options=nodes)
    assert "status 0" in said
    assert all(f"n{number + 1} {number}" in said for number in range(2)), said
    logs = re.search(r"launch: the logs of the ranks are in (launch-\d+)/", said)
    assert logs
    assert (folder / logs[1] / "rank=1.log").read_text() == "n2 1\n"


def temporary_files(cluster: Cluster) -> list[str]:
    """Ours, on all nodes; torch keeps caches there too."""
    found = []
    for node in cluster.nodes:
        done = cluster.run(
            "find",
            "/tmp",
            "-maxdepth",
            "1",
            "-name",
            "launch-*",
            "-o",
            "-name",
            "supervise-*",
            node=node,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    return found


def test_a_dry_run_prints_what_every_node_would_run(cluster: Cluster, folder: Path) -> None:
    said = job(cluster, folder, ["--dry-run", *training(folder, "dry")])
    step, *nodes, status = said.splitlines()
    assert step.startswith("srun --nodes=3 --ntasks=3 --ntasks-per-node=1 ")
    assert [line.split(" CUDA_VISIBLE_DEVICES=")[0] for line in nodes] == [
        "[node 0, n1]",
        "[node 1, n2]",
        "[node 2, n3]",
    ]
    assert all("--master-addr=n1 --master-port=2" in line for line in nodes)
    assert status == "status 0"
    assert not (folder / "dry").exists()


def test_a_job_of_another_size_is_refused(cluster: Cluster, folder: Path) -> None:
    said = job(cluster, folder, training(folder, "small"), nodes=2)
    assert re.fullmatch(r"launch: nodes: the run wants 3, job \d+ has 2: n1, n2\nstatus 1\n", said)


def test_launch_away_from_the_first_node_is_refused(cluster: Cluster, folder: Path) -> None:
    """As in an interactive job on sites whose shell stays on the login node."""
    launch = [sys.executable, SCRIPTS / "launch.py", *training(folder, "away")]
    done = cluster.run("salloc", "--nodes=3", *launch, cwd=folder)
    assert "launch: launch runs on login, not on n1, the first node of job " in done.stderr


def test_gpus_that_torch_does_not_see_end_the_job_in_time(cluster: Cluster, folder: Path) -> None:
    """Slurm gives a GPU on every node, of a type; that it is one is for torch to say."""
    error = (
        r"rank \d on n\d: device: cuda needs a GPU for each of the 1 processes on n\d; torch sees 0"
    )
    launch = training(folder, "gpus", "--launcher", "srun", nodes=2, device="cuda")
    fails(cluster, folder, launch, error, nodes=2, options=("--gres=gpu:a100:1",))


def fails(cluster: Cluster, folder: Path, launch: list[object], error: str, **options) -> None:
    """Run a launch that is to end by itself, with a line that matches `error`."""
    said = job(cluster, folder, launch, **options)
    assert re.search(f"launch: train failed: {error}", said), said
    assert "status 1" in said


@pytest.mark.faults
def test_nodes_whose_own_name_is_loopback_s_find_each_other(cluster: Cluster, folder: Path) -> None:
    """As Debian has it: 127.0.1.1 for the host itself, the network's addresses for the others."""
    with ExitStack() as changed:
        for number, node in enumerate(cluster.nodes, start=1):
            changed.enter_context(other_hosts(cluster, node, f"s/10.77.0.1{number}/127.0.1.1/"))
        assert cluster.run("getent", "hosts", "n2", node="n2").stdout.split() == ["127.0.1.1", "n2"]
        said = job(cluster, folder, training(folder, "debian", nodes=2), nodes=2)
    assert said.endswith("status 0\n"), said


@contextmanager
def other_hosts(cluster: Cluster, node: str, change: str) -> Iterator[None]:
    """A node on which the names of the others are other ones."""
    assert (
        cluster.run(
            "bash",
            "-c",
            f"sed '{change}' /etc/hosts > /tmp/hosts && mount --bind /tmp/hosts /etc/hosts",
            node=node,
        ).returncode
        == 0
    )
    try:
        yield
    finally:
        assert cluster.run("umount", "/etc/hosts", node=node).returncode == 0


@pytest.mark.parametrize(("change", "why", "launcher"), [
    # torchrun's agents wait for the one that does not come.
    ("s/10.77.0.11/10.77.0.99/", "(timed out|No route to host)", "torchrun"),
    ("/10.77.0.11/d", "(Name or service not known|Temporary failure in name resolution)", "none"),
])  # fmt: skip
def test_a_node_that_cannot_reach_rank_0_is_named_in_time(
    cluster: Cluster, folder: Path, change: str, why: str, launcher: str
) -> None:
    """Before any rank begins: a program without torch takes the place of the training."""
    error = (
        rf"node 2 on n3: cannot reach rank 0's node at n1:2\d{{4}}: {why}; check name resolution"
    )
    waiting = folder / "waiting"
    waiting.mkdir(exist_ok=True)
    (waiting / "train.py").write_text(WAITS)
    launch = training(folder, "unreachable", "--launcher", launcher)
    launch[launch.index("--") + 1 :] = [waiting / "train.py", waiting]
    with other_hosts(cluster, "n3", change):
        fails(cluster, folder, launch, error)


def test_in_a_job_array_each_job_has_its_own_nodes(cluster: Cluster, folder: Path) -> None:
    """Of an array, scontrol shows all jobs for the id that one of them has."""
    launch = [
        sys.executable,
        SCRIPTS / "launch.py",
        "--dry-run",
        *training(folder, "array", "--nodes", 1),
    ]
    script = folder / "array.sh"
    script.write_text(f"#!/bin/bash\necho on $SLURMD_NODENAME\n{shlex.join(map(str, launch))}\n")
    output = f"--output={folder}/array.%a.out"
    cluster.batch("--array=0-2", "--exclusive", output, script, cwd=folder)
    nodes = set()
    for number in range(3):
        first, _, node = (folder / f"array.{number}.out").read_text().splitlines()
        name = first.removeprefix("on ")
        assert node.startswith(f"[node 0, {name}]")
        nodes.add(name)
    assert nodes == {"n1", "n2", "n3"}


def test_a_node_without_slurm_s_commands_is_told_so(folder: Path) -> None:
    """As in a container."""
    environment = os.environ | {"SLURM_JOB_ID": "1", "PATH": str(folder)}
    done = program("launch", *training(folder, "nowhere"), env=environment)
    assert done.returncode == 1
    assert done.stderr == (
        "launch: scontrol, Slurm's own command, is not on PATH here; go to where it "
        "is, or use profiles/local; in no job: unset SLURM_JOB_ID, or launch --transport local\n"
    )


def test_slurm_passes_the_checks_of_every_scheduler(cluster: Cluster, folder: Path) -> None:
    checked = folder / "checked"
    checked.mkdir()
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(SCRIPTS)!r}, {str(ROOT / "tests")!r}]
from manynodes.schedulers.registry import SCHEDULERS
from schedulers import check_in_a_job, check_that_it_ends
for check in (check_in_a_job, check_that_it_ends):
    check(SCHEDULERS["srun"], 2, Path({str(checked)!r}))
print("passed")
"""
    script, output = folder / "checks.sh", folder / "checks.out"
    script.write_text(f"#!/bin/bash\nexec {shlex.join([sys.executable, '-c', code])}\n")
    cluster.batch("--nodes=2", "--ntasks=2", f"--output={output}", script, cwd=folder)
    assert output.read_text().splitlines()[-1] == "passed", output.read_text()
