"""Run one node's part of a step, and end it when `remote_step` says so or is lost.

A scheduler's command or ssh starts this on the node. It connects to `remote_step`, receives a
command with its environment, sends its output and status, and leaves no process behind.
"""

import argparse
import asyncio
import codecs
import hashlib
import json
import os
import platform
import select
import signal
import socket
import stat
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

# Python looks there by itself, unless a site has set PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from manynodes.base.environment import variable
from manynodes.base.errors import Refusal, told_in_one_line
from manynodes.base.processes import (
    adopt_orphans,
    end_all,
    end_descendants,
    end_with_parent,
    stat_of,
    with_ancestors,
)
from manynodes.base.timeouts import AGENT_GRACE, ALONE_GRACE
from manynodes.schedulers.remote.channel import Channel, connect

# Seconds to wait for the file of the step: a network file system may show it late.
FILE_SEEN = 60
# Seconds between two looks whether the job is suspended.
LOOK = 1
# Another one after each start of a machine.
BOOT = Path("/proc/sys/kernel/random/boot_id")
# Variables that differ between nodes: here the node's own value is the right one.
OWN = (
    "TMPDIR", "HOSTNAME", "XDG_RUNTIME_DIR",
    # A scheduler sets them on each node to the GPUs there.
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
)  # fmt: skip
OWN_PREFIXES = ("PBS_", "SSH_")
# Packages that must be the same on all nodes.
PACKAGES = ("torch", "torchvision", "numpy", "pyyaml", "safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", type=int, default=0, help="number of this node")
    parser.add_argument("--step", type=Path, metavar="FILE", help="written by remote_step")
    parser.add_argument(
        "--describe", type=Path, metavar="FILE",
        help="only say whether this file is seen here, and which Python and packages there are",
    )  # fmt: skip
    args = parser.parse_args()
    with told_in_one_line("node_agent"):
        if args.describe:
            print(json.dumps(describe(args.describe)))
            return
        given = read_step(args.step)
        # Unlike the secret, a user's program keeps it. Two nodes of a step may be on one machine.
        step = hashlib.sha256(given["private"][variable("secret")].encode()).hexdigest()[:16]
        marks = {variable("step"): step, variable("node_rank"): str(args.node)}
        own = given["private"] | marks
        # remote_step, which launch has started, starts that of the first node itself.
        leave_a_guard(marks, above=0 if args.node else 2)
        os.environ.update(own)
        os.umask(given["umask"])
        asyncio.run(run(given, args.node, own))


