"""How Snakemake follows, shows and cancels its jobs while parts of a real Slurm are unavailable."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from checkout import SlurmCheckout
from cluster.handle import Cluster
from submissions import cheap, submitted
from waiting import until


def running(cluster: Cluster, daemon: str) -> int:
    """The process number of a daemon of Slurm's."""
    (pid,) = (pid for pid, line in cluster.processes().items() if line.startswith(daemon))
    return pid


@contextmanager
def without(cluster: Cluster, daemon: str) -> Iterator[None]:
    """The daemon is ended, and started at the end. A controller that is killed has not written its
    newest state, and takes a job of the test before for one that has not ended.
    """
    pid = running(cluster, daemon)
    os.kill(pid, signal.SIGTERM)
    until(lambda: not psutil.pid_exists(pid))
    try:
        yield
    finally:
        cluster.start_daemon(daemon)


@contextmanager
def unreachable(cluster: Cluster, daemon: str) -> Iterator[None]:
    """The daemon does not answer; a killed controller would forget that it has started the job."""
    pid = running(cluster, daemon)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Following:
    """A Snakemake in the background, with its output."""

    def __init__(self, checkout: SlurmCheckout, *arguments: str) -> None:
        self.log = checkout.scratch / f"{arguments[-1]}.log"
        with self.log.open("w") as file:
            # The experiments share the checkout, and no file.
            self.process = checkout.start(
                "--nolock", *arguments, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def await_line(self, pattern: str) -> str:
        until(
            lambda: re.search(pattern, self.said, re.MULTILINE) or self.process.poll() is not None,
        )
        found = re.search(pattern, self.said, re.MULTILINE)
        assert found, self.said
        return found[0]

    def interrupt(self) -> None:
        """Ctrl-C, by somebody who has no patience."""
        self.process.send_signal(signal.SIGINT)
        self.await_line("Terminating processes on user request")
        for _ in range(2):
            time.sleep(0.2)
            self.process.send_signal(signal.SIGINT)
        assert self.process.wait() == 1, self.said
        assert "Traceback" not in self.said


def state(cluster: Cluster, job: str) -> str:
    done = cluster.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.faults
def test_while_accounting_is_away_jobs_are_followed_and_can_be_cancelled(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    options = cheap(checkout, "exec sleep {delay}")
    ends = Following(checkout, *options, "parameters={delay: 10}", "experiment=outage-ends")
    cancelled = Following(
        checkout, *options, "parameters={delay: 1000}", "experiment=outage-cancelled"
    )
    jobs = [
        submitted(which.await_line(r"has been submitted with SLURM jobid \d+"))[0]
        for which in (ends, cancelled)
    ]
    with without(cluster, "slurmdbd"):
        for which in (ends, cancelled):
            which.await_line(
                r"^slurm: sacct gives no job states \(.+\); jobs are not affected; "
                r"asking again until it does$"
            )
        until(lambda: state(cluster, jobs[1]) == "RUNNING")
        cancelled.interrupt()
        until(lambda: state(cluster, jobs[1]) == "CANCELLED")
        until(lambda: state(cluster, jobs[0]) == "COMPLETED")
    assert ends.process.wait() == 0, ends.said
    assert len(re.findall("gives no job states", ends.said)) == 1
    assert re.search(r"^slurm: sacct gives job states again, after \d+ s$", ends.said, re.MULTILINE)


@pytest.mark.faults
def test_while_the_controller_is_away_a_job_starts_and_is_followed(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    """With squeue instead of accounting; the controller is away from between the job's start and
    launch's first question to it.

    The plugin falls back to sacct while the controller is away, so accounting is away too.
    """
    script = 'touch "$LAUNCH_RESULTS/begun"; exec sleep 1000'
    options = [*cheap(checkout, script), "dataset={name: digits}", 'scratch=["/scratch"]']
    following = Following(
        checkout, "--slurm-status-command", "squeue", *options, "experiment=controller"
    )
    (job,) = submitted(following.await_line(r"has been submitted with SLURM jobid \d+"))
    until(lambda: state(cluster, job) == "RUNNING")
    log = checkout.path / "results/controller/run/stage.log"
    assert not log.exists()
    with without(cluster, "slurmdbd"), unreachable(cluster, "slurmctld"):
        following.await_line(
            r"^slurm: (squeue|sacct) gives no job states \(.+\); jobs are not "
            r"affected; asking again until it does$"
        )
        (output,) = (checkout.path / ".snakemake/slurm_logs").rglob(f"{job}.log")
        until(
            lambda: (
                "slurm: the controller does not answer; trying again for 300 s"
                in output.read_text()
            ),
        )
    # A job starts one Snakemake, not the plugin's that starts another one.
    assert output.read_text().count("Building DAG of jobs") == 1
    following.await_line(r"^slurm: squeue gives job states again, after \d+ s$")
    # It runs: what was asked of the controller meanwhile was asked again.
    until((checkout.path / "results/controller/run" / "work" / "begun").exists)
    following.interrupt()
    until(lambda: state(cluster, job) == "CANCELLED")


@pytest.mark.faults
def test_a_job_is_submitted_when_the_controller_is_back_and_cancelled_if_that_is_too_late(
    cluster: Cluster, checkout: SlurmCheckout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens between Snakemake and sbatch, and between sbatch and its answer."""
    folder = checkout.path / "held"
    folder.mkdir()
    wait = f"touch {folder}/$1 && while [ ! -e {folder}/$1.go ]; do sleep 0.1; done"
    (folder / "sbatch").write_text(
        f"#!/bin/bash\nhold() {{ {wait.replace(str(folder), shlex.quote(str(folder)))}; }}\n"
        f'[[ "$*" == *--test-only* ]] || hold before\n{shutil.which("sbatch")} "$@"; status=$?\n'
        '[[ "$*" == *--test-only* ]] || [ $status != 0 ] || hold after\nexit $status\n'
    )
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    before = set(cluster.ask("squeue", "--noheader", "--states=all", "--format=%i").stdout.split())
    following = Following(checkout, *cheap(checkout, "exec sleep 1000"), "experiment=held")
    until((folder / "before").exists)
    with without(cluster, "slurmctld"):
        (folder / "before.go").touch()
        following.await_line(
            r"^slurm: sbatch: Unable to contact slurm controller \(connect failure\); jobs are "
            r"submitted when Slurm's controller answers$"
        )
    until((folder / "after").exists)
    (job,) = set(cluster.jobs()) - before
    following.process.send_signal(signal.SIGINT)
    (folder / "after.go").touch()
    assert following.process.wait() == 1, following.said
    until(lambda: state(cluster, job) == "CANCELLED")
    assert job not in cluster.jobs()


def test_a_job_that_is_cancelled_while_it_is_held_ends_the_command(
    cluster: Cluster, checkout: SlurmCheckout
) -> None:
    """Slurm's accounting lists no job that could never have started. Its time is too short, too."""
    held = ["--set-resources", "train:slurm_extra='--hold'", "train:runtime=1", "stage:runtime=0"]
    following = Following(checkout, *held, *cheap(checkout), "experiment=never")
    (job,) = submitted(following.await_line(r"has been submitted with SLURM jobid \d+"))
    following.await_line(r"PENDING \(JobHeldUser\)")
    assert "slurm: warning: runtime: 1 minutes for staging and training; it stops" in following.said
    assert cluster.run("scancel", job).returncode == 0
    assert following.process.wait() == 1
    assert re.search(r"^never/run: not finished: .*CANCELLED", following.said, re.MULTILINE)
