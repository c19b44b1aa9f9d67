"""The seam: the checks of every scheduler, and the local one completely."""

import ast
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from dispatch import seconds_ahead
from manynodes.base.errors import Refusal
from manynodes.base.signing import new_secret
from manynodes.launching import time_limit
from manynodes.launching.endings import records
from manynodes.schedulers import registry
from manynodes.schedulers.base import Allocation, Cause, Size, Trouble, end_here
from manynodes.schedulers.slurm.scheduler import end_of
from manynodes.schedulers.ssh import Ssh
from programs import SCRIPTS, python
from schedulers import check_everywhere, check_in_a_job, check_that_it_ends, start, step_of
from waiting import until


@pytest.mark.parametrize("transport", registry.SCHEDULERS)
def test_every_scheduler(transport) -> None:
    check_everywhere(registry.SCHEDULERS[transport])


def test_the_local_one_runs_its_commands(tmp_path) -> None:
    check_in_a_job(registry.SCHEDULERS["local"], 2, tmp_path)
    check_that_it_ends(registry.SCHEDULERS["local"], 2, tmp_path)


class Agents(Ssh):
    """Agents on this machine, without ssh."""

    def allocation(self, nodes: int) -> Allocation:
        return Allocation("this test", ("here",) * nodes, ("127.0.0.1",) * nodes, 0)

    def reach(self, _host: str, command: Sequence[str]) -> tuple[str, ...]:
        return tuple(command)


def test_agents_on_one_machine_leave_each_other_alone(tmp_path) -> None:
    check_in_a_job(Agents(), 2, tmp_path)
    check_that_it_ends(Agents(), 2, tmp_path)


WRITES = """
import os, time
os.set_blocking(1, False)
text = b"".join(b"%d %s\\n" % (n, b"x" * 60_000) for n in range(150))
paused = 0
while text:
    try:
        text, paused = text[os.write(1, text):], 0
    except BlockingIOError:
        paused += 1
        time.sleep(0.01)
    if paused == 100:
        open(f"full-{os.environ['LAUNCH_NODE_RANK']}", "w").close()
"""


def test_a_step_whose_output_nobody_reads_waits_and_loses_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if `launch` was suspended: nothing is left in a connection, which would break it."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "writes.py"
    program.write_text(WRITES)
    (command,) = Agents().commands(step_of(Agents(), 2, program, LAUNCH_SECRET=new_secret()))
    step = start(command.arguments, command.environment, command.stdin)
    until(lambda: Path("full-0").exists() and Path("full-1").exists(), step)
    until(lambda: not unread(step.pid), step)
    said, _ = step.communicate()
    assert step.returncode == 0
    for node in ("0", "1"):
        lines = [line.split()[1] for line in said.splitlines() if line[0] == node]
        assert lines == list(map(str, range(150)))


def test_an_agent_that_is_left_alone_ends_although_its_command_still_writes(tmp_path: Path) -> None:
    program, pid = tmp_path / "says_bye.py", tmp_path / "pid"
    program.write_text(
        "import os, signal, sys, time\n"
        "def bye(*_):\n"
        "    for each in range(1000):\n"
        "        print('bye', each, flush=True)\n"
        "        time.sleep(0.001)\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, bye)\n"
        f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(3600)\n"
    )
    (command,) = Agents().commands(step_of(Agents(), 1, program, LAUNCH_SECRET=new_secret()))
    step = start(command.arguments, command.environment, command.stdin)
    until(lambda: pid.exists() and pid.read_text(), step)
    above = psutil.Process(int(pid.read_text())).parents()
    (agent,) = [each for each in above if "node_agent.py" in " ".join(each.cmdline())]
    step.kill()
    step.communicate()
    until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)


def unread(pid: int) -> int:
    """Bytes on their way to a process, in its connections over loopback."""
    ports = {f"{each.laddr.port:04X}" for each in psutil.Process(pid).net_connections()}
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Where it is the peer, what is not confirmed; and where it is itself, what it has not read.
    sent = [each[4].split(":")[0] for each in sockets if each[2].split(":")[1] in ports]
    received = [each[4].split(":")[1] for each in sockets if each[1].split(":")[1] in ports]
    return sum(int(each, 16) for each in sent + received)


