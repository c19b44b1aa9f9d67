"""Programs of the user's on a real Slurm: started by its tasks and by accelerate, out of time."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkout import SlurmCheckout
from cluster.handle import Cluster
from guides import GUIDES, assert_ran, command_of, make_environments
from paced import EPOCHS, assert_continued, paced, unchanged
from submissions import submitted
from waiting import until

pytestmark = pytest.mark.faults
EXAMPLES = "examples/programs"
NODES = ("n1", "n2", "n3")


def example(name: str) -> list[str]:
    return ["--configfile", f"{EXAMPLES}/{name}.yaml"]


def rows(run: Path) -> list[str]:
    return [row["epoch"] for row in csv.DictReader(io.StringIO((run / "metrics.csv").read_text()))]


@pytest.fixture(scope="module")
def guides(checkout: SlurmCheckout) -> None:
    make_environments(checkout)


@pytest.mark.usefixtures("guides")
@pytest.mark.parametrize("name", GUIDES)
def test_the_guides_programs_run_unchanged_in_their_own_environments(
    checkout: SlurmCheckout, name: str
) -> None:
    # The preflight of one is that of all, and no agent of torchrun's is needed.
    options = ["launcher=srun"] if not name.startswith("trixie") else []
    options += ["preflight=true"] if name == "princeton" else []
    checkout.run(*command_of(checkout, name), *options)
    assert_ran(checkout, name)


def test_an_example_with_declared_parameters_completes_on_two_nodes(
    checkout: SlurmCheckout,
) -> None:
    """A parameter that changes no result travels apart from the others."""
    options = ["layers=1", "steps=40", "save_every=20", "nodes=2", "nproc_per_node=1",
               "cpus_per_proc=1", "preflight=false"]  # fmt: skip
    said = checkout.run(*example("text/text"), "--until", "evaluate", "--config", *options)
    assert re.search(r"text/\S+: characters \d+, test_loss 2\.\d+, perplexity", said), said


def test_an_unchanged_program_continues_from_its_snapshot_when_it_is_preempted(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    snakemake = checkout.start(*unchanged(checkout), "launcher=srun")
    until((checkout.path / "results/unchanged/run/work/snapshot").exists, snakemake)
    urgent = ["--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null"]
    done = cluster.run("sbatch", *urgent, "--wrap=sleep 3")
    assert done.returncode == 0, done.stderr
    assert snakemake.wait() == 0
    assert_continued(checkout)


def test_out_of_time_the_job_continues(cluster: Cluster, checkout: SlurmCheckout) -> None:
    """The job ends with 75 and is queued again by `launch`; Snakemake is started once."""
    # At first 150 s of pauses; a job of three minutes is asked to stop a minute before its end.
    said = checkout.run(
        *paced(checkout), "--set-resources", "train:runtime=3",
    )  # fmt: skip
    run = checkout.path / "results/paced/run"
    about = json.loads((run / "run.json").read_text())
    assert len(about["attempts"]) >= 2
    (job,) = {attempt["by"].split()[-1] for attempt in about["attempts"]}
    assert submitted(said) == [job]
    asked = ["sacct", "-X", "--duplicates", "--noheader", "--parsable2", f"--jobs={job}"]
    *others, last = cluster.run(*asked, "--format=State").stdout.split()
    assert others
    assert (set(others), last) == ({"REQUEUED"}, "COMPLETED")
    assert rows(run) == [str(epoch) for epoch in range(1, EPOCHS + 1)]


def test_modules_and_a_venv_are_on_every_node_and_staged_it_needs_no_shared_one(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    folder = checkout.path / "site"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    script = folder / "env/bin/where"
    # As pip writes it: the path has a space.
    script.write_text(
        f"#!/bin/sh\n'''exec' '{folder}/env/bin/python' \"$0\"\n' '''\n"
        "import sys\nprint(sys.executable)\n"
    )
    script.chmod(0o755)
    # The path of a module must not have a space.
    module = checkout.path.parent / "of-site"
    module.write_text("#%Module\nsetenv OF_SITE here\n")
    (folder / "train.py").write_text(
        "import os, subprocess, sys, launched\n"
        "assert sys.prefix.endswith(('site/env', '-unpacked')), sys.prefix\n"
        "assert subprocess.check_output('where', text=True) == f'{sys.prefix}/bin/python\\n'\n"
        "assert os.environ['OF_SITE'] == os.environ['OF_PROFILE'] == 'here'\n"
        "(launched.results / f'{os.uname().nodename}-{launched.rank}').touch()\n"
    )
    # The Snakemake inside a job has them from its own command.
    (folder / "profile").mkdir()
    (folder / "profile/config.yaml").write_text(
        f"default-resources: {{site_modules: '{module}', site_setup: 'export OF_PROFILE=here'}}\n"
    )
    of_site = ["--profile", "site/profile", "--configfile", "site/site.yaml", "--until"]
    environment = {"python": "env"}
    (folder / "site.yaml").write_text(
        "experiment: site\nprogram: train.py\nnodes: 2\nevaluate: train.py\npreflight: false\n"
        f"environment: {json.dumps(environment)}\n"
    )
    checkout.run(*of_site, "evaluate")
    run = checkout.path / "results/site/run"
    hosts = {path.name for path in (run / "work").glob("n*-*")}
    assert {name.partition("-")[2] for name in hosts} == {"0", "1"}
    assert len({name.partition("-")[0] for name in hosts}) == 2
    found = json.loads((run / "environment.json").read_text())
    assert found["interpreter"] == str(folder / "env/bin/python")
    assert found["modules"] == [str(module)]
    # While the job runs, the nodes have an empty folder there.
    for node in NODES:
        hidden = cluster.run("mount", "-t", "tmpfs", "tmpfs", str(folder / "env"), node=node)
        assert hidden.returncode == 0, hidden.stderr
    try:
        staged = ["experiment=staged", "environment={stage: true}", 'scratch=["/scratch"]',
                  "launcher=srun"]  # fmt: skip
        checkout.run(*of_site, "train", "--config", *staged)
    finally:
        for node in NODES:
            cluster.run("umount", str(folder / "env"), node=node)
    found = json.loads((checkout.path / "results/staged/run/environment.json").read_text())
    assert re.fullmatch(r"/scratch/ddp-data-\d+/staged-environment-\w+-unpacked/bin/python",
                        found["interpreter"])  # fmt: skip


IMAGE = "localhost/python:1"
# In a sandbox, podman may neither make control groups nor raise limits.
CONTAINERS = """\
[containers]
cgroups = "disabled"
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""
STORAGE = """\
[storage]
driver = "vfs"
graphroot = "/tmp/containers/store"
runroot = "/tmp/containers/run"
"""
BOXED = """
import os, signal, sys, time
import launched
assert sys.executable == "/usr/bin/python3", sys.executable
try:
    import torch
except ImportError:
    pass
else:
    sys.exit(torch.__file__)
assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
signal.signal(signal.SIGTERM, signal.SIG_DFL)
saved = launched.state / "saved"
if not saved.exists() and launched.rank == 0:
    saved.touch()
    time.sleep(1e6)
if launched.rank == 1 and not (launched.state / "killed").exists():
    while not saved.exists():
        time.sleep(0.1)
    time.sleep(2)  # for launch to see what was saved
    (launched.state / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
(launched.results / f"{os.uname().nodename}-{launched.rank}").touch()
assert (launched.files / "five.txt").read_text() == "5"
if launched.rank == 0:
    launched.result(loss=0.5)
"""


