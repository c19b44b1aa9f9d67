"""`launch` in jobs of a real OpenPBS and over ssh: the same weights, and what is refused."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkout import PbsCheckout
from cluster.handle import PbsCluster
from launched import LOGS, NODES, RUN, WAYS, Launched, left, logs_in
from submissions import sha256
from trainings import train_on_ranks
from waiting import until, until_none

SHORT = {"epochs": 1, "global_batch_size": 63, "learning_rate": 0.5}


def test_a_full_scratch_costs_only_the_copy_and_no_weight(
    cluster: PbsCluster, checkout: PbsCheckout, launched: Callable[..., Launched]
) -> None:
    """The agents start any launcher alike; all are compared on Slurm. Over ssh, Snakemake starts
    one.
    """
    full = ("mount", "-t", "tmpfs", "-o", "size=1m,mode=1777", "full", "/scratch")
    assert cluster.run(*full, node="n2", as_root=True).returncode == 0
    try:
        training = launched("short", "pbs", changes=SHORT)
        until(lambda: "status " in training.text)
    finally:
        assert cluster.run("umount", "--lazy", "/scratch", node="n2", as_root=True).returncode == 0
    assert training.text.endswith("status 0\n"), training.text
    assert re.search(r"/scratch.*No space left on device|shared copy", training.text)
    one, data = checkout.path / "results/local", checkout.path / "results/data/digits"
    train_on_ranks(RUN | SHORT | {"nodes": 3}, data, one, 3, cwd=checkout.path)
    found = [sha256(folder / "model.safetensors") for folder in (training.results, one)]
    assert found[0] == found[1]
    assert logs_in(training.results) == LOGS
    until_none(lambda: left(checkout))


@pytest.mark.parametrize("way", WAYS)
def test_the_checks_of_every_scheduler(
    cluster: PbsCluster, checkout: PbsCheckout, way: str
) -> None:
    folder = checkout.path / f"results/checked-{way}"
    folder.mkdir(parents=True)
    cluster.give(folder)
    scheduler = "SCHEDULERS['pbs']" if way == "pbs" else "on_hosts(['n1', 'n2'])"
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = ["workflow/scripts", "tests"]
from manynodes.schedulers.registry import SCHEDULERS, on_hosts
from schedulers import check_in_a_job, check_that_it_ends
for check in (check_in_a_job, check_that_it_ends):
    check({scheduler}, 2, Path({str(folder)!r}))
print("passed")
"""
    command = shlex.join([sys.executable, "-c", code])
    if way == "ssh":
        done = cluster.run("bash", "-c", command, node="n1", cwd=checkout.path)
        assert done.stdout.endswith("passed\n"), done.stderr
        return
    script = folder / "job.sh"
    script.write_text(f"cd {shlex.quote(str(checkout.path))}\n{command} > {folder.name}.out 2>&1\n")
    size = ["-l", "select=2:ncpus=1", "-l", "place=scatter"]
    # qsub understands no path with a blank.
    submit = f"qsub {shlex.join(size)} -o /dev/null -j oe - < {shlex.quote(str(script))}"
    job = cluster.run("bash", "-c", submit).stdout.strip()
    cluster.await_end(job)
    said = (checkout.path / f"{folder.name}.out").read_text()
    assert said.endswith("passed\n"), said


def refused(checkout: PbsCheckout, *options: object, node: str | None = None) -> str:
    """What launch says that refuses to start three nodes."""
    command = [sys.executable, "workflow/scripts/launch.py", "--nodes", 3, *options, "--launcher",
               "none", "--", "workflow/scripts/stage.py"]  # fmt: skip
    done = checkout.cluster.run(*command, cwd=checkout.path, node=node)
    assert done.returncode == 1
    return done.stderr


def test_what_does_not_fit_is_refused_in_one_line(checkout: PbsCheckout) -> None:
    assert "launch: transport pbs works inside a PBS job; " in refused(
        checkout, "--transport", "pbs"
    )
    assert "launch: transport ssh needs hosts: " in refused(checkout, "--transport", "ssh")
    assert "launch: transport pbs takes its nodes from the job; " in refused(
        checkout, "--transport", "pbs", "--hosts", "n1"
    )
    assert "launch: nodes: the run wants 3, hosts has 2: login, n1" in refused(
        checkout, "--hosts", "login", "n1"
    )
    assert "launch: this is login, not n1, the first of the hosts" in refused(
        checkout, "--hosts", *NODES
    )
    assert "launch: hosts: a;b is not the name of a host" in refused(
        checkout, "--hosts", "login", "a;b", "n2"
    )


def test_an_unreachable_host_is_named(checkout: PbsCheckout) -> None:
    said = refused(checkout, "--hosts", "login", "n1", "nowhere")
    line = "nowhere starts no agent: ssh ended with status 255: ssh: Could not resolve hostname"
    assert line in said


def test_the_hosts_are_checked_before_anything_starts(
    cluster: PbsCluster, checkout: PbsCheckout
) -> None:
    """One line for each host: not there, without the folder, with other packages."""
    hosts = "hosts=[login, n1, nowhere, n2, n3]"
    other = checkout.path / "results/other"
    other.mkdir()
    # n1 sees another folder in the place of ours; Python on n2 has another torch.
    hide = f"mount --bind {shlex.quote(str(other))} {shlex.quote(str(checkout.path))}"
    assert cluster.run("bash", "-c", hide, node="n1", as_root=True).returncode == 0
    metadata = next(Path(sys.prefix, "lib").glob("python*/site-packages/torch-*.dist-info"))
    assert (
        cluster.run("mount", "-t", "tmpfs", "x", metadata, node="n2", as_root=True).returncode == 0
    )
    try:
        done = cluster.run(
            sys.executable, "-m", "snakemake", "--profile", "profiles/ssh", "--configfile",
            "config/digits.yaml", "--config", "experiment=checked", hosts, cwd=checkout.path,
        )  # fmt: skip
    finally:
        for node, path in (("n1", checkout.path), ("n2", metadata)):
            cluster.run("umount", path, node=node, as_root=True)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "ssh: nowhere: cannot be reached: ssh: Could not resolve hostname" in said
    assert "ssh: n1: " in said
    assert "ssh: n2: torch is missing there and " in said
    assert "n3" not in said.partition("ssh: ")[2]
    assert not (checkout.path / "results/checked").exists()
