"""Launching: the reported failure is the true one, and no process stays. Every process is real."""

import json
import os
import pty
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from launch import logged
from manynodes.base import failure as failures
from manynodes.base.errors import Refusal, Stopped
from manynodes.base.failure import Failure, Kind
from manynodes.base.temporary import parent_folder
from manynodes.launching.logs import folder_of_job
from manynodes.launching.ports import refuse_ipv6_only
from manynodes.schedulers.base import Allocation
from node_agent import LOOK
from programs import SCRIPTS, program, train_command
from trainings import CONNECTED, RUN
from waiting import until

HOST = socket.gethostname()


def script(folder: Path, body: str) -> Path:
    path = folder / "some_program.py"
    path.write_text(
        f"import os, sys, time, signal\nrank = int(os.environ.get('RANK', "
        f"os.environ['LAUNCH_NODE_RANK']))\n{body}\n"
    )
    return path


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_success_shows_stdout_and_logs_everything_by_node(tmp_path) -> None:
    path = script(tmp_path, "print(f'out {rank}'); print(f'err {rank}', file=sys.stderr)")
    done = program(
        "launch", "--launcher", "none", "--nodes", 2, "--log", tmp_path / "log", "--", path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split("\n")) == ["", "out 0", "out 1"]
    assert sorted((tmp_path / "log").read_text().splitlines()) == [
        "[node 0] err 0", "[node 0] out 0", "[node 1] err 1", "[node 1] out 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("if rank == 1: sys.exit(3)\ntime.sleep(1e9)", f"node 1 on {HOST} ended with status 3"),
        (
            "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1e9)",
            f"node 1 on {HOST} was ended by SIGKILL; the system does that when memory runs out",
        ),
        (
            "if rank == 1: sys.exit('some_program: no such thing')\ntime.sleep(1e9)",
            f"node 1 on {HOST}: no such thing",
        ),
    ],
    ids=["exit status", "killed", "its own words"],
)
def test_one_node_s_failure_ends_all_and_is_named(tmp_path, body, line) -> None:
    done = program(
        "launch",
        "--launcher",
        "none",
        "--nodes",
        3,
        "--log",
        tmp_path / "log",
        "--",
        script(tmp_path, body),
    )
    assert done.returncode == 1
    assert done.stderr == f"launch: some_program failed: {line}; see {tmp_path}/log\n"


def test_a_program_that_stops_with_status_75_was_preempted(tmp_path) -> None:
    """Any program, with or without a last line, and without a report."""
    for body, shown, told in (
        ("sys.exit(75)", "", f"node 0 on {HOST} stopped"),
        # Without a log, nobody else would keep it.
        ("print('some_program: saved', file=sys.stderr); sys.exit(75)",
         "some_program: saved\n", "saved"),
    ):  # fmt: skip
        done = program("launch", "--launcher", "none", "--", script(tmp_path, body))
        assert done.returncode == 75
        assert done.stderr == (
            f"{shown}launch: some_program was interrupted: {told}; run the same command again\n"
        )


def test_a_rank_s_own_error_comes_through_torchrun(digits, tmp_path) -> None:
    run = '{"dataset": "digits", "nproc_per_node": 1, "global_batch_size": 64}'
    where = ["--nproc-per-node", 2, "--log", tmp_path / "log"]
    done = program("launch", *where, "--", *train_command(run, digits, tmp_path / "out"))
    assert done.returncode == 1
    (first,) = done.stderr.splitlines()
    assert first.startswith("launch: train failed: rank ")
    assert first.endswith(f": 2 processes were started, the run is for 1; see {tmp_path}/log")


def test_a_defect_shows_its_last_lines_and_keeps_its_log(tmp_path) -> None:
    body = "print('before', file=sys.stderr)\nif rank == 1:\n    1 / 0\ntime.sleep(1e9)"
    logs = tmp_path / "logs"
    arguments = [
        "--launcher",
        "none",
        "--nodes",
        2,
        "--log",
        tmp_path / "log",
        "--rank-logs",
        logs,
        "--",
        script(tmp_path, body),
    ]
    done = program("launch", *arguments)
    assert done.returncode == 1
    *shown, last = done.stderr.splitlines()
    error = (
        f"node 1 on {HOST}: ZeroDivisionError: division by zero; its own log is {logs}/node=1.log"
    )
    assert last == f"launch: some_program failed: {error}; see {tmp_path}/log"
    assert shown[0] == f"node 1 on {HOST} | Traceback (most recent call last):"
    assert shown[-1] == f"node 1 on {HOST} | ZeroDivisionError: division by zero"
    assert (tmp_path / "log").read_text().splitlines()[-1] == f"launch: {error}"
    assert (
        (logs / "node=1.log").read_text().startswith("before\nTraceback (most recent call last):\n")
    )


