"""Output of Snakemake commands before, during and after a run, and refusals, on the digits."""

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkout import Checkout, jobs_in
from waiting import until

TINY = {
    "experiment": "small",
    "dataset": {"name": "digits"},
    "widths": [8, 8, 8],
    "epochs": 1,
    "global_batch_size": 64,
    "learning_rate": 0.5,
    "flip": False,
    "cpus_per_proc": 1,
    "seed": [0, 1],
}


class Small(Checkout):
    """A checkout with a small experiment of its own, which gives few keys."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.write(TINY)
        self.results = self.path / "results" / "small"

    def write(self, config: dict) -> None:
        (self.path / "small.yaml").write_text(json.dumps(config))

    def snakemake(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return super().snakemake("--configfile", "small.yaml", *arguments)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("commands"))


@dataclass(frozen=True)
class Partial:
    """The experiment when one of its two runs had failed: what Snakemake said, the partial page,
    whether there was a report, and when the weights of the other run were written.
    """

    said: str
    page: str
    reported: bool
    trained: int


@pytest.fixture(scope="module")
def partial(small: Small) -> Partial:
    """In a job of several nodes, of Slurm's and of PBS's."""
    # Where the state is to be written there is a file: seed 1 cannot train.
    blocked = small.results / "seed~1" / "state"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("")
    (small.path / "nodes").write_text("n1\nn1\nn2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_NUM_NODES", "3")
        patch.setenv("PBS_NODEFILE", "nodes")
        failed = small.snakemake()
    assert failed.returncode == 1
    blocked.unlink()
    return Partial(
        failed.stdout,
        (small.results / "partial" / "report.html").read_text(),
        (small.results / "report.html").exists(),
        (small.results / "seed~0" / "model.safetensors").stat().st_mtime_ns,
    )


@pytest.fixture(scope="module")
def completed(small: Small, partial: Partial) -> str:
    """What the same command said after that, in a job of one node."""
    assert partial
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_NUM_NODES", "1")
        return small.run()


def test_an_experiment_file_stands_alone(small: Small) -> None:
    """It is laid over the schema's defaults, not over the quickstart; a dry run says what it would
    do.
    """
    said = small.run("-n", "-p", "--forceall")
    assert jobs_in(said) == {
        "fetch": 1, "stage": 2, "train": 2, "evaluate": 2, "aggregate": 1, "all": 1,
    }  # fmt: skip
    # The configuration may be longer than an argument.
    assert " --config @results/small/experiment.json " in said
    assert "experiment small: 2 runs, varying seed (0, 1)" in said.splitlines()
    assert '"optimizer"' not in said
    assert "--views plain" in said


REFUSED = [
    (
        ["--group-components", "training=2"],
        "--group-components: every run is a job of its own size; leave the option out",
    ),
    (
        # Another resource of the rule leaves its nodes as they are.
        ["--set-resources", "stage:runtime=5", "train:nodes=3"],
        "--set-resources train:nodes=3: the run has nodes: 1; change nodes in the configuration "
        "instead",
    ),
    (
        ["--sdm", "apptainer"],
        "--sdm apptainer: no container is defined here; run Snakemake inside yours instead "
        "(docs/environments.md)",
    ),
    (
        ["--sdm", "conda"],
        "--sdm conda: there is no conda on PATH; leave the option out, the environment of `make` "
        "is used",
    ),
]


@pytest.mark.parametrize(
    ("options", "line"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED]
)
def test_an_option_that_does_not_go_with_it_is_refused(
    small: Small, options: list[str], line: str
) -> None:
    done = small.snakemake(*options, "--config", "experiment=refused")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == line
    assert not (small.path / "results/refused").exists()
    assert "Traceback" not in done.stdout


def test_a_failed_run_leaves_the_others_a_partial_report(partial: Partial) -> None:
    lines = partial.said.splitlines()
    (failed,) = (line for line in lines if line.startswith("small/seed~1: "))
    assert re.fullmatch(
        r"small/seed~1: not finished: train: .*seed~1/state.*; log: results/small/seed~1/train.log",
        failed,
    )
    assert [
        line
        for line in lines
        if re.match(r"small/seed~0: test accuracy \d\d\.\d\d% with one view$", line)
    ]
    assert "partial report of 1 of 2 runs: results/small/partial/report.html" in lines
    assert "Partial: 1 run is missing" in partial.page
    assert "seed~1" in partial.page
    assert "1 run of 1 setting" in partial.page
    assert not partial.reported


def test_a_partial_experiment_is_completed_and_its_results_are_not_replaced_unasked(
    small: Small, partial: Partial, completed: str
) -> None:
    said = completed.splitlines()
    weights = small.results / "seed~0" / "model.safetensors"
    assert weights.stat().st_mtime_ns == partial.trained
    assert not (small.results / "partial").exists()
    assert "2 runs of 1 setting" in (small.results / "report.html").read_text()
    assert sum(": test accuracy " in line and line.startswith("small/seed~") for line in said) == 2
    assert "report: results/small/report.html; table: results/small/summary.csv" in said
    assert any(re.match(r"small/seed~1: epoch 1/1  train loss ", line) for line in said)
    # The commands have what differs from the defaults, and no more.
    assert "label_smoothing" not in completed
    before = weights.read_bytes()
    line = "small: training again would replace finished results: seed~0, seed~1 (epochs 1 -> 2)"
    assert line in small.run("-n", "--config", "epochs=2").splitlines()
    done = small.snakemake("--config", "epochs=2")
    assert done.returncode == 1
    assert (
        done.stdout.splitlines()[-1]
        == f"{line}; give another experiment name, or add --config replace=true"
    )
    assert weights.read_bytes() == before
    # Another test may have left weights that are put back, and evaluated again.
    small.run()
    assert small.jobs() == {}
    for options, line in (
        (
            ["--config", "seed=[0]", "--rerun-triggers", "mtime"],
            "its tables are of other runs than",
        ),
        (["--no-hooks", "-R", "train"], "--no-hooks: a hook keeps finished runs from being"),
    ):
        done = small.snakemake(*options)
        assert done.returncode == 1
        assert line in done.stdout.splitlines()[-1]
    assert weights.read_bytes() == before
    # Another command has written it; nothing begins that would write it again.
    (small.results / "experiment.json").write_text("{}")
    small.run()
    assert json.loads((small.results / "experiment.json").read_text())["seed"] == [0, 1]


IDLE = [
    "warning: this Slurm job has 3 nodes, and profiles/local uses only this one; leave the job and "
    "run `snakemake --profile profiles/slurm` on the login node, which submits jobs itself",
    "warning: this PBS job has 2 nodes, and profiles/local uses only this one; leave the job and "
    "run `snakemake --profile profiles/pbs` on the login node, or use --config hosts=$PBS_NODEFILE",
]


def test_idle_nodes_of_a_job_are_warned_of(partial: Partial, completed: str) -> None:
    for said, wanted in ((partial.said, IDLE), (completed, [])):
        warnings = [line for line in said.splitlines() if line.startswith("warning: this")]
        assert sorted(warnings) == sorted(wanted)


BACK = "small/seed~1: its earlier results are back"


@pytest.mark.faults
@pytest.mark.usefixtures("completed")
def test_results_stay_until_what_replaces_them_is_finished(small: Small) -> None:
    run = small.results / "seed~1"
    target = ["--", "results/small/seed~1/model.safetensors"]
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.suffix == ".json"}
    failed = small.snakemake("--config", "learning_rate=1e6", "replace=true", *target)
    assert failed.returncode == 1
    assert BACK in failed.stdout.splitlines()
    assert {name: (run / name).read_bytes() for name in before} == before
    # The state of the training that failed stays too.
    assert (run / "state").is_dir()
    small.run("--touch", *target)
    assert (run / "state").is_dir()


@pytest.mark.faults
@pytest.mark.usefixtures("completed")
def test_results_are_put_back_after_a_command_that_was_killed(small: Small) -> None:
    run = small.results / "seed~1"
    before = (run / "model.safetensors").read_bytes()
    config = ["--config", "epochs=100000", "replace=true"]
    process = small.start("--configfile", "small.yaml", *config, "--",
                          "results/small/seed~1/model.safetensors", stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL)  # fmt: skip
    until(lambda: (run / "metrics.csv").exists() and not (run / "run.json").exists(), process)
    process.kill()
    process.wait()
    watch = ["workflow/scripts/watch.py", "results/small", "--once"]
    until(lambda: "seed~1: interrupted" in small.python(*watch).stdout)
    # As with a command that still has to begin other trainings.
    assert BACK not in small.run("--dry-run").splitlines()
    small.run("--unlock")
    said = small.run("--touch", "--", "results/small/seed~1/model.safetensors")
    assert BACK in said.splitlines()
    assert (run / "model.safetensors").read_bytes() == before


@pytest.mark.faults
@pytest.mark.usefixtures("completed")
def test_what_is_damaged_or_gone_is_named_before_anything_is_removed(small: Small) -> None:
    manifest = small.path / "results/data/digits/manifest.json"
    run = small.results / "seed~1"
    whole, times = manifest.read_text(), manifest.stat()
    # Other tests may have left something to be made.
    planned = small.jobs()
    manifest.write_text(whole[:100])
    refused = small.snakemake()
    assert re.search(r"^results/data/digits/manifest.json is damaged.* --force results/data/digits",
                     refused.stdout, re.MULTILINE), refused.stdout  # fmt: skip
    manifest.write_text(whole)
    os.utime(manifest, ns=(times.st_atime_ns, times.st_mtime_ns))
    weights = min((run / "checkpoints").glob("*.safetensors"))
    times = weights.parent.stat()
    weights.rename(small.path / "kept")
    (run / "evaluation.json").rename(small.path / "evaluated")
    refused = small.snakemake()
    assert refused.stdout.splitlines()[-1] == (
        f"small/seed~1 is finished, but checkpoints/{weights.name} is gone; put it back, or delete "
        "its run.json to train it again"
    )
    assert (run / "predictions.csv").exists()
    (small.path / "kept").rename(weights)
    (small.path / "evaluated").rename(run / "evaluation.json")
    os.utime(weights.parent, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert small.jobs() == planned


@pytest.mark.faults
@pytest.mark.usefixtures("completed")
def test_a_finished_run_needs_the_weights_no_more_from_which_it_started(small: Small) -> None:
    weights = small.path / "first.safetensors"
    weights.write_bytes((small.results / "seed~1/model.safetensors").read_bytes())
    warm = ["--config", "experiment=warm", "seed=0", f"initial_weights={weights.name}"]
    small.run(*warm)
    weights.unlink()
    # To Snakemake it is a run of other inputs.
    refused = small.snakemake(*warm)
    assert refused.stdout.splitlines()[-1] == (
        "warm/run is finished and nothing of it has changed (it has other input files); keep it "
        "with --touch, or train it again with --config replace=true"
    )
    small.run(*warm, "--touch")
    assert small.jobs(*warm) == {}
    (small.path / "results/warm/run/run.json").unlink()
    assert "initial_weights: first.safetensors is not there" in small.snakemake(*warm, "-n").stdout


@pytest.mark.faults
def test_a_second_snakemake_touches_nothing_of_a_run_in_training(small: Small) -> None:
    owned = ["experiment=owned", "epochs=100000", "seed=0"]
    folder = small.path / "results/owned/run"
    first = small.start("--configfile", "small.yaml", "--config", *owned, stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    try:
        until(
            lambda: (
                (folder / "metrics.csv").exists()
                and len((folder / "train.log").read_text().splitlines()) > 3
            ),
        )
        before = {
            path: path.stat().st_ino
            for path in (folder / "train.log", folder / "logs/rank=0.log", folder / "checkpoints")
        }
        said = (folder / "train.log").read_text()
        second = small.snakemake("--nolock", "--config", *owned)
        assert second.returncode == 1
        assert re.fullmatch(
            (
                r"results/owned/run is being trained by process \d+( \(start \d+\))? on \S+; "
                r"wait until it has ended, .*"
            ),
            second.stdout.splitlines()[-1],
        )
        # And if its jobs were in the queue already: launch looks before it touches anything.
        own = [
            "--log",
            folder / "train.log",
            "--rank-logs",
            folder / "logs",
            "--state",
            folder / "state",
        ]
        launch = ["python", "workflow/scripts/launch.py", *own, "--", "workflow/scripts/train.py"]
        third = subprocess.run(
            launch,
            cwd=small.path,
            env=small.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert third.returncode == 1
        assert re.search(
            r"^launch: \S.*results/owned/run is being trained by process \d+",
            third.stderr,
            re.MULTILINE,
        )
        assert {path: path.stat().st_ino for path in before} == before
        assert (folder / "train.log").read_text().startswith(said)
        # A Snakemake that removes the log of a run in training removes a link.
        assert (folder / "train.log").is_symlink()
        assert (folder / "train.log").resolve() == (folder / "logs/train.log").resolve()
    finally:
        os.killpg(first.pid, signal.SIGINT)
        first.wait()


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_told_for_the_run_that_it_stopped(small: Small) -> None:
    folder = small.path / "results" / "full"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    try:
        done = small.snakemake("--config", "experiment=full", "seed=0")
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert done.returncode == 1
    # The command line wins over the file.
    assert "experiment full: 1 run, nothing varies" in done.stdout
    (line,) = (
        line for line in done.stdout.splitlines() if line.startswith("full/run: not finished: ")
    )
    assert "No space left on device" in line
    assert "Traceback" not in done.stdout


def test_all_runs_with_device_auto_have_the_same_kind_of_device(untouched: Checkout) -> None:
    """The GPUs are invented; `launch` only passes their numbers on."""
    said = untouched.snakemake("-n", "-p", "--config", "nodes=[1,2]").stdout
    commands = re.findall(r"(python \S*/launch\.py .* --device .*)$", said, re.MULTILINE)
    assert len(commands) == 2, said

    def gpus(command: str, visible: str) -> set[str]:
        done = subprocess.run(
            command.replace("launch.py ", "launch.py --dry-run ", 1),
            shell=True,
            cwd=untouched.path,
            env=untouched.environment | {"CUDA_VISIBLE_DEVICES": visible},
            capture_output=True,
            text=True,
            check=True,
        )
        return set(re.findall(r"CUDA_VISIBLE_DEVICES=(\S*)", done.stdout.replace("''", "")))

    # One GPU is enough for the first run only.
    assert [gpus(command, "0") for command in commands] == [{""}, {""}]
    assert sorted(map(sorted, (gpus(command, "0,1") for command in commands))) == [
        ["0"],
        ["0", "1"],
    ]
