"""Whole experiments through `snakemake --profile profiles/slurm`, on a real Slurm."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkout import SlurmCheckout, jobs_in
from cluster.handle import Cluster
from submissions import TINY, cheap, sha256, submitted
from trainings import train_on_ranks
from waiting import until

TEST_IMAGES = 355


def accounted(cluster: Cluster, job: str, *fields: str) -> list[str]:
    """Fields of a job in the accounting, once its record is complete."""

    def row() -> list[str]:
        done = cluster.ask(
            "sacct",
            "-X",
            "--noheader",
            "--parsable2",
            f"--jobs={job}",
            f"--format=End,{','.join(fields)}",
        )
        return done.stdout.strip().split("|")

    until(lambda: row()[0] not in ("", "Unknown"))
    return row()[1:]


def hosts(results: Path) -> list[str]:
    return [rank["host"] for rank in json.loads((results / "run.json").read_text())["ranks"]]


def evaluated(results: Path) -> int:
    return json.loads((results / "evaluation.json").read_text())["n"]


@pytest.fixture(scope="module")
def scratch(cluster: Cluster, checkout: SlurmCheckout) -> tuple[str, list[dict]]:
    """What `stage` said, and what it staged where, for a script: a real file system that is full on
    n2, none on n3.
    """
    for node in ("n1", "n2"):
        assert cluster.run("mkdir", "-p", "/scratch/fast", node=node).returncode == 0
    full = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/scratch/fast"]
    assert cluster.run(*full, node="n2").returncode == 0
    try:
        checkout.run(*scripted(checkout), 'scratch=["/scratch/fast"]')
    finally:
        cluster.run("umount", "/scratch/fast", node="n2")
        for node in ("n1", "n2"):
            cluster.run("rm", "-r", "/scratch/fast", node=node)
    results = checkout.path / "results/scratch/run"
    return (results / "stage.log").read_text(), staged_in(results)


def scripted(checkout: SlurmCheckout) -> list[str]:
    """A script on three nodes, which reads staged data."""
    script = 'ls "$LAUNCH_DATA/manifest.json"'
    return [*cheap(checkout, script), "dataset={name: digits}", "experiment=scratch", "nodes=3"]


def staged_in(results: Path) -> list[dict]:
    return json.loads((results / "staging.json").read_text())["nodes"]


# Other resources than the rules', which rerun nothing by themselves and win over them.
SIZES = ["--set-resources", "train:runtime=7", "train:mem_mb=4500", "stage:mem_mb=4500",
         "train:slurm_tmp=auto", "stage:slurm_tmp=auto"]  # fmt: skip


@dataclass
class Again:
    """The same with other resources, in a scratch in which nothing was staged on any node.

    Attributes:
        unforced: what Snakemake said before it was told to run it again.
        job: its id.
        shown: by scontrol.
        staged: where.
    """

    unforced: str
    job: str
    shown: str
    staged: list[dict]


@pytest.fixture(scope="module")
def again(cluster: Cluster, checkout: SlurmCheckout, scratch: tuple[str, list[dict]]) -> Again:
    assert scratch
    for node in cluster.nodes:
        cluster.run("bash", "-c", "rm -rf /scratch/ddp-data-*", node=node)
    command = [*scripted(checkout), 'scratch=["/scratch"]']
    unforced = checkout.run(*command, *SIZES)
    results = checkout.path / "results/scratch/run"
    (results / "staging.json").unlink()
    (job,) = submitted(checkout.run(*command, "replace=true", *SIZES, "--forcerun", "train"))
    shown = cluster.run("scontrol", "show", "job", job).stdout
    return Again(unforced, job, shown, staged_in(results))


FIRST = [*TINY, "experiment=first", "nodes=3"]


@dataclass
class First:
    """An experiment on three nodes, on which its data are staged already. At first, no node is in
    service.

    Attributes:
        waits: the first line of `watch`, before there is one.
        seen: its other lines, to its end.
        said: by Snakemake.
    """

    waits: str
    seen: str
    said: str


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def first(cluster: Cluster, checkout: SlurmCheckout, again: Again) -> First:
    assert again
    path = checkout.path / "first.out"
    # Whatever fails here: Snakemake would submit its jobs again.
    with ExitStack() as ends:
        with ExitStack() as drained:
            for node in cluster.nodes:
                cluster.drain(node)
                drained.callback(cluster.start, node)
            with path.open("w") as out:
                snakemake = checkout.start(*FIRST, stdout=out, stderr=subprocess.STDOUT)
            ends.callback(end, snakemake)
            pending = re.compile(r": PENDING \(.+\)$", re.MULTILINE)
            until(lambda: pending.search(path.read_text()), snakemake)
            # For the next experiment, which is not that of the jobs that wait.
            config = checkout.path / "config/digits.yaml"
            before = config.read_text()
            ends.callback(config.write_text, before)
            config.write_text(f"{before}\nmomentum: 0.5\n")
            watch = subprocess.Popen(
                [sys.executable, "workflow/scripts/watch.py", "results/first", "--every", "1"],
                cwd=checkout.path,
                stdout=subprocess.PIPE,
                text=True,
            )
            ends.callback(end, watch)
            assert watch.stdout is not None
            waits = watch.stdout.readline()
        assert snakemake.wait() == 0, path.read_text()
        return First(waits, watch.communicate()[0], path.read_text())


def test_stage_and_train_are_one_job_on_the_nodes_asked_for(
    cluster: Cluster, checkout: SlurmCheckout, first: First
) -> None:
    """A second command does nothing; a failed stage is run again alone."""
    training, evaluation = submitted(first.said)
    assert accounted(cluster, training, "State", "NNodes", "NodeList", "ReqCPUS") == [
        "COMPLETED",
        "3",
        "n[1-3]",
        "3",
    ]
    assert accounted(cluster, evaluation, "State", "NNodes", "ReqCPUS") == ["COMPLETED", "1", "4"]
    results = checkout.path / "results/first/run"
    assert hosts(results) == ["n1", "n2", "n3"]
    assert sorted(path.name for path in (results / "logs").iterdir()) == [
        "launcher.log", "rank=0.log", "rank=1.log", "rank=2.log", "train.log",
    ]  # fmt: skip
    assert evaluated(results) == TEST_IMAGES
    assert json.loads((results / "run.json").read_text())["config"]["momentum"] != 0.5
    assert (checkout.path / "results/first/figures/accuracy.svg").exists()
    assert "slurm: accounting works; job states come from sacct" in first.said
    assert "Nothing to be done" in checkout.run(*FIRST)
    weights = (results / "model.safetensors").stat().st_mtime_ns
    before = (results / "evaluation.json").read_bytes()
    (results / "evaluation.json").unlink()
    (job,) = submitted(checkout.run("--until", "evaluate", *FIRST))
    assert accounted(cluster, job, "NNodes") == ["1"]
    assert (results / "evaluation.json").read_bytes() == before
    assert (results / "model.safetensors").stat().st_mtime_ns == weights


def test_states_reasons_nodes_and_logs_are_shown_as_they_change(
    checkout: SlurmCheckout, first: First
) -> None:
    (job, _) = submitted(first.said)
    what = rf"^slurm: job {job}, stage and train of first/run, log results/first/run/train\.log: "
    changes = what + r"PENDING \(.+\)$[\s\S]*" + what + r"RUNNING on n\[1-3\]$"
    assert re.search(changes, first.said, re.MULTILINE), first.said
    print(first.waits, first.seen, sep="")
    waits = rf"run: waiting: job {job}: PENDING \(.+\) since [0-9:]+$"
    assert re.match(waits, first.waits), first.waits
    assert re.search(r"^run: running on n1", first.seen, re.MULTILINE)
    assert re.search(r"^run: trained, epoch 2/2, train_loss ", first.seen, re.MULTILINE)
    assert not (checkout.path / "results/first/jobs.json").exists()
    assert not re.search(r'"label_smoothing"', first.said)


def test_other_resources_rerun_nothing_and_win_over_those_of_the_rules(
    cluster: Cluster, again: Again
) -> None:
    assert jobs_in(again.unforced) == {}
    # The time of both rules, 10 and 7 minutes; 4,500 MB on each of three nodes.
    assert accounted(cluster, again.job, "Timelimit", "ReqMem") == ["00:17:00", "13500M"]
    # 200 MB, as for every built-in data set, and 1,000 to spare.
    assert "MinTmpDiskNode=1200M" in again.shown


def test_the_next_job_on_a_node_reuses_what_is_staged_and_comes_to_the_weights_of_one_machine(
    checkout: SlurmCheckout, again: Again, first: First
) -> None:
    """The same geometry on loopback: what differs is the network alone."""
    assert first
    results, local = (checkout.path / f"results/{name}/run" for name in ("first", "local"))
    for staged, status in ((again.staged, "fresh"), (staged_in(results), "reused")):
        assert [
            (node["host"], node["status"], node["path"].startswith("/scratch/ddp-data-"))
            for node in staged
        ] == [(node, status, True) for node in ("n1", "n2", "n3")]
    run = json.loads((results / "run.json").read_text())["config"]
    train_on_ranks(run, checkout.path / "results/data/digits", local, 3, cwd=checkout.path)
    assert sha256(results / "model.safetensors") == sha256(local / "model.safetensors")


def test_two_by_two_ranks_on_an_odd_list_of_nodes(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    script = 'touch "$LAUNCH_RESULTS/$(uname -n) $RANK"'
    cluster.drain("n2")
    try:
        said = checkout.run(*cheap(checkout, script), "experiment=odd", "nodes=2",
                            "nproc_per_node=2", "launcher=torchrun")  # fmt: skip
    finally:
        cluster.start("n2")
    (job,) = submitted(said)
    assert accounted(cluster, job, "NNodes", "NodeList") == ["2", "n[1,3]"]
    ranks = {path.name for path in (checkout.path / "results/odd/run/work").glob("n? ?")}
    assert ranks == {"n1 0", "n1 1", "n3 2", "n3 3"}


def test_a_full_and_a_missing_scratch_are_shown_and_the_run_goes_on(
    scratch: tuple[str, list[dict]],
) -> None:
    log, nodes = scratch
    assert "stage: n1: fresh /scratch/fast/ddp-data-" in log
    assert [node["status"] for node in nodes] == ["fresh", "fallback", "fallback"]
    assert re.search(
        r"/scratch/fast/\S+: [01]\.\d MB free, the data need 5\.5 MB", nodes[1]["reason"]
    )
    assert nodes[2]["reason"] == "/scratch/fast: no such folder"


MISTAKES = {
    "slurm_partition=nope": "slurm: sbatch would refuse a job: ",
    "slurm_account=nope": (
        "slurm: The given account nope appears to be invalid. Available accounts: "
    ),
    "constraint=nope": "slurm: sbatch would refuse a job: ",
    "slurm_extra=--licenses=nope": "slurm: sbatch would refuse a job: ",
    "slurm_tmp=50G": "slurm: slurm_tmp: 51200 MB a node are asked for, the largest TmpDisk of main "
    "is 50000; ",
    "slurm_extra=--signal=B:USR1@120": "slurm: slurm_extra: --signal=B: warns the batch script ",
    "slurm_extra=--time=5": (
        "slurm: The --runtime/time-limit option is not allowed in the 'slurm_extra' parameter. "
    ),
}
# What reaches sbatch by options of Snakemake.
OPTIONS = {
    "--slurm-qos=nope": "Invalid qos specification",
    "--slurm-reservation=nope": "reservation is invalid",
}
TOO_LARGE = {
    "mem_mb=99999": "slurm: mem_mb: 99999 MB a node are asked for, "
    "the largest node of main has 16000; ",
    "cpus_per_task=9": (
        "slurm: cpus_per_task: 9 CPUs a node are asked for, the largest node of main has 8; "
    ),
    "gres=gpu:5": "slurm: gres: 5 GPUs a node are asked for, the largest node of main has 4; ",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_what_slurm_would_never_take_is_said_before_anything_starts(
    checkout: SlurmCheckout, given: str
) -> None:
    done = checkout.snakemake("--default-resources", given, *TINY, "experiment=mistaken", "nodes=3")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(MISTAKES[given])
    assert not (checkout.path / "results/mistaken").exists()


def test_stage_and_train_are_one_job_in_one_partition(checkout: SlurmCheckout) -> None:
    given = ["stage:slurm_partition=main", "train:slurm_partition=other"]
    done = checkout.snakemake("--set-resources", *given, *TINY, "experiment=mistaken")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert re.match(
        r"slurm: slurm_partition: \w+ asks for \w+, \w+ for \w+, and they are one job; ", last
    ), last
    assert "invalid option" not in done.stdout


def test_what_a_site_tells_with_every_job_is_no_refusal(
    checkout: SlurmCheckout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\necho 'sbatch: Our policy: invalid requests are not permitted' >&2\n"
        "echo 'No submission failed in the last 12 hours' >&2\necho 300 of 500 hours are left\n"
        f'exec {shutil.which("sbatch")} "$@"\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = checkout.run(*cheap(checkout), "experiment=polite")
    assert len(submitted(said)) == 1
    told = (
        "slurm: sbatch says: sbatch: Our policy: invalid requests are not permitted No submission"
    )
    assert said.count(told) == 1


def test_jobs_beyond_a_limit_are_submitted_when_others_have_ended(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    def limit(jobs: int) -> None:
        change = ["sacctmgr", "--immediate", "modify", "user", "root", "set", f"maxsubmit={jobs}"]
        assert cluster.run(*change, as_root=True).returncode == 0

    limit(1)
    try:
        said = checkout.run(*cheap(checkout), "seed=[0, 1]", "experiment=limited")
    finally:
        limit(-1)
    told = "slurm: sbatch: AssocMaxSubmitJobLimit; jobs are submitted when others have ended"
    assert said.count(told) == 1
    assert len(list((checkout.path / "results/limited").glob("*/result.json"))) == 2


def test_a_submission_that_the_plugin_cannot_follow_ends_the_command(
    checkout: SlurmCheckout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own handler of errors fails, in a thread, for the group of stage and train."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho welcome\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = checkout.snakemake(*TINY, "nodes=1", "experiment=lost")
    assert done.returncode == 1
    assert "lost/run: not finished: the submission failed: " in done.stdout


def test_an_environment_whose_path_a_job_cannot_start_is_refused(
    checkout: SlurmCheckout, cluster: Cluster
) -> None:
    environment = checkout.path.parent / "my environment"
    environment.symlink_to(sys.prefix)
    command = [f"{environment}/bin/python", "-m", "snakemake", "--profile", "profiles/slurm"]
    done = cluster.run(*command, *TINY, "experiment=blank", cwd=checkout.path)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert "my environment/bin/python: Snakemake's jobs cannot start a Python in a path" in last


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_the_plugin_is_checked_too(checkout: SlurmCheckout, option: str) -> None:
    done = checkout.snakemake(option, *TINY, "experiment=mistaken")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("slurm: sbatch would refuse a job: ")
    assert OPTIONS[option].lower() in last.lower()
    assert not (checkout.path / "results/mistaken").exists()


@pytest.mark.parametrize("larger", TOO_LARGE)
def test_more_than_any_node_has_is_refused(
    cluster: Cluster, checkout: SlurmCheckout, larger: str
) -> None:
    done = checkout.snakemake(
        "--set-resources",
        f"train:{larger}",
        f"stage:{larger}",
        *TINY,
        "experiment=large",
        "nodes=3",
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(TOO_LARGE[larger])
    assert_nothing_queued(cluster)


def test_the_time_of_the_whole_job_is_compared_with_the_partition_s(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    """stage's 10 minutes and train's 120; Slurm itself would accept the job and leave it pending
    for ever.
    """
    assert cluster.run("scontrol", "update", "partitionname=main", "maxtime=120").returncode == 0
    try:
        done = checkout.snakemake(*TINY, "experiment=long")
    finally:
        assert (
            cluster.run("scontrol", "update", "partitionname=main", "maxtime=INFINITE").returncode
            == 0
        )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == (
        "slurm: runtime: 130 minutes are asked for, main allows 120; stage and train are one job, "
        "their times are added: "
        "--set-resources train:runtime=…"
    )
    assert_nothing_queued(cluster)


def test_a_refused_submission_shows_sbatch_s_own_words(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    """What the check before could not know: the partition goes down while the data are fetched."""
    shutil.rmtree(checkout.path / "results/data/digits", ignore_errors=True)
    process = checkout.start(
        *TINY, "nodes=1", "experiment=refused", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said = ""
    try:
        for line in process.stdout:
            said += line
            if "rule fetch:" in line:
                assert (
                    cluster.run(
                        "scontrol", "update", "partitionname=main", "state=inactive"
                    ).returncode
                    == 0
                )
    finally:
        assert cluster.run("scontrol", "update", "partitionname=main", "state=up").returncode == 0
    assert process.wait() == 1
    assert re.search(
        (
            r"^refused/run: not finished: sbatch refused the job: Batch job submission "
            r"failed: .*[Pp]artition.*$"
        ),
        said,
        re.MULTILINE,
    )


def assert_nothing_queued(cluster: Cluster) -> None:
    assert cluster.jobs() == []


@pytest.mark.faults
def test_a_controller_that_does_not_answer_is_said_in_time(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    (controller,) = (
        pid for pid, line in cluster.processes().items() if line.startswith("slurmctld")
    )
    os.kill(controller, signal.SIGSTOP)
    try:
        done = checkout.snakemake(*TINY, "experiment=unanswered")
    finally:
        os.kill(controller, signal.SIGCONT)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("slurm: Slurm's controller does not answer (")
    assert "Traceback" not in done.stdout


@pytest.mark.faults
def test_without_accounting_squeue_is_asked_and_it_is_said(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    """slurmdbd stopped, so that it accepts connections and never answers: the case in which
    Snakemake's sacct waits for ever.
    """
    (database,) = (pid for pid, line in cluster.processes().items() if line.startswith("slurmdbd"))
    os.kill(database, signal.SIGSTOP)
    try:
        said = checkout.run(*cheap(checkout), "experiment=unaccounted")
    finally:
        os.kill(database, signal.SIGCONT)
    assert "slurm: sacct: no answer within 20 s; job states come from squeue" in said
    assert (checkout.path / "results/unaccounted/run/result.json").exists()


@pytest.mark.faults
def test_a_node_with_a_full_tmp_trains_all_the_same(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    """A real file system, full to the last byte, on the only node in service; TMPDIR is in it."""
    assert (
        cluster.run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/tmp", node="n1").returncode
        == 0
    )
    for node in ("n2", "n3"):
        cluster.drain(node)
    try:
        assert cluster.run("dd", "if=/dev/zero", "of=/tmp/full", "bs=4k", node="n1").returncode == 1
        command = [
            *checkout.inside,
            "env",
            "TMPDIR=/tmp",
            *checkout.command[len(checkout.inside) :],
        ]
        done = subprocess.run(
            [*command, "--until", "evaluate", *TINY, "nodes=1", "experiment=full-tmp"],
            cwd=checkout.path,
            capture_output=True,
            text=True,
            check=False,
        )
        left = cluster.run("sh", "-c", "ls /tmp", node="n1").stdout.split()
    finally:
        cluster.run("umount", "--lazy", "/tmp", node="n1")
        for node in ("n2", "n3"):
            cluster.start(node)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hosts(checkout.path / "results/full-tmp/run") == ["n1"]
    assert "full" in left