def test_what_is_no_log_is_not_removed(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    launch = ["--launcher", "none", "--rank-logs", tmp_path, "--", script(tmp_path, "")]
    done = program("launch", *launch)
    assert done.returncode == 1
    assert " there is no log of a launch; give a folder of its own" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"
    # What an editor keeps beside an open log, and in the folder of a run anything.
    kept = [
        *(".rank=0.log.swp", "mine.log", "rank=best/model", "rank=0.log.png", "launcher/model"),
        *("start=1/model", "start=one/rank=0.log", "node=0.log.old/model"),
    ]
    removed = ["rank=7.log", "rank=7.log.old", "launcher.log.old", "start=2/rank=0.log"]
    for name in (*kept, *removed):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    done = program("launch", "--state", tmp_path / "state", *launch)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    assert [name for name in removed if (tmp_path / name).exists()] == []
    # In a folder of a user's choice, each of them is something else.
    for name in kept[1:]:
        folder = tmp_path / "chosen" / name
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
        options = ["--launcher", "none", "--rank-logs", folder]
        done = program("launch", *options, "--", script(tmp_path, ""))
        assert " there is no log of a launch; give a folder" in done.stderr
        assert (folder / name).exists()


def test_each_launch_of_a_job_has_a_folder_and_has_it_again_when_the_job_starts_again(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Allocation("Slurm job 7", ("n1", "n2"), ("n1", "n2"), 7, job="7")
    again = replace(job, restarts=1)
    Path("launch-7.1").mkdir()
    mine, other = ["--", "a.py"], ["--", "b.py"]
    found = [str(folder_of_job(*each)) for each in ((job, mine), (job, other), (job, mine))]
    assert found == ["launch-7", "launch-7.2", "launch-7.3"]
    commands = (other, mine, mine, mine)
    found = [str(folder_of_job(again, command)) for command in commands]
    assert found == ["launch-7.2", "launch-7", "launch-7.3", "launch-7.4"]


def test_a_log_that_is_there_goes_on_and_what_is_no_log_stays(tmp_path) -> None:
    log, rest = tmp_path / "all.log", ["--rank-logs", tmp_path / "logs", "--", script(tmp_path, "")]
    log.write_text("mine\n")
    for logs in ("logs", "others"):
        rest[1] = tmp_path / logs
        done = program("launch", "--launcher", "none", "--log", log, *rest)
        assert done.returncode == 0, done.stderr
        assert log.readlink() == Path(logs, "all.log")
    assert (tmp_path / "logs/all.log").read_text() == "mine\n"
    own, device, folder = (tmp_path / name for name in ("own", "device", "folder"))
    own.symlink_to("some_program.py")
    os.mkfifo(device)
    folder.mkdir()
    for path in (own, device, folder):
        before = path.lstat()
        done = program("launch", "--launcher", "none", "--log", path, *rest)
        told = f"launch: --log {path} is no file; give the name of a file, or leave it out\n"
        assert (done.returncode, done.stderr) == (1, told)
        assert path.lstat().st_ino == before.st_ino
    assert not (tmp_path / "failure.json").exists()


@pytest.mark.parametrize("connection", ["gloo", pytest.param("nccl", marks=pytest.mark.faults)])
def test_a_killed_rank_is_named_although_its_peers_fail_first(
    digits, tmp_path, connection: str
) -> None:
    """Peers notice the lost connection before anybody waits for the dead rank; torchrun only
    reports status 1. With NCCL they notice nothing.
    """
    process, ours = training(digits, tmp_path, 2, connection)
    victim = next(
        path
        for path in ours
        if b"train.py" in cmdline(path) and environment(path).get(b"RANK") == b"1" and is_rank(path)
    )
    os.kill(int(victim.name), signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 1
    last = errors.decode().splitlines()[-1]
    assert last.startswith(f"launch: train failed: rank 1 on {HOST} was ended by SIGKILL"), errors
    await_end(ours)


def is_rank(path: Path) -> bool:
    """Whether the process is a rank itself, not its supervisor."""
    return b"supervise.py" not in cmdline(path)


def environment(path: Path) -> dict[bytes, bytes]:
    return dict(
        pair.split(b"=", 1) for pair in (path / "environ").read_bytes().split(b"\0") if b"=" in pair
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_ends_everything_that_was_started(tmp_path, number) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    body = f"""
import subprocess
for pid in (os.getpid(), subprocess.Popen(["sleep", "infinity"]).pid):
    open(f"{pids}/{{pid}}", "w")
time.sleep(1e9)"""
    path = script(tmp_path, body)
    process = subprocess.Popen(
        [
            sys.executable,
            str(SCRIPTS / "launch.py"),
            "--launcher",
            "none",
            "--nodes",
            "2",
            "--",
            str(path),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(list(pids.iterdir())) == 4, process)
    process.send_signal(number)
    assert process.wait() == 75
    assert process.stderr is not None
    assert process.stderr.read() == (
        "launch: some_program was interrupted: stopped; run the same command again\n"
    )
    assert not [pid for pid in (int(path.name) for path in pids.iterdir()) if alive(pid)]


def training(
    digits: Path, folder: Path, nodes: int = 1, connection: str = "gloo"
) -> tuple[subprocess.Popen, list[Path]]:
    """A long training on two processes, after its first epoch; the launch, and /proc/<pid> of all
    its processes.
    """
    each = 2 // nodes
    run = json.dumps(RUN | {"epochs": 1_000_000, "nodes": nodes, "nproc_per_node": each})
    command = [
        sys.executable,
        str(SCRIPTS / "launch.py"),
        *("--nodes", str(nodes), "--nproc-per-node", str(each)),
        "--log",
        str(folder / "log"),
        "--",
        *train_command(run, digits, folder / "out"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=os.environ | CONNECTED[connection],
    )  # fmt: skip
    until((folder / "out" / "metrics.csv").exists, process)
    ours = [path for path in Path("/proc").glob("[0-9]*") if str(folder).encode() in cmdline(path)]
    # launch, an agent for each node, two ranks, and what watches over each
    assert len(ours) == 5 + nodes
    return process, ours


def runs(path: Path, program: str) -> bool:
    """Whether a process runs this program, rather than having it as an argument."""
    return any(word.endswith(program.encode()) for word in cmdline(path).split(b"\0")[1:3])


def await_end(processes: list[Path]) -> None:
    until(lambda: not any(alive(int(path.name)) for path in processes))


def cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_terminal_gets_a_progress_bar_and_the_log_plain_lines(digits, tmp_path) -> None:
    run = (
        '{"dataset": "digits", "widths": [8, 8, 8], "epochs": 2, "global_batch_size": 64, '
        '"flip": false}'
    )
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 120))
    command = [
        sys.executable,
        str(SCRIPTS / "launch.py"),
        *("--cpus", "1", "--log", str(tmp_path / "log")),
        "--",
        *train_command(run, digits, tmp_path / "out"),
    ]
    process = subprocess.Popen(command, stdout=its, stderr=subprocess.PIPE)
    os.close(its)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        pass  # how a pseudo-terminal ends
    assert process.wait() == 0
    assert b"step/s" in shown
    assert b"\r" in shown
    log = (tmp_path / "log").read_text().splitlines()
    assert [line.split("  ")[0] for line in log if ": epoch " in line] == [
        f"{tmp_path.name}/out: epoch {epoch}/2" for epoch in (1, 2)
    ]
    assert len(log) < 10


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_a_signal_during_the_imports_is_told_as_later(tmp_path: Path, name: str) -> None:
    (tmp_path / "yaml.py").write_text(f"import os, signal; os.kill(os.getpid(), signal.{name})\n")
    done = program("launch", "--", "x.py", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    line = f"launch: stopped ({name}) while no rank was running; run the same command again\n"
    assert (done.returncode, done.stderr) == (75, line)


def test_a_stopped_shell_stops_no_rank_and_a_stopped_launch_does(tmp_path) -> None:
    """With ssh, on the first node."""
    seen, looks = tmp_path / "seen", 3
    path = script(tmp_path, f"""
print(os.getpid(), flush=True)
while True:
    open({str(seen)!r}, "a").write("x")
    time.sleep(0.1)
""")  # fmt: skip
    words = [sys.executable, SCRIPTS / "launch.py", "--hosts", "localhost", "--launcher", "none"]
    line = f"{shlex.join(map(str, [*words, '--', path]))} & echo $!; wait $!; echo $?"
    shell = subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True)
    launch, rank = int(shell.stdout.readline()), psutil.Process(int(shell.stdout.readline()))

    def is_stopped() -> bool:
        return rank.status() == psutil.STATUS_STOPPED

    until(seen.exists, shell)
    shell.send_signal(signal.SIGSTOP)
    enough = len(seen.read_text()) + 10 * looks * LOOK
    until(lambda: is_stopped() or len(seen.read_text()) > enough)
    assert not is_stopped()
    os.kill(launch, signal.SIGSTOP)
    until(is_stopped)
    os.kill(launch, signal.SIGCONT)
    until(lambda: not is_stopped())
    os.kill(launch, signal.SIGTERM)
    shell.send_signal(signal.SIGCONT)
    assert shell.communicate()[0] == "75\n"


@pytest.mark.parametrize(("arguments", "line"), [
    (["--nodes", "0", "--", "x.py"], "argument --nodes: 0 is not a whole number of at least 1"),
    (["--output", "", "--", "x.py"], "argument --output: the name is empty; give one"),
    (["--nodes", "two", "--", "x.py"], "argument --nodes: two is not a whole number of at least 1"),
    (["--launcher", "mpirun", "--", "x.py"], "argument --launcher: invalid choice: 'mpirun'"),
    (["--nodes", "2", "x.py", "--timeout", "30"], "put -- before the program"),
    (["--node", "2", "--", "x.py"], "unrecognized arguments: --node"),
    (["--nproc-per-node", "2", "x.py", "--lr", "1"], "put -- before the program, if --lr is"),
])  # fmt: skip
def test_bad_arguments(arguments, line) -> None:
    done = program("launch", *arguments)
    assert done.returncode == 2
    assert line in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("options", "variables", "line"), [
    (["--launcher", "none", "--nproc-per-node", 4], {},
     "--launcher none starts the program once per node; leave --nproc-per-node out, or take "
     "--launcher torchrun"),
    (["--transport", "local", "--hosts", "a"], {},
     "transport local is this machine alone; leave --transport or --hosts out"),
    (["--launcher", "srun"], {},
     "launcher: srun needs transport srun; with transport local use torchrun"),
    (["--transport", "srun"], {"SLURM_JOB_ID": ""},
     "transport srun works inside a Slurm job; start launch in one (sbatch, salloc), or use "
     "--transport local"),
    # As a shell keeps it after a job.
    ([], {"PBS_JOBID": "7.site", "PBS_NODEFILE": ""},
     "PBS_NODEFILE: not set; start launch inside the job; in no job: unset PBS_JOBID, or launch "
     "--transport local"),
    ([], {"SLURM_JOB_ID": "7", "PATH": "/nowhere"},
     "scontrol, Slurm's own command, is not on PATH here; go to where it is, or use "
     "profiles/local; in no job: unset SLURM_JOB_ID, or launch --transport local"),
    (["--cpus", 4, "--cpus-per-proc", 3, "--nodes", 2], {},
     "cpus_per_proc: 2 processes of 3 CPUs need 6, 4 are given; leave --cpus-per-proc out, or "
     "give more --cpus"),
    ([], {"LAUNCH_STOP_AT": "abc"}, "LAUNCH_STOP_AT: abc is not a number"),
    ([], {"LAUNCH_STOP_AT": "12"},
     "LAUNCH_STOP_AT: 12 is not in the future; unset it, or give the seconds since 1970 at which "
     "to stop"),
    ([], {"LAUNCH_STOP_AT": "nan"},
     "LAUNCH_STOP_AT: nan is not in the future; unset it, or give the seconds since 1970 at which "
     "to stop"),
])  # fmt: skip
def test_what_cannot_be_started_so_is_refused(options, variables, line) -> None:
    done = program("launch", *options, "--", "x.py", env=os.environ | variables)
    assert (done.returncode, done.stderr) == (1, f"launch: {line}\n")


def test_a_single_host_that_is_not_here_may_be_meant_as_a_file(tmp_path: Path) -> None:
    hosts, no_file = tmp_path / "hosts", " (there is no such file)"
    hosts.write_text("nowhere.invalid\n")
    for given, also in (("nowhere.invalid", no_file), (hosts, "")):
        said = program("launch", "--hosts", given, "--", "x.py").stderr
        assert f", not nowhere.invalid{also}, the first of the hosts, where rank 0 runs; " in said


def test_every_host_is_a_node_and_a_node_has_its_cpus_on_one_machine_too() -> None:
    done = program("launch", "--dry-run", "--hosts", "a", "b", "--", "x.py")
    assert [line[:11] for line in done.stdout.splitlines()[-2:]] == ["[node 0, a]", "[node 1, b]"]
    shape = ["--nodes", 2, "--nproc-per-node", 2, "--cpus-per-node", 8]
    done = program("launch", "--dry-run", "--transport", "local", *shape, "--", "x.py")
    assert done.stdout.count(" OMP_NUM_THREADS=4 ") == 2


def test_cuda_without_enough_gpus_is_refused_before_anything_starts() -> None:
    done = program(
        "launch",
        "--device",
        "cuda",
        "--nodes",
        2,
        "--",
        "x.py",
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("launch: device: cuda needs 2 GPUs, one per process; ")
    assert done.stderr.endswith(" has 1\n")


def test_a_package_is_no_program() -> None:
    done = program("launch", "--", "-m", "package.train")
    assert done.returncode == 2
    assert "-m is no program; to start a package, use --output FOLDER -- {python} -m" in done.stderr


@pytest.mark.parametrize("word", ["bash", sys.executable, "{python}"])
def test_a_command_is_no_program(word: str) -> None:
    done = program("launch", "--", word, "train.py")
    assert done.returncode == 2
    assert f"{word} is a command: name the file of a Python program, or use --output" in done.stderr


def test_torchrun_is_no_program_of_several_processes(tmp_path: Path) -> None:
    words = ["--", "torchrun", "--nproc-per-node=2", "train.py"]
    done = program("launch", "--nodes", 2, *words)
    assert done.returncode == 2
    assert done.stderr.endswith("torchrun is a command: name the file of a Python program\n")
    output = tmp_path / "run"
    for size in (["--nodes", 2], ["--nproc-per-node", 2]):
        done = program("launch", *size, "--output", output, *words)
        assert (done.returncode, done.stderr) == (
            1, "launch: torchrun would start ranks of its own in each of 2 processes; the workflow "
            "starts them: give {python} train.py, and the processes per node\n"
        )  # fmt: skip
        assert not output.exists()
    assert program("launch", "--dry-run", "--output", output, *words).returncode == 0


def test_accelerate_passes_no_ranks_on_to_a_program_on_cpus(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "import accelerate, os\n"
        "said = [accelerate.Accelerator().num_processes, os.environ['RANK']]\n"
        "open(os.path.join(os.environ['LAUNCH_RESULTS'], said[1]), 'w').write(str(said))\n"
    )
    launch = ["launch", "--nodes", 2, "--output", tmp_path / "run", "--"]
    done = program(*launch, "accelerate", "launch", script)
    assert (done.returncode, done.stderr) == (
        1, "launch: accelerate launch would start ranks of its own in each of 2 processes; the "
        "workflow starts them: give {python} say.py, and the processes per node\n"
    )  # fmt: skip
    assert not (tmp_path / "run").exists()
    done = program(*launch, "{python}", "-m", "accelerate.commands.launch", "--cpu", script)
    work = tmp_path / "run/work"
    assert [(work / rank).read_text() for rank in "01"] == ["[2, '0']", "[2, '1']"], done.stderr


def test_accelerate_is_refused_for_cpus_only_where_there_is_no_gpu_for_certain(
    tmp_path: Path,
) -> None:
    """No driver that is known here does not say so."""
    accelerate = tmp_path / "accelerate"
    accelerate.write_text('#!/bin/sh\necho > "$LAUNCH_RESULTS/$RANK"\n')
    accelerate.chmod(0o755)
    size = ["--hosts", HOST, "--nproc-per-node", 2]
    command = [accelerate, "launch", "--num_processes", 1, "p.py"]
    words = ["launch", *size, "--output", tmp_path / "run", "--", *command]
    before = {key: value for key, value in os.environ.items() if "VISIBLE_DEVICES" not in key}
    done = program(*words, env=before | {"CUDA_VISIBLE_DEVICES": ""})
    assert "accelerate launch would start ranks of its own in each of 2" in done.stderr
    done = program(*words, env=before)
    assert {path.name for path in (tmp_path / "run/work").iterdir()} >= {"0", "1"}, done.stderr


@pytest.mark.parametrize("nohup", [True, False])
def test_a_terminal_that_is_closed_ends_a_launch_but_for_nohup(tmp_path, nohup) -> None:
    go = tmp_path / "go"
    wait = f"while not os.path.exists({str(go)!r}):\n    time.sleep(0.1)\n"
    path = script(tmp_path, f"print('begun', flush=True)\n{wait}print('done')")
    command = [sys.executable, SCRIPTS / "launch.py", "--launcher", "none", "--", path]
    process = subprocess.Popen(
        [*(["nohup"] if nohup else []), *map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # The tests themselves may run under nohup.
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    os.killpg(process.pid, signal.SIGHUP)
    if nohup:
        go.touch()
    said, _ = process.communicate()
    assert (process.returncode, said) == ((0, "done\n") if nohup else (75, ""))


@pytest.mark.faults
def test_ranks_do_not_outlive_an_agent_that_was_killed(digits, tmp_path) -> None:
    """With NCCL, where nobody is told. With gloo: test_random_interruptions.py."""
    process, ours = training(digits, tmp_path, connection="nccl")
    agent = next(path for path in ours if b"torchrun.py" in cmdline(path))
    os.kill(int(agent.name), signal.SIGKILL)
    assert process.wait() == 1
    await_end(ours)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("target", "connection"), [("supervise.py", "nccl"), ("torchrun.py", "gloo")]
)
def test_sigterm_to_what_stands_between_launch_and_a_rank_is_a_preemption(
    digits, tmp_path, target: str, connection: str
) -> None:
    """All ranks have saved, and the next launch resumes."""
    process, ours = training(digits, tmp_path, connection=connection)
    os.kill(int(next(path for path in ours if runs(path, target)).name), signal.SIGTERM)
    said = process.communicate()[1].decode()
    assert process.returncode == 75, said
    assert re.search(
        r"^launch: train was interrupted: rank \d on \S+ got SIGTERM; stopped .* saved in ",
        said,
        re.MULTILINE,
    ), said
    await_end(ours)


@pytest.mark.parametrize(
    ("how", "paused", "status", "said"),
    [
        ("lambda *_: sys.exit()", False, 1, "ended with status 0, not with 75"),
        ("lambda *_: sys.exit(75)", True, 75, "stopped"),
        ("signal.SIG_DFL", False, 1, "was told to end, and was ended by SIGTERM"),
    ],
)
def test_a_program_that_ends_because_its_supervisor_was_stopped_has_not_done_its_work(
    tmp_path, how: str, paused: bool, status: int, said: str
) -> None:
    """It is named; and one that is paused (SIGSTOP) hears that it is to end."""
    begun = tmp_path / "begun"
    path = script(
        tmp_path,
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, {how})\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "time.sleep(1e9)\n",
    )
    command = [sys.executable, str(SCRIPTS / "launch.py"), "--launcher", "none", "--", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(begun.exists, process)
    ours = [
        path for path in Path("/proc").glob("[0-9]*") if str(tmp_path).encode() in cmdline(path)
    ]
    (supervise,) = [path for path in ours if runs(path, "supervise.py")]
    if paused:
        (its_own,) = [each for each in ours if runs(each, path.name) and each != supervise]
        os.kill(int(its_own.name), signal.SIGSTOP)
    os.kill(int(supervise.name), signal.SIGTERM)
    _, told = process.communicate()
    assert process.returncode == status
    assert re.search(rf"^launch: \w+ (failed|was interrupted): node 0 on \S+ .*{said}", told, re.M)


@pytest.mark.faults
def test_a_killed_supervise_is_named_and_leaves_no_temporary_files(digits, tmp_path) -> None:
    """With NCCL. With gloo: test_random_interruptions.py."""
    process, ours = training(digits, tmp_path, connection="nccl")
    folder = temporary(process)
    os.kill(int(next(path for path in ours if runs(path, "supervise.py")).name), signal.SIGKILL)
    said = process.communicate()[1].decode()
    assert process.returncode == 1, said
    assert re.search(
        r"^launch: train failed: supervise.py of rank \d on \S+ was ended by SIGKILL",
        said,
        re.MULTILINE,
    ), said
    await_end(ours)
    assert not folder.exists()


@pytest.mark.faults
def test_after_a_killed_launch_the_next_one_removes_its_folder(digits, tmp_path) -> None:
    process, ours = training(digits, tmp_path)
    left = temporary(process)
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    process.kill()
    await_end(ours)
    time.sleep(1)  # a younger folder might be without its lock yet
    # Any launch removes it, so another test's may be faster than this one.
    go = tmp_path / "go"
    path = script(tmp_path, f"while not os.path.exists({str(go)!r}):\n    time.sleep(0.1)")
    alive = subprocess.Popen([sys.executable, str(SCRIPTS / "launch.py"), "--", str(path)])
    until(lambda: not left.exists())
    # It removes its own too, but not before its end.
    own = temporary(alive)
    assert own.exists()
    go.touch()
    assert alive.wait() == 0
    assert not own.exists()


def temporary(launch: subprocess.Popen) -> Path:
    """The temporary folder that it holds open."""
    until(lambda: held(launch))
    (folder,) = held(launch)
    return folder


def held(launch: subprocess.Popen) -> list[Path]:
    folders = []
    for link in Path(f"/proc/{launch.pid}/fd").iterdir():
        # Closed since it was listed.
        with suppress(FileNotFoundError):
            folders.append(link.readlink())
    return [folder for folder in folders if folder.parent == parent_folder()]


def test_a_torch_without_its_old_launcher_is_told_so(tmp_path) -> None:
    """A torch package without torch.distributed.launch, as in a future version."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = program(
        "launch",
        "--launcher",
        "torch.distributed.launch",
        "--",
        script(tmp_path, ""),
        env=environment,
    )
    assert done.returncode == 1
    wanted = (
        "launch: launcher: the installed torch has no torch.distributed.launch any more; "
        "use torchrun, its successor\n"
    )
    assert done.stderr == wanted


def test_a_dry_run_of_srun_needs_no_slurm(tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    arguments = [
        "--dry-run",
        "--transport",
        "srun",
        "--launcher",
        "srun",
        "--nodes",
        2,
        "--nproc-per-node",
        2,
        "--",
        script(tmp_path, ""),
    ]
    done = program("launch", *arguments, env=environment)
    assert done.returncode == 0, done.stderr
    step, *nodes = done.stdout.splitlines()
    assert step.startswith("srun --nodes=2 --ntasks=4 --ntasks-per-node=2 ")
    assert [line.split("]")[0] for line in nodes] == ["[node 0, NODE-0", "[node 1, NODE-1"]
    assert all("MASTER_ADDR=NODE-0" in line and "RANK=$SLURM_PROCID" in line for line in nodes)


def test_a_binding_to_the_same_cpus_is_not_passed_on(tmp_path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import os; print('bound:', os.environ.get('OMP_PROC_BIND'))")
    done = program("launch", "--launcher", "none", "--", script,
                   env=os.environ | {"OMP_PROC_BIND": "true"})  # fmt: skip
    assert "bound: None" in done.stdout
    line = "launch: OMP_PROC_BIND not passed on: every rank would use the same CPUs"
    assert line in done.stderr.splitlines()


def test_a_program_has_the_threads_of_its_process_and_not_those_of_the_rule(tmp_path) -> None:
    """Snakemake sets these for each rule; torch follows MKL's first."""
    script = tmp_path / "say.py"
    script.write_text("import torch; print('threads:', torch.get_num_threads())")
    rule = {f"{name}_NUM_THREADS": "2" for name in ("OMP", "MKL", "OPENBLAS")}
    done = program("launch", "--nproc-per-node", 2, "--cpus", 2, "--", script,
                   env=os.environ | rule)  # fmt: skip
    assert done.stdout.splitlines() == ["threads: 1"] * 2, done.stdout + done.stderr


def test_accelerate_connects_processes_on_cpus(tmp_path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import accelerate; print('of', accelerate.Accelerator().num_processes)")
    done = program("launch", "--nodes", 2, "--device", "cpu", "--", script)
    assert done.stdout.splitlines() == ["of 2"] * 2, done.stdout + done.stderr


def test_accelerate_is_told_of_cpus_only_where_there_is_no_gpu_for_certain(tmp_path: Path) -> None:
    """Not in a job that may have others than CUDA's, nor in place of what the user says."""
    script = tmp_path / "say.py"
    script.write_text("import os; print(os.environ.get('ACCELERATE_USE_CPU'))")
    for given, told in (
        ({"LAUNCH_DEVICE": "auto", "SLURM_JOB_ID": "7", "ROCR_VISIBLE_DEVICES": "0,1"}, None),
        ({"LAUNCH_DEVICE": "auto", "PBS_JOBID": "7"}, None),
        ({"LAUNCH_DEVICE": "auto", "CUDA_VISIBLE_DEVICES": ""}, "true"),
        ({"LAUNCH_DEVICE": "cpu"}, "true"),
        ({"LAUNCH_DEVICE": "cpu", "ACCELERATE_USE_CPU": "false"}, "false"),
    ):
        before = {key: value for key, value in os.environ.items() if "VISIBLE_DEVICES" not in key}
        done = program("supervise", script, env=before | given)
        assert done.stdout.splitlines()[-1] == str(told), done.stderr


def test_nccls_watchdog_ends_a_rank_at_once_and_without_an_abort(tmp_path) -> None:
    """torchrun itself says otherwise; who wants the files of its state waits for them."""
    script = tmp_path / "say.py"
    names = ("ASYNC_ERROR_HANDLING", "WAIT_TIMEOUT_DUMP_MILSEC", "DUMP_ON_TIMEOUT")
    script.write_text(f"import os; print([os.getenv('TORCH_NCCL_' + each) for each in {names}])")
    for launcher, own, told in (
        ("torchrun", {}, ["3", "500", "0"]),
        ("none", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, ["1", "500", "0"]),
        ("none", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, [None, None, "1"]),
    ):
        done = program("launch", "--launcher", launcher, "--", script, env=os.environ | own)
        assert done.stdout.splitlines()[-1] == str(told), done.stderr


def test_a_node_with_ipv6_alone_is_refused() -> None:
    refuse_ipv6_only(["127.0.0.1"])
    with pytest.raises(Refusal, match="2001:db8::1 has IPv6 addresses only, and the ranks meet"):
        refuse_ipv6_only(["127.0.0.1", "2001:db8::1"])


def test_a_dry_run_starts_nothing(tmp_path) -> None:
    path = script(tmp_path, f"open('{tmp_path}/started', 'w')")
    done = program(
        "launch", "--dry-run", "--nodes", 2, "--cpus", 4, "--log", tmp_path / "log", "--", path
    )
    assert done.returncode == 0
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["[node", "0,"],
        ["[node", "1,"],
    ]
    assert "OMP_NUM_THREADS=2" in done.stdout
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "log").exists()


@pytest.mark.faults
def test_two_launches_at_once_do_not_meet_and_leave_no_temporary_files(tmp_path) -> None:
    """Each on two nodes, whose ranks end when those of both launches have begun."""
    path = script(
        tmp_path,
        "import json, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "found = [os.environ[name] for name in ('WORLD_SIZE', 'MASTER_PORT')]\n"
        "(folder / str(rank)).write_text(json.dumps(found))\n"
        "while len(list(folder.parent.glob('[01]/[01]'))) < 4:\n"
        "    time.sleep(0.1)\n",
    )
    launches = [tmp_path / "0", tmp_path / "1"]
    for folder in launches:
        folder.mkdir()
    command = [sys.executable, str(SCRIPTS / "launch.py"), "--nodes", "2", "--", str(path)]
    processes = [subprocess.Popen([*command, str(folder)]) for folder in launches]
    folders = [temporary(process) for process in processes]
    assert len(set(folders)) == 2
    until(lambda: len(list(tmp_path.glob("[01]/[01]"))) == 4, *processes)
    assert [process.wait() for process in processes] == [0, 0]
    sizes, ports = zip(
        *(json.loads((folder / rank).read_text()) for folder in launches for rank in "01"),
        strict=True,
    )
    assert sizes == ("2",) * 4
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize(("reads", "line"), [
    ({"metrics": {"log": "loss (?P<loss>.+) accuracy (?P<accuracy>.+)"}},
     "has no group that counts; name one step, iter or epoch"),
    ({"metrics": "/else/where.csv"}, "is not a path inside the results folder; give one relative"),
    ({"snapshots": ["a**b"]}, "is not a path inside the results folder; give one relative"),
    ({"snapshots": None}, "config: snapshots: null is not a list"),
    ({"metrics": ["m.csv"]}, "is not text or null"),
    ({"metric": "m.csv"}, "config: metric: unknown key; did you mean metrics?"),
])  # fmt: skip
def test_what_is_read_is_checked_by_hand_too(tmp_path, reads, line) -> None:
    script = tmp_path / "program.py"
    script.write_text("raise SystemExit('it was started')\n")
    where = ["--output", tmp_path / "run", "--reads", json.dumps(reads)]
    refused = program("launch", *where, "--", sys.executable, script)
    assert refused.returncode == 1
    assert line in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert "it was started" not in refused.stderr


def test_a_log_that_was_removed_meanwhile_becomes_no_link_to_itself(tmp_path: Path) -> None:
    """As Snakemake removes the log of a rule that another command has begun."""
    removes = tmp_path / "removes.py"
    removes.write_text(f"import os\nos.unlink({str(tmp_path / 'log')!r})\n")
    done = program("launch", "--launcher", "none", "--log", tmp_path / "log", "--", removes)
    assert done.returncode == 0, done.stderr
    assert not os.path.lexists(tmp_path / "log")


def test_a_launch_that_is_stopped_before_its_ranks_says_so_in_its_records(tmp_path: Path) -> None:
    """While it waits for an owner that may be dead, say."""
    log = tmp_path / "train.log"
    args = Namespace(log=log, rank_logs=None, begun=True, explained=False)
    failures.write(tmp_path, "train", Failure("an old one"))
    with pytest.raises(Stopped), logged(args):
        raise Stopped("stopped (SIGTERM) while no rank was running")
    assert log.read_text() == "launch: stopped (SIGTERM) while no rank was running\n"
    found = failures.read(tmp_path)
    assert found.reason == "stopped (SIGTERM) while no rank was running"
    assert found.kind == Kind.PREEMPTED


def test_a_signal_after_the_first_does_not_hide_what_the_program_has_said(tmp_path) -> None:
    """At the end of the ranks, and at that of `launch`."""
    text = "signal.signal(15, lambda *_: sys.exit(75)); print('begun', flush=True); time.sleep(99)"
    code = """
    import os, launch
    from signal import SIGINT, SIGTERM
    plain = launch.first_failure
    def judge(*arguments, **named):
        os.kill(os.getpid(), SIGINT)
        return plain(*arguments, **named)
    launch.first_failure = judge
    launch.end_descendants = lambda: os.kill(os.getpid(), SIGTERM)
    launch.main()
    """
    arguments = ["--launcher", "none", "--log", tmp_path / "log", "--", script(tmp_path, text)]
    with subprocess.Popen(
        [sys.executable, "-c", dedent(code), *arguments], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        _, said = process.communicate()
    assert process.returncode == 75, said
    line = f"launch: some_program was interrupted: node 0 on {HOST} stopped; run the same command"
    assert said.splitlines()[-1].startswith(line), said


def test_a_signal_after_the_ranks_does_not_hide_why_they_are_refused(tmp_path) -> None:
    code = """
    import os, signal, launch
    plain = launch.failures.of_error
    def noted(error):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(error)
    launch.failures.of_error = noted
    launch.main()
    """
    arguments = ["--launcher", "none", "--collect", tmp_path / "nodes", "--log", tmp_path / "log"]
    done = subprocess.run(
        [sys.executable, "-c", dedent(code), *arguments, "--", script(tmp_path, "pass")],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = f"0 of 1 nodes reported; see {tmp_path / 'log'}"
    assert (done.returncode, done.stderr) == (1, f"launch: {line}\n")
    assert failures.read(tmp_path).reason == line