@pytest.mark.parametrize(("said", "lost"), [
    ("This account may run no commands", False),
    ("ssh: connect to host here port 22: Connection refused", True),
])  # fmt: skip
def test_a_node_that_starts_no_agent_is_lost_only_if_that_may_pass(
    tmp_path: Path, said: str, lost: bool
) -> None:
    class Refused(Agents):
        def reach(self, _host: str, _command: Sequence[str]) -> tuple[str, ...]:
            return "sh", "-c", f"echo '{said}' >&2; exit 1"

    program = tmp_path / "never.py"
    program.write_text("import time; time.sleep(3600)\n")
    step = step_of(Refused(), 2, program, LAUNCH_SECRET=new_secret())
    (command,) = Refused().commands(step)
    done = subprocess.run(
        command.arguments, input=command.stdin, capture_output=True, text=True, check=False,
        env=os.environ | dict(command.environment),
    )  # fmt: skip
    assert done.returncode == 1
    lines = done.stderr.split("\n")  # splitlines would split at the mark of a record too
    what = "is lost" if lost else "starts no agent"
    line = f"here {what}: sh ended with status 1: {said}"
    (found,) = [Trouble(**record["trouble"]) for record in records(lines)]
    assert found == Trouble(line, "here", Cause.NODE_LOST if lost else Cause.OTHER)
    assert Refused().explain(lines) == Trouble(line)


def test_a_machine_under_two_names_is_refused(tmp_path: Path) -> None:
    class Twice(Agents):
        def allocation(self, _nodes: int) -> Allocation:
            hosts = ("localhost", "127.0.0.2")
            return Allocation("this test", hosts, hosts, 0)

    program = tmp_path / "ends.py"
    program.touch()
    (command,) = Twice().commands(step_of(Twice(), 2, program, LAUNCH_SECRET=new_secret()))
    step = subprocess.run(
        command.arguments, input=command.stdin, capture_output=True, text=True, check=False
    )
    assert step.returncode == 1
    assert "is the same machine as" in step.stderr


def test_names_are_unique() -> None:
    found = list(registry.SCHEDULERS.values())
    assert len({scheduler.executor for scheduler in found}) == len(found)
    launchers = [scheduler.task_launcher for scheduler in found if scheduler.task_launcher]
    assert len(set(launchers)) == len(launchers)


def test_a_process_outside_every_job_is_local() -> None:
    assert registry.active({}).transport == "local"
    assert registry.active({"SLURM_JOB_ID": "7"}).transport == "srun"


