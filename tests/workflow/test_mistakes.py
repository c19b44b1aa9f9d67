"""A user's mistakes, through Snakemake: one line, a status that is not 0, and no traceback."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import Checkout
from forked import server
from waiting import until

# One of the configuration itself: all others are in tests/unit/test_config.py.
MISTAKES = [
    (
        ["nodes=[1,3]"],
        "config: global_batch_size: 250 does not divide among 3 processes (3 nodes x 1); use 249",
    ),
    (
        ["nproc_per_node=500", "global_batch_size=5000"],
        "config: nproc_per_node: 500 processes (1 x 500) on this machine's ",
    ),
    (
        ["cpus_per_proc=999"],
        "cpus_per_proc: 1 processes of 999 CPUs need 999, ",
    ),
    (
        ["dataset={archive: ~/no-such-file}"],
        "config: dataset.archive: ~/no-such-file is not there, or not a file; give the path",
    ),
]


@pytest.mark.parametrize(("given", "line"), MISTAKES, ids=[given[0] for given, _ in MISTAKES])
def test_refused_before_anything_starts(untouched, given, line) -> None:
    done = untouched.snakemake("--config", *given)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(line)
    assert "Traceback" not in done.stdout
    assert not (untouched.path / "results").exists()


def test_the_cause_of_a_failed_import_is_that_of_its_runs(untouched, tmp_path) -> None:
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "x.png").write_text("not an image")
    config = ["--config", f"dataset={{name: mine, folder: {tmp_path}}}"]
    done = untouched.snakemake(*config)
    data_only = untouched.snakemake("results/data/mine/manifest.json", *config)
    shutil.rmtree(untouched.path / "results")
    line = (
        r"fetch: 4 images are unreadable: train/\S+ \(not an image\), .*; "
        r"log: results/data/mine/fetch.log$"
    )
    assert done.returncode == data_only.returncode == 1
    for text in (f"{line}", f"quickstart/nodes~1: not finished: {line}"):
        output = (done if "nodes" in text else data_only).stdout
        assert re.search(f"^{text}", output, re.MULTILINE), output


def test_the_cause_is_told_although_the_file_server_s_clock_is_behind(untouched, tmp_path) -> None:
    """By ten minutes: what the command writes then seems to be older than it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 600\n"
    )
    (tmp_path / "own.py").write_text("def load(split):\n    raise ValueError('no images today')\n")
    config = ["--config", f"dataset={{name: mine, python: {tmp_path}/own.py:load}}"]
    done = subprocess.run(
        [*untouched.command, *config], cwd=untouched.path, capture_output=True, text=True,
        env=untouched.environment | {"PYTHONPATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    shutil.rmtree(untouched.path / "results")
    assert done.returncode == 1
    line = "quickstart/nodes~1: not finished: fetch: "
    assert line in done.stderr, done.stderr
    assert "no images today" in done.stderr.partition(line)[2].partition("\n")[0]


def test_a_killed_import_is_no_run_that_was_not_started(untouched, tmp_path) -> None:
    """Nor is its reason what the import has told before."""
    (tmp_path / "load.py").write_text(
        "import os, sys\n"
        "def load(split):\n"
        "    print('fetch: warning: something', file=sys.stderr, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = untouched.snakemake(
        "--config", f"dataset={{name: mine, python: {tmp_path}/load.py:load}}"
    )
    shutil.rmtree(untouched.path / "results")
    assert "fetch: warning: something" in done.stdout
    line = "quickstart/nodes~1: not finished: fetch: was interrupted or killed, perhaps "
    assert line in done.stdout, done.stdout


def test_snakemake_says_that_it_waits_after_sigterm(untouched, tmp_path) -> None:
    (tmp_path / "waits.yaml").write_text(
        "experiment: waits\ncommand: [sh, -c, touch began; sleep 3600]\npreflight: false\n"
    )
    said = tmp_path / "said"
    with said.open("w") as out:
        process = untouched.start("--configfile", str(tmp_path / "waits.yaml"), stdout=out,
                                  stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    # Not before: a shell goes on if a signal comes between two of its commands.
    run = untouched.path / "results/waits/run"
    until(lambda: (run / "work/began").exists(), process)
    process.terminate()
    until(lambda: "SIGTERM: Snakemake starts no more jobs and waits for" in said.read_text())
    assert process.poll() is None
    # As a terminal does at Ctrl-C.
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() != 0
    shutil.rmtree(untouched.path / "results")


@pytest.mark.parametrize("how", [
    'module ddp:\n    snakefile: "{path}"\n\nuse rule * from ddp as ddp_*\n', 'include: "{path}"\n',
])  # fmt: skip
def test_as_a_part_of_another_workflow_it_says_how_to_run_it(untouched, tmp_path, how) -> None:
    (tmp_path / "Snakefile").write_text(how.format(path=untouched.path / "Snakefile"))
    done = server().run(["-m", "snakemake", "--dry-run", "--cores", "1"], tmp_path)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("this workflow is no module of another one; run it by itself: snakemake")
    assert "Traceback" not in done.stderr


# An executor of Snakemake's that this workflow does not know, as cluster-generic is one.
FOREIGN = """
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.settings import CommonSettings

common_settings = CommonSettings(
    non_local_exec=True, implies_no_shared_fs=False, job_deploy_sources=False,
    pass_default_storage_provider_args=True, pass_default_resources_args=True,
    pass_envvar_declarations_to_cmd=True, auto_deploy_default_storage_provider=False,
    init_seconds_before_status_checks=1,
)


class Executor(RemoteExecutor):
    def run_job(self, job):
        raise SystemExit("a job was submitted")

    async def check_active_jobs(self, active_jobs):
        for job in active_jobs:
            yield job

    def cancel_jobs(self, active_jobs):
        pass
"""


def test_an_executor_whose_nodes_are_unknown_is_refused(
    untouched: Checkout, tmp_path: Path
) -> None:
    plugin = tmp_path / "snakemake_executor_plugin_foreign/__init__.py"
    plugin.parent.mkdir()
    plugin.write_text(FOREIGN)
    command = ["--executor", "foreign", "--jobs", "2", "--config", "nodes=2"]
    done = subprocess.run(
        [*untouched.command, *command], cwd=untouched.path, capture_output=True, text=True,
        env=untouched.environment | {"PYTHONPATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("--executor foreign: the nodes of its jobs are not known here; use ")


@pytest.mark.parametrize("wrong", ["results", "results/quickstart", "results/data"])
def test_a_file_where_a_folder_belongs(untouched, wrong) -> None:
    path = untouched.path / wrong
    path.parent.mkdir(exist_ok=True)
    path.touch(exist_ok=False)
    try:
        done = untouched.snakemake("-n")
        assert done.returncode == 1
        assert done.stdout.splitlines()[-1] == f"{wrong} is not a folder; move it away"
    finally:
        path.unlink()
        if path.parent != untouched.path:
            path.parent.rmdir()


def test_make_run_says_what_is_wrong_with_a_file_before_snakemake_reads_it(untouched) -> None:
    """Before it waits for somebody who writes into a pipe. Other files: test_config.py."""
    os.mkfifo(untouched.path / "pipe")
    done = untouched.python("workflow/scripts/check.py", "pipe")
    assert done.returncode == 1
    assert done.stderr.startswith("check: config: pipe")
    assert done.stderr.count("\n") == 1


def test_a_run_that_is_not_of_the_experiment(untouched) -> None:
    done = untouched.snakemake("--dry-run", "results/quickstart/nodes~3/evaluation.json")
    assert done.returncode == 1
    assert done.stdout.endswith("quickstart has no run nodes~3; its runs are nodes~1, nodes~2\n")
    assert "Traceback" not in done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("mistakes"))


def test_a_gpu_that_is_not_there_fails_the_run_in_one_line(checkout, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = checkout.snakemake(
        "--configfile", "config/digits.yaml", "--config", "device=cuda", "nodes=[1]", "seed=[0]"
    )
    assert done.returncode == 1
    assert "launch: device: cuda needs 1 GPUs, one per process; " in done.stdout
    assert "Traceback" not in done.stdout
    assert not list((checkout.path / "results" / "digits").rglob("*.safetensors"))


def test_a_dry_run_needs_neither_network_nor_activation(checkout) -> None:
    command = [
        "unshare",
        "--net",
        "--map-root-user",
        sys.executable,
        "-m",
        "snakemake",
        "-n",
        "--quiet",
    ]
    done = subprocess.run(
        command,
        cwd=checkout.path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": os.environ["HOME"]},
    )
    assert done.returncode == 0, done.stderr


def test_too_few_hosts_are_told_by_a_dry_run(checkout) -> None:
    given = ["-n", "--configfile", "config/digits.yaml", "--config", "hosts=[a, b]", "nodes=[1, 4]",
             "seed=[0]", "experiment=few"]  # fmt: skip
    done = checkout.snakemake(*given)
    assert done.returncode == 1
    few = "nodes: a run wants 4, hosts has 2: a, b; name more hosts, or lower nodes"
    assert done.stdout.splitlines()[-1] == f"config: {few}"


def processes_in(folder: Path, program: str) -> list[Path]:
    """/proc/<pid> of the processes in a folder with a program on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").readlink() == folder and program.encode() in (
                path / "cmdline"
            ).read_bytes():
                found.append(path)
        except OSError:
            continue  # it has ended meanwhile
    return found


@pytest.mark.faults
def test_training_does_not_outlive_a_killed_snakemake(tmp_path: Path) -> None:
    """It would go on writing into the folder into which the next Snakemake's training writes."""
    # Its lock stays.
    checkout = Checkout(tmp_path)
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--profile",
        "profiles/local",
        "--configfile",
        "config/digits.yaml",
        "--config",
        "epochs=100000",
        "nodes=[2]",
        "seed=[0]",
        "experiment=killed",
    ]
    snakemake = subprocess.Popen(
        command, cwd=checkout.path, env=checkout.environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until((checkout.path / "results/killed/nodes~2_seed~0/metrics.csv").exists, snakemake)
    assert (
        len(processes_in(checkout.path, "train.py")) == 7
    )  # launch, two agents, two ranks, and what watches over each
    os.kill(snakemake.pid, signal.SIGKILL)
    snakemake.wait()
    until(lambda: not processes_in(checkout.path, "train.py"))


# Of a user's own program, in a file with these keys: what only Snakemake's session looks at, and
# one of each kind of tests/unit/test_refused_programs.py.
OF_PROGRAMS = {
    "program: trian": 'config: program: "trian" is neither a Python file nor a module; give the',
    "program: p.py\nhosts: nodes/hosts.txt": "hosts: nodes/hosts.txt: No such file or directory; ",
    "program: p.py\nfiles: [tree]": "mistakes/tree/closed: Permission denied; change its mode",
    "program: p.py\nfiles: [tree/closed/x]": "config: files: tree/closed/x is not there; give",
    "program: tree/closed/p.py": "config: program: tree/closed/p.py is not there",
    "dataset: {name: digits}\nglobal_batch_size: 64\ninitial_weights: tree/closed/w.pt": (
        "tree/closed/w.pt"
    ),
    "dataset: {name: digits}\nglobal_batch_size: 64\ninitial_weights: ../results/wrong/run/w": (
        "config: initial_weights: results/wrong/run/w would be replaced by this run; give another"
    ),
}


@pytest.fixture(scope="module")
def odd(checkout: Checkout) -> Path:
    """A folder with a program and a closed folder."""
    folder = checkout.path / "mistakes"
    (folder / "tree/closed").mkdir(parents=True)
    (folder / "tree/open").write_text("")
    (folder / "tree/closed").chmod(0)
    (folder / "p.py").write_text("")
    (checkout.path / "results/wrong/run").mkdir(parents=True)
    (checkout.path / "results/wrong/run/w").write_text("")
    return folder


def dry_run(checkout, folder: Path, keys: str) -> subprocess.CompletedProcess[str]:
    (folder / "wrong.yaml").write_text(f"experiment: wrong\n{keys}\n")
    arguments = ["-n", "--configfile", "mistakes/wrong.yaml"]
    if os.geteuid() != 0 or "tree" not in keys:
        return checkout.snakemake(*arguments)
    # Root reads closed folders too, unless it gives this up.
    drop = "-dac_override,-dac_read_search"
    command = ["setpriv", "--bounding-set", drop, *checkout.command, *arguments]
    return subprocess.run(command, cwd=checkout.path, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip


@pytest.mark.parametrize("keys", OF_PROGRAMS)
def test_what_cannot_start_is_refused_in_a_dry_run(checkout, odd, keys) -> None:
    done = dry_run(checkout, odd, keys)
    assert done.returncode == 1, done.stdout
    *_, last = done.stdout.strip().splitlines()
    assert OF_PROGRAMS[keys] in last
    assert len(last) <= 200
    assert "Traceback" not in done.stdout


def test_what_is_odd_but_correct_is_taken(checkout, odd) -> None:
    """Names of other commands: test_measures.py."""
    keys = "command: [bash, -c, '" + "sleep 1; " * 50 + "', '{solver}']"
    done = dry_run(checkout, odd, f"{keys}\nparameters: {{solver: [a, b]}}")
    assert done.returncode == 0, done.stdout[-2000:]