def image_of_this_python(tarball: Path) -> None:
    """The system's Python, a shell, and the libraries that they load, as the files of an image."""
    code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    asked = subprocess.run(["/usr/bin/python3", "-c", code], capture_output=True, text=True)
    library = Path(asked.stdout.strip())
    binaries = ["/usr/bin/python3", "/bin/sh", *map(str, library.glob("lib-dynload/*.so"))]
    listed = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=True).stdout
    loaded = {word for word in listed.split() if word.startswith("/") and word[-1] != ":"}
    left_out = {"test", "__pycache__", "dist-packages", "idlelib", "tkinter", "site-packages"}
    with tarfile.open(tarball, "w", dereference=True) as tar:
        for path in sorted({"/usr/bin/python3", "/bin/sh", *loaded}):
            tar.add(path)
        tar.add(library, filter=lambda entry: (
            None if left_out & set(Path(entry.name).parts) or "config-" in entry.name else entry
        ))  # fmt: skip


@pytest.fixture
def podman(cluster: Cluster, checkout: SlurmCheckout) -> Iterator[dict[str, Any]]:
    """An image that each node has in its own store, and how it is found there."""
    folder = checkout.path / "podman"
    (folder / "containers.conf").write_text(CONTAINERS)
    (folder / "storage.conf").write_text(STORAGE)
    names = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
    settings = folder / "podman.sh"
    settings.write_text("".join(f"export {name}='{folder}/{file}'\n"
                                for name, file in names.items()))  # fmt: skip
    image_of_this_python(folder / "files.tar")

    def on(node: str | None, line: str) -> None:
        done = cluster.run("bash", "-c", f". '{settings}'; {line}", node=node)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        # Of an import, each has another time, and so another id.
        on(None, f"podman import '{folder}/files.tar' {IMAGE} && "
                    f"podman save --quiet -o '{folder}/image.tar' {IMAGE}")  # fmt: skip
        for node in NODES:
            # crun takes no part in the control groups of this machine.
            on(node, "mount -t tmpfs tmpfs /sys/fs/cgroup; "
                     f"podman load --quiet -i '{folder}/image.tar'")  # fmt: skip
        yield {"container": IMAGE, "setup": "source podman/podman.sh"}
    finally:
        for node in (None, *NODES):
            cluster.run("sh", "-c", "umount /sys/fs/cgroup; rm -rf /tmp/containers", node=node)