@pytest.mark.parametrize(("nodes", "transport"), [
    # Slurm's plugin spank_pbs gives every task a PBS_JOBID; so does the shell of another job.
    ({}, "srun"),
    ({"PBS_NODEFILE": "of-another-job"}, "srun"),
    # A job of PBS has its file; `qsub -V` passes on what the shell has of Slurm.
    ({"PBS_NODEFILE": "nodes"}, "pbs"),
])  # fmt: skip
def test_a_job_with_the_variables_of_two_schedulers_is_that_of_one(
    tmp_path, monkeypatch, nodes: dict[str, str], transport: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes").write_text("n1\n")
    of_pbs = {"PBS_JOBID": "7"} | nodes
    assert registry.active(of_pbs | {"SLURM_JOB_ID": "7"}).transport == transport
    # Not every node of a job has the file.
    assert registry.active(of_pbs).transport == "pbs"


def test_resources_are_in_the_words_of_every_scheduler() -> None:
    size = Size(nodes=2, cpus=4, gpus=1, memory=1000, launches=True)
    found = registry.resources(size)
    assert all(
        scheduler.resources(size).items() <= found.items()
        for scheduler in registry.SCHEDULERS.values()
    )


def test_the_end_of_a_job_does_not_depend_on_this_machine_s_clock() -> None:
    """Here it is three minutes earlier than where the scheduler is."""
    limit, running, behind = 600, 100, 180
    start = time.time() + behind - running
    assert abs(end_here(start, start + limit, running) - (time.time() + limit - running)) < 60
    began, ends = (
        f"{datetime.fromtimestamp(each, UTC):%Y-%m-%dT%H:%M:%S}" for each in (start, start + limit)
    )
    shown = (
        f"   RunTime=00:01:40 TimeLimit=00:10:00\n   StartTime={began} EndTime={ends} Deadline=N/A"
    )
    end = end_of(shown, running)
    assert end is not None
    assert abs(end - (time.time() + limit - running)) < 60
    assert end_of("StartTime=Unknown EndTime=Unknown", 0) is None


def test_a_job_s_own_duration() -> None:
    script = "from manynodes.base.processes import job_seconds; "
    script += "print(job_seconds('PBS_JOBID=7'), job_seconds('PBS_JOBID=8'))"
    command = f"sleep 2; env PBS_JOBID=7 {sys.executable} -c {shlex.quote(script)}; true"
    environment = os.environ | {"PBS_JOBID": "7", "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, check=True
    )
    seconds, other = map(float, done.stdout.split())
    assert seconds > 1.9
    assert other == 0


def test_a_node_stops_by_the_clock_of_rank_0_s_node() -> None:
    """Its own is three minutes behind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def tell() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(f"{time.time() + 180}\n".encode())

        thread = threading.Thread(target=tell)
        thread.start()
        said = "import os; print(*map(os.environ.get, ['LAUNCH_STOP_AT', 'LAUNCH_AHEAD']))"
        stop_at = {"LAUNCH_STOP_AT": str(time.time() + 780)}
        plan = {"0": {"environment": stop_at, "command": [sys.executable, "-c", said]}}
        reach = f"127.0.0.1:{listener.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, SCRIPTS / "dispatch.py", "--node", "0", "--reach", reach],
            input=json.dumps(plan), capture_output=True, text=True, check=True,
        )  # fmt: skip
        thread.join()
    stop_at, ahead = map(float, done.stdout.split())
    assert abs(stop_at - (time.time() + 600)) < 60
    assert abs(ahead + 180) < 60


def test_the_time_on_the_way_is_no_difference_of_the_clocks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def tell() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(f"{time.time()}\n".encode())
                time.sleep(0.1)

        thread = threading.Thread(target=tell)
        thread.start()
        assert seconds_ahead(f"127.0.0.1:{listener.getsockname()[1]}", 1) == 0
        thread.join()


def test_an_agent_ends_although_something_of_its_step_cannot() -> None:
    """It waits for a disk that is gone: a signal changes nothing."""
    code = """
    import asyncio, os, signal, types
    import node_agent
    from manynodes.base import processes

    kill, sent = os.kill, []

    class Channel:
        orders = [{"command": ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & exit 3"],
                   "folder": "/", "stdin": ""}]
        writer = types.SimpleNamespace(close=lambda: None, wait_closed=lambda: asyncio.sleep(0))
        async def receive(self):
            return self.orders.pop() if self.orders else await asyncio.sleep(1000)
        async def send(self, message):
            sent.append(message)

    async def connect(*_):
        return Channel()

    node_agent.connect, processes.MOST_SECONDS = connect, 0.5
    os.kill = lambda pid, number: None
    asyncio.run(node_agent.run({"address": "", "port": 0, "environment": dict(os.environ)}, 0, {}))
    (left,) = processes.descendants(os.getpid())
    kill(left, signal.SIGKILL)
    print(sent)
    """
    done = python(code)
    assert done.stdout == "[{'status': 3}]\n", done.stderr


def test_a_warning_that_did_not_arrive_is_soon_repeated(monkeypatch) -> None:
    """The limit has been lowered, and a minute later the time is up."""
    monkeypatch.setattr(time_limit, "AGAIN", 0.1)
    tries = []

    class Lowered(Agents):
        def end(self, _allocation: Allocation) -> float:
            if len(tries) == 1:
                tries.append("silent")
                raise Refusal("no answer")
            return time.time()

        def warn(self, _allocation: Allocation) -> None:
            tries.append("warned")
            if len(tries) < 3:
                raise Refusal("scancel: no answer within 30 s")

    job = Allocation("this test", ("here",), ("127.0.0.1",), 0, end=time.time() + 1000)
    time_limit.warn_of_a_lower_limit(Lowered(), job, threading.Event())
    assert tries == ["warned", "silent", "warned"]


def test_only_its_folder_knows_slurm() -> None:
    """In code; docstrings and comments may give examples."""
    for path in [*SCRIPTS.rglob("*.py"), *(SCRIPTS.parent / "rules").glob("*.py")]:
        if "slurm" not in path.relative_to(SCRIPTS.parent).parts:
            words = list(code_words(path))
            found = [word for word in words if "slurm" in word.lower() or "sbatch" in word.lower()]
            assert not found, path


def code_words(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]
    return strings + [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
