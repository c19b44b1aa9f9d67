"""The checks that every scheduler must pass, because `launch` relies on them."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from manynodes.base.signing import new_secret
from manynodes.launching.launchers import Geometry
from manynodes.launching.plan import find_launcher, make_plan
from manynodes.schedulers.base import Scheduler, Size, Step
from programs import SCRIPTS
from waiting import until

SIZE = Size(nodes=2, cpus=4, gpus=1, memory=1000, launches=True)


def step_of(scheduler: Scheduler, nodes: int, program: Path, **private: str) -> Step:
    """A step that runs a program once per node of the present allocation."""
    job = scheduler.allocation(nodes)
    launcher = find_launcher("none", scheduler)
    plan = make_plan(launcher, Geometry(nodes, 1, 1), [str(program)], job, 20_001, "/tmp/x", None)
    dispatch = [sys.executable, str(SCRIPTS / "dispatch.py")]
    return Step(plan, private, tasks=1, ranks=False, cpus=1, gpus=0, dispatch=dispatch,
                folder=program.parent)  # fmt: skip


def check_everywhere(scheduler: Scheduler) -> None:
    """Outside a job: names, resources, and a plan that can be shown."""
    assert scheduler.transport
    assert scheduler.executor
    assert bool(scheduler.task_launcher) == bool(scheduler.task_variables)
    resources = scheduler.resources(SIZE)
    assert resources.keys() == scheduler.resources(Size(1, 1, 0, 1, True)).keys()
    assert not scheduler.active({})
    assert scheduler.idle_nodes({}) is None
    example = scheduler.example(2)
    assert len(example.hosts) == len(example.addresses) == 2
    assert scheduler.starter
    assert scheduler.explain([]) is None


def check_in_a_job(scheduler: Scheduler, nodes: int, folder: Path) -> None:
    """Inside a job: every node runs its own command once, and gets what is private unseen.

    Args:
        folder: that all nodes see.
    """
    job = scheduler.allocation(nodes)
    assert len(job.hosts) == len(job.addresses) == nodes
    assert job.owner == scheduler.allocation(nodes).owner
    assert job.end is None or job.end > time.time()
    assert job.one_machine == (len(set(job.hosts)) == 1)
    program = folder / "program.py"
    program.write_text(
        "import os, pathlib, time\n"
        "rank, secret = os.environ['LAUNCH_NODE_RANK'], os.environ['LAUNCH_SECRET']\n"
        f"pathlib.Path({str(folder)!r}, 'node-' + rank).write_text(secret)\n"
        # A node that is ready ends no other.
        "time.sleep(2 * int(rank))\n"
        "print('said by', rank, flush=True)\n"
    )
    # Of this step only, as launch makes them: what an agent leaves is found by it and ended.
    secret = new_secret()
    step = step_of(scheduler, nodes, program, LAUNCH_SECRET=secret)
    assert secret not in "\n".join(scheduler.preview(step))
    commands = scheduler.commands(step)
    assert not any(secret in shlex.join(command.arguments) for command in commands)
    started = [start(command.arguments, command.environment, command.stdin) for command in commands]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), said
    labelled = [
        command.label(line)
        for command, text in zip(commands, said, strict=True)
        for line in text.splitlines()
    ]
    assert sorted(text for _, text in labelled) == [f"said by {rank}" for rank in range(nodes)]
    assert [(folder / f"node-{rank}").read_text() for rank in range(nodes)] == [secret] * nodes


def check_that_it_ends(scheduler: Scheduler, nodes: int, folder: Path) -> None:
    """SIGTERM to the processes of a step ends the step on every node."""
    program = folder / "endless.py"
    program.write_text(
        "import os, pathlib, time\n"
        "rank = os.environ['LAUNCH_NODE_RANK']\n"
        "while True:\n"
        f"    pathlib.Path({str(folder)!r}, 'alive-' + rank).write_text(str(time.time()))\n"
        "    time.sleep(0.2)\n"
    )
    commands = scheduler.commands(step_of(scheduler, nodes, program, LAUNCH_SECRET=new_secret()))
    started = [start(command.arguments, command.environment, command.stdin) for command in commands]
    paths = [folder / f"alive-{rank}" for rank in range(nodes)]
    until(lambda: all(path.exists() for path in paths), *started)
    for process in started:
        process.terminate()
    for process in started:
        process.wait()
    last = {path: path.read_text() for path in paths}
    time.sleep(2)
    assert {path: path.read_text() for path in paths} == last


def start(
    arguments: tuple[str, ...], environment: Mapping[str, str], stdin: str
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        arguments,
        env=os.environ | dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.close()
    process.stdin = None
    return process
