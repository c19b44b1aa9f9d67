"""The test cluster is real: its own nodes, daemons and failures, and no trace on the host."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.handle import PROGRAM, Cluster
from waiting import until


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def everywhere(cluster: Cluster, script: str) -> list[str]:
    return said(
        cluster.run(
            "srun",
            f"--nodes={len(cluster.nodes)}",
            "--ntasks-per-node=1",
            "bash",
            "-c",
            script,
            cwd=cluster.shared,
        )
    )


def test_nodes_have_a_name_and_an_address(cluster: Cluster) -> None:
    assert all(map(cluster.usable, cluster.nodes))
    assert everywhere(cluster, "hostname") == cluster.nodes
    addresses = everywhere(cluster, "echo $(hostname) $(hostname -I)")
    assert addresses == [
        f"{node} 10.77.0.{10 + number}" for number, node in enumerate(cluster.nodes, start=1)
    ]
    for node in cluster.nodes:
        assert cluster.run("getent", "hosts", node, node=cluster.nodes[0]).returncode == 0


def test_folders_of_their_own(cluster: Cluster) -> None:
    files = [f"{folder}/whose" for folder in ("/scratch", "/tmp", "/dev/shm")]
    assert everywhere(cluster, f"hostname | tee {' '.join(files)}") == cluster.nodes
    try:
        whose = everywhere(cluster, f"paste -d' ' {' '.join(files)}")
        assert whose == [" ".join([node] * 3) for node in cluster.nodes]
        assert not any(Path(file).exists() for file in files)
    finally:
        everywhere(cluster, f"rm {' '.join(files)}")


def test_everything_else_is_shared(cluster: Cluster) -> None:
    here = Path(__file__)
    (cluster.shared / "note").write_text("seen\n")
    try:
        assert everywhere(cluster, "cat note") == ["seen"] * len(cluster.nodes)
        assert everywhere(cluster, f"wc -c < '{here}'") == [str(here.stat().st_size)] * len(
            cluster.nodes
        )
    finally:
        (cluster.shared / "note").unlink()


def test_gpus_are_handed_out(cluster: Cluster) -> None:
    both = 'echo $CUDA_VISIBLE_DEVICES; sleep 1; echo "of $SLURM_GPUS_ON_NODE"'
    jobs = [
        cluster.popen(
            "srun", "--nodelist=n1", "--gres=gpu:2", "bash", "-c", both, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = sorted(job.communicate()[0].splitlines() for job in jobs)
    assert outputs == [["0,1", "of 2"], ["2,3", "of 2"]]
    assert cluster.run("srun", "--gres=gpu:4", "true").returncode == 0
    more = cluster.run("srun", "--gres=gpu:5", "true")
    assert more.returncode == 1
    assert "Requested node configuration is not available" in more.stderr


def test_run_passes_on_status_folder_and_environment(cluster: Cluster) -> None:
    assert cluster.run("bash", "-c", "exit 7").returncode == 7
    assert cluster.run("bash", "-c", "kill -KILL $$").returncode == -signal.SIGKILL
    assert cluster.run("no-such-command").returncode == 127
    assert said(
        cluster.run("bash", "-c", "pwd; echo $ADDED", cwd=cluster.shared, env={"ADDED": "too"})
    ) == [str(cluster.shared), "too"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_passes_on_signals(cluster: Cluster, number: signal.Signals) -> None:
    script = (
        "import signal, time\ntry:\n signal.signal(15, signal.default_int_handler); "
        "print(1, flush=True); time.sleep(60)\n"
    )
    script += "except KeyboardInterrupt:\n time.sleep(0.5); print('in order')"
    command = cluster.popen(sys.executable, "-c", script, node="n2", stdout=subprocess.PIPE)
    assert command.stdout.readline() == "1\n"
    command.send_signal(number)
    assert command.communicate()[0] == "in order\n"
    assert command.returncode == 0


def test_nothing_outlives_a_killed_run(cluster: Cluster) -> None:
    command = cluster.popen("sleep", "1234", node="n2")
    until(lambda: "sleep 1234" in cluster.processes("n2").values())
    command.kill()
    until(lambda: "sleep 1234" not in cluster.processes("n2").values())
    command.wait()


@pytest.mark.faults
def test_power_cut_and_lost_cable(cluster: Cluster) -> None:
    job = cluster.popen(
        "srun", "--nodelist=n2,n3", "--no-kill", "sleep", "123", stderr=subprocess.DEVNULL
    )
    try:
        assert cluster.run("ping", "-c1", "-W1", "n3", node="n1").returncode == 0
        until(
            lambda: all(
                "/usr/bin/sleep 123" in cluster.processes(node).values() for node in ("n2", "n3")
            ),
        )
        cluster.kill("n2")
        cluster.cut("n3")
        until(lambda: not cluster.processes("n2"))
        # 1 means no answer; 2 or 127 would be another problem.
        assert cluster.run("ping", "-c1", "-W1", "n3", node="n1").returncode == 1
        assert "slurmd -D" in cluster.processes("n3").values()
        until(lambda: {cluster.state("n2"), cluster.state("n3")} == {"down*"})
        assert cluster.state("n1") == "idle"
        cluster.join("n3")
        cluster.start("n2")
        cluster.start("n3")
        assert everywhere(cluster, "hostname") == cluster.nodes
    finally:
        job.terminate()
        job.wait()
        for node in ("n2", "n3"):
            cluster.start(node)
        # Slurm may leave processes on the node that was cut off.
        for pid, line in cluster.processes("n3").items():
            if line == "/usr/bin/sleep 123":
                os.kill(pid, signal.SIGKILL)


@pytest.mark.faults
def test_installing_waits_for_whoever_else_installs(cluster: Cluster) -> None:
    """dpkg's lock, held by another process for three seconds; apt-get would fail at once."""
    assert cluster.nodes
    hold = "import fcntl, time; file = open('/var/lib/dpkg/lock-frontend', 'w'); "
    hold += "fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); time.sleep(3)"
    holder = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "\n"
    script = f"import sys; sys.path.insert(0, {str(Path(PROGRAM[1]).parent)!r}); import cluster; "
    script += (
        "done = cluster.apt_get('install', '--yes', 'tini', seconds=60); "
        "print(done.stdout); sys.exit(done.returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert holder.wait() == 0
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_second_one_is_refused(cluster: Cluster) -> None:
    before = cluster.processes()
    done = subprocess.run([*PROGRAM, "up"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len((done.stdout + done.stderr).splitlines()) == 1
    assert "up already" in done.stderr
    assert cluster.processes().items() >= before.items()
    assert all(map(cluster.usable, cluster.nodes))


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a short path: the sockets of Slurm's daemons lie deep in it, and the path of a
    socket has 107 bytes.
    """
    folder = tmp_path_factory.getbasetemp() / "o"
    folder.mkdir()
    yield folder
    folder.rmdir()


@pytest.fixture
def elsewhere(cluster: Cluster, place: Path) -> Iterator[dict[str, str]]:
    """The environment for another cluster, beside the one of the tests. It may be used where that
    one came up.
    """
    assert cluster.nodes
    environment = os.environ | {"CLUSTER_FOLDER": str(place), "TEST_PREFIX": "other"}
    # Its folder's name has no worker in it.
    environment.pop("PYTEST_XDIST_WORKER", None)
    yield environment
    program("down", environment)


def program(verb: str, environment: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [*PROGRAM, verb, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def living(folder: Path) -> list[int]:
    """Processes that know of a folder: all that a cluster in it has started do."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                str(folder).encode()
                in process.joinpath("environ").read_bytes()
                + process.joinpath("cmdline").read_bytes()
            ):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def host() -> list[object]:
    """What is here of Slurm and of networks, and what is mounted."""
    folders = [
        Path("/"),
        Path("/run"),
        Path("/run/munge"),
        Path("/etc/slurm"),
        Path("/etc/munge"),
        Path("/sys/class/net"),
    ]
    listed = [
        sorted(entry.name for entry in folder.iterdir()) for folder in folders if folder.exists()
    ]
    return [
        listed,
        Path("/etc/hosts").read_bytes(),
        Path("/proc/self/mounts").read_text(),
        os.uname().nodename,
    ]


@pytest.mark.faults
def test_it_ends_with_a_killed_starter_and_the_host_does_not_notice(
    elsewhere: dict[str, str], place: Path
) -> None:
    before = host()
    script = "import subprocess, sys, time; subprocess.run(sys.argv[1:]); time.sleep(600)"
    starter = subprocess.Popen(
        [sys.executable, "-c", script, *PROGRAM, "up", "--nodes=1", "--end-with-parent"],
        env=elsewhere,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any(line.startswith("up in") for line in starter.stdout)
    assert host() == before
    assert living(place)
    starter.kill()
    starter.wait()
    until(lambda: not living(place))
    # What the killed one has left does not stop the next.
    program("up", elsewhere, "--nodes=1")
    assert host() == before
    program("run", elsewhere, "--", "srun", "ls", str(place / "other-slurm/shared"))
    for _ in range(2):
        program("down", elsewhere)
        assert not living(place)
        assert list(place.iterdir()) == []
    assert host() == before


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_takes_itself_back(
    elsewhere: dict[str, str], place: Path, number: signal.Signals
) -> None:
    starter = subprocess.Popen(
        [*PROGRAM, "up", "--nodes=1"], env=elsewhere, stdout=subprocess.PIPE, text=True
    )
    assert any(line.endswith("mariadbd\n") for line in starter.stdout)
    starter.send_signal(number)
    assert starter.wait() == 128 + number
    assert not living(place)
    assert list(place.iterdir()) == []


@pytest.mark.faults
def test_without_a_daemon_it_does_not_come_up_or_has_no_accounting(
    elsewhere: dict[str, str], place: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(Path(PROGRAM[1]).parent, broken / "tests/cluster")

    def break_and_up(name: str) -> tuple[int, str]:
        with (broken / f"tests/cluster/{name}.conf").open("a") as file:
            file.write("NoSuchSetting=1\n")
        done = subprocess.run(
            [sys.executable, broken / "tests/cluster/cluster.py", "up", "--nodes=1"],
            env=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert "NoSuchSetting" in done.stdout
        return done.returncode, done.stdout

    status, said = break_and_up("slurmdbd")
    assert status == 0, said
    assert re.search("slurmdbd did not come up: .*: this cluster has no accounting", said)
    program("run", elsewhere, "--", "srun", "hostname")
    program("down", elsewhere)
    status, said = break_and_up("slurm")
    assert status == 1
    assert "slurmctld did not come up" in said.splitlines()[-1]
    assert not (place / "other-slurm").exists()