def describe(file: Path) -> dict[str, Any]:
    """What must be the same on all nodes of a step, and what must not."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"seen": file.exists(), "versions": versions, "machine": machine()}


def machine() -> list[str]:
    """What no other machine has; nothing if it is not known."""
    with suppress(OSError):
        # Two machines may have one name, and two containers of a machine its one boot; some
        # containers have its name too.
        spaces = [str(Path("/proc/self/ns", name).readlink()) for name in ("net", "pid")]
        return [socket.gethostname(), BOOT.read_text().strip(), *spaces]
    return []


def read_step(path: Path) -> dict[str, Any]:
    """Address, port and variables of the step.

    Raises:
        Refusal: the file does not appear, or others could have written it.
        OSError: it cannot be read.
    """
    deadline, parent = time.monotonic() + FILE_SEEN, os.getppid()
    while True:
        with suppress(FileNotFoundError):
            # Not through a link, and without waiting for the writer of a pipe.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor) as file:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                    raise Refusal(f"{path} is not a file of yours; see who else may write there")
                if found.st_mode & 0o077:
                    raise Refusal(f"{path} is open to others; see who else may write there")
                return json.load(file)
        if os.getppid() != parent:
            raise Refusal("what started this agent has ended")
        if time.monotonic() > deadline:
            raise Refusal(
                f"{path} has not appeared on {socket.gethostname()} within {FILE_SEEN} s; "
                "all nodes must share the folder"
            )
        time.sleep(0.5)


def leave_a_guard(marks: Mapping[str, str], above: int) -> None:
    """Start a process that waits for the end of this agent, and then ends what is left of the step.

    If this agent and the supervisors of the ranks are killed at once, as PBS does when `launch` is
    killed, nobody else finds a daemon in a session of its own. It still has the marks in its
    environment. Nor does a scheduler that suspends a job stop them: this process does, as long as
    the agent is stopped, or what of the launch is above it.

    Args:
        marks: variables that together only this agent's processes have.
        above: how many processes above the agent belong to the launch.
    """
    alive, here = os.pipe()
    agent = os.getpid()
    if os.fork():
        # The pipe is closed when this process ends.
        os.close(alive)
        os.wait()
        return
    # Neither in the session nor among the descendants of this agent, and without its output, for
    # whose end ssh would wait.
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(here)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    end = select.poll()
    end.register(alive)
    suspended = False
    while not end.poll(1000 * LOOK):
        if is_suspended(agent, above) != suspended:
            suspended = not suspended
            send_all(marks, signal.SIGSTOP if suspended else signal.SIGCONT)
    end_all(partial(started_with, marks))
    os._exit(0)


def is_suspended(pid: int, above: int) -> bool:
    """Whether a process or one of so many above it is stopped. One above those, such as the shell
    of a user, may be stopped for other reasons.
    """
    # A process may end while we look.
    with suppress(OSError):
        family = islice(with_ancestors(pid), 1 + above)
        return any(stat_of(each)[0] == "T" for each in family)
    return False


def send_all(marks: Mapping[str, str], number: signal.Signals) -> None:
    """Send a signal to all that has the marks, and to what it has started in the meantime."""
    told: set[int] = set()
    while new := set(started_with(marks)) - told:
        for pid in new:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        told |= new


def started_with(variables: Mapping[str, str]) -> list[int]:
    """The processes of this user that have been started with these variables."""
    entries = {f"{name}={value}".encode() for name, value in variables.items()}
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        # A process may end while we look.
        with suppress(OSError):
            if entries <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


async def run(given: dict[str, Any], node: int, own: dict[str, str]) -> None:
    """Run the node's command, as `remote_step` orders.

    Args:
        given: address and port of `remote_step`, and its environment.
        own: variables of the command that `remote_step`'s own environment does not have.

    Raises:
        Refusal: `remote_step` cannot be reached.
    """
    channel = await connect(given["address"], given["port"], node, machine())
    order = await channel.receive()
    if order is None:
        return
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    process = await asyncio.create_subprocess_exec(
        *order["command"], env=merged(given["environment"]) | own, cwd=order["folder"],
        stdin=PIPE, stdout=PIPE, stderr=PIPE,
        # Not a session of its own: PBS counts the use of the sessions that it has started.
        process_group=0,
        # If this agent is killed, what it started ends too.
        preexec_fn=partial(end_with_parent, signal.SIGKILL),
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    assert process.stderr
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate, process)
    with suppress(OSError):
        process.stdin.write(order["stdin"].encode())
        await process.stdin.drain()
    process.stdin.close()
    printed = {1: asyncio.Event(), 2: asyncio.Event()}
    for each in printed.values():
        each.set()
    copies = [
        asyncio.create_task(copy(process.stdout, channel, 1, printed[1])),
        asyncio.create_task(copy(process.stderr, channel, 2, printed[2])),
    ]
    ended = asyncio.create_task(process.wait())
    orders = asyncio.create_task(obey(channel, printed, stop := asyncio.Event()))
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait([ended, orders, asked], return_when=asyncio.FIRST_COMPLETED)
    alone = orders.done() and not ended.done()
    if not ended.done():
        terminate(process)
        await asyncio.wait([ended], timeout=ALONE_GRACE if alone else AGENT_GRACE)
    # Also in other sessions.
    await asyncio.to_thread(end_descendants)
    # One that waits for a lost disk stays.
    await asyncio.wait([ended], timeout=1)
    status = ended.result() if ended.done() else -signal.SIGKILL
    late = {*copies}
    while late:
        # A process that has left our reach could keep the pipes open.
        _, late = await asyncio.wait(late, timeout=5)
        # What the command has written may still wait to be printed, unless nobody does that.
        if stop.is_set() or orders.done() or all(each.is_set() for each in printed.values()):
            break
    orders.cancel()
    with suppress(OSError):
        await channel.send({"status": status})
        channel.writer.close()
        await channel.writer.wait_closed()


def merged(environment: dict[str, str]) -> dict[str, str]:
    """The environment of `remote_step`, with this node's own values where nodes differ."""

    def differs(name: str) -> bool:
        return name in OWN or name.startswith(OWN_PREFIXES)

    theirs = {name: value for name, value in environment.items() if not differs(name)}
    return theirs | {name: value for name, value in os.environ.items() if differs(name)}


async def obey(channel: Channel, printed: Mapping[int, asyncio.Event], stop: asyncio.Event) -> None:
    """Note what `remote_step` says, until it is lost.

    Args:
        printed: of stdout and stderr: it has printed what it was sent.
        stop: the command is to end.
    """
    with suppress(OSError, Refusal, ValueError):
        while message := await channel.receive():
            if "printed" in message:
                printed[message["printed"]].set()
            if message.get("signal") == "SIGTERM":
                stop.set()
    for each in printed.values():
        each.set()


def terminate(process: Process) -> None:
    # After its end, the number of its group may be somebody else's.
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)


async def copy(
    stream: asyncio.StreamReader, channel: Channel, number: int, printed: asyncio.Event
) -> None:
    """Send what the command writes, each piece after the one before is printed: if nobody reads
    them, the command waits, and not the connection.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with suppress(OSError):
        while chunk := await stream.read(65536):
            if text := decoder.decode(chunk):
                printed.clear()
                await channel.send({"stream": number, "text": text})
                await printed.wait()


if __name__ == "__main__":
    main()