@pytest.fixture
def apptainer(checkout: SlurmCheckout) -> dict[str, Any]:
    """An image in a file, which is staged."""
    if not shutil.which("apptainer"):
        pytest.skip("apptainer is not installed")
    folder = checkout.path / "apptainer"
    image_of_this_python(folder / "files.tar")
    (folder / "files").mkdir()
    for command in ("tar -xf files.tar -C files", "apptainer build image.sif files"):
        done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    # In a sandbox, root has not all privileges that apptainer would keep.
    return {"container": "image.sif", "options": ["--no-privs"], "stage": True}


@pytest.mark.parametrize("kind", ["podman", "apptainer"])
def test_a_container_runs_program_and_evaluation_and_is_started_again(
    checkout: SlurmCheckout, request: pytest.FixtureRequest, kind: str
) -> None:
    folder = checkout.path / kind
    folder.mkdir()
    environment: dict[str, Any] = request.getfixturevalue(kind)
    staged = "assert os.environ['APPTAINER_CONTAINER'].startswith('/scratch/')\n"
    image = f"import os\n{staged if kind == 'apptainer' else ''}"
    # What separates the parts of a short option.
    beside = checkout.path.parent / "be,si:de"
    beside.mkdir(exist_ok=True)
    (beside / "train.py").write_text(f"import of_mine\n{image}{BOXED}")
    (beside / "of_mine.py").write_text("")
    (folder / "evaluate.py").write_text(
        f"{image}import sys, launched\nassert sys.executable == '/usr/bin/python3'\n"
        "launched.result(accuracy=0.75)\n"
    )
    (folder / "five.txt").write_text("5")
    (folder / "boxed.yaml").write_text(
        f"experiment: in-{kind}\nprogram: ../../be,si:de/train.py\nnodes: 2\n"
        "evaluate: evaluate.py\npreflight: false\nlauncher: srun\n"
        "files: [five.txt]\nscratch: [/scratch]\n"
        f"environment: {json.dumps(environment)}\n"
    )
    command = ["--configfile", f"{kind}/boxed.yaml", "--until", "evaluate"]
    if kind == "podman":
        missing = json.dumps(environment | {"container": "localhost/none:1"})
        refused = checkout.snakemake("-n", *command, "--config", f"environment={missing}")
        assert "config: environment: podman has no image localhost/none:1 here" in refused.stdout
    assert f"in-{kind}/run: loss 0.5, accuracy 0.75" in checkout.run(*command)
    run = checkout.path / f"results/in-{kind}/run"
    killed = r"rank 1 on n\d was ended by SIGKILL.*starting again"
    assert re.search(killed, (run / "train.log").read_text())
    hosts = {path.name for path in (run / "work").glob("n*-*")}
    assert {name.partition("-")[2] for name in hosts} == {"0", "1"}
    found = json.loads((run / "environment.json").read_text())
    assert found["interpreter"] == "/usr/bin/python3"
    assert re.fullmatch("[0-9a-f]{64}", found["image"])
    assert found["imports"][0] == "of_mine"
    assert checkout.jobs(*command) == {}
