"""Run a step on many nodes, as srun does, through an agent on each of them.

For schedulers whose own commands start a process on a node, but lose its output, its status or its
end. The step comes as JSON on stdin. Each agent connects to this process and proves that it knows
the job's secret. The output of node 1 appears with `1: ` before each line; the status is that of
the first node that failed.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manynodes.base import showing
from manynodes.base.errors import Refusal, reason, told_in_one_line
from manynodes.base.processes import how
from manynodes.base.timeouts import CONNECTED, LOST_AFTER, STEP_GRACE
from manynodes.launching.endings import send
from manynodes.schedulers.base import Cause, Trouble
from manynodes.schedulers.remote.channel import Channel, accept
from manynodes.schedulers.remote.scheduler import LOOPBACK

# Connections at once of which it is not known whose they are, beyond one of each node.
STRANGERS = 100
# Of what a command says that cannot start an agent: the node or the network may be back later. Any
# other reason would come again.
PASSES = re.compile(
    r"refused|timed out|unreachable|no route|reset|closed by|broken pipe|\btm_|system error|"
    r"(network|host) is down",
    re.I,
)
LINES = 20  # of what a starting command said
WHOLE_LINE = 2**16  # bytes; a longer line is passed on in pieces


@dataclass
class Node:
    """A node of the step.

    Attributes:
        start: command that starts the agent.
        plan: what the agent runs there, see dispatch.py.
        channel: to the agent, once it has connected.
        machine: of the agent, see there.
        ended: set when nothing of the step runs there any more, as far as is known.
        status: of the node's command; None if it is not known.
        pending: for each of stdout and stderr, the beginning of a line.
    """

    number: int
    host: str
    start: list[str]
    plan: dict[str, Any]
    channel: Channel | None = None
    machine: list[str] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    status: int | None = None
    pending: dict[int, str] = field(default_factory=lambda: {1: "", 2: ""})
    said: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))


class RemoteStep:
    """A running step.

    Args:
        given: see `AgentScheduler.commands`.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.nodes = [Node(number, **node) for number, node in enumerate(given["nodes"])]
        self.file, self.address = Path(given["file"]), given["address"]
        self.dispatch, self.private = given["dispatch"], given["private"]
        # What the agents' own environment must not replace comes from here, without the secrets.
        self.environment = {k: v for k, v in os.environ.items() if k not in given["private"]}
        os.environ.update(given["private"])
        self.failed: Node | None = None
        self.trouble: Trouble | None = None
        self.over = asyncio.Event()
        self.stopping = False
        self.strangers = 0
        # What the nodes have written; None at the end of a stream.
        self.printing: asyncio.Queue[tuple[Node, int, str | None]] = asyncio.Queue()

    async def run(self) -> int:
        """Run the step to its end; returns its status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        listener = listen(self.address, max(128, len(self.nodes)))
        server = await asyncio.start_server(self.serve, sock=listener)
        self.write_file(listener)
        starters: list[Process] = []
        printer = asyncio.create_task(self.print_all())
        try:
            for node in self.nodes:
                starters.append(await self.start(node))
            watchers = [
                asyncio.create_task(self.watch(*pair, server))
                for pair in zip(self.nodes, starters, strict=True)
            ]
            await self.over.wait()
            await self.end_all()
        finally:
            server.close()
            self.file.unlink(missing_ok=True)
            for starter in starters:
                with suppress(ProcessLookupError):
                    starter.kill()
        await asyncio.wait(watchers, timeout=2)
        await self.printing.join()
        printer.cancel()
        if self.trouble:
            print(f"remote_step: {self.trouble.text}", file=sys.stderr, flush=True)
            send(self.trouble.record())
        if self.failed is None:
            return 0
        # A command that a signal has ended has a negative status; shells add 128 to the signal.
        status = self.failed.status or 1
        return status if status > 0 else 128 - status

    def write_file(self, listener: socket.socket) -> None:
        """The file from which the agents learn where to connect, the secret and the environment.
        Only this user can read it.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            port = listener.getsockname()[1]
            given = {"address": self.address, "port": port, "private": self.private}
            # Sessions on other nodes begin with another one.
            os.umask(umask := os.umask(0))
            json.dump(given | {"umask": umask, "environment": self.environment}, file)

    async def start(self, node: Node) -> Process:
        try:
            # In a session of its own: Ctrl-C reaches only launch, which ends us in order.
            return await asyncio.create_subprocess_exec(
                *node.start, stdin=DEVNULL, stdout=PIPE, stderr=asyncio.subprocess.STDOUT,
                # Without the secret: what has it belongs to a node's part of the step.
                start_new_session=True, env=self.environment,
            )  # fmt: skip
        except OSError as error:
            raise Refusal(f"{node.start[0]}: {error.strerror}; is it on PATH here?") from None

    async def watch(self, node: Node, starter: Process, server: asyncio.Server) -> None:
        """Wait until the agent has connected, or cannot any more, and then for what started it."""
        assert starter.stdout
        reading = asyncio.create_task(self.read_starter(node, starter.stdout))
        waiting = asyncio.create_task(starter.wait())
        deadline = asyncio.get_running_loop().time() + CONNECTED
        while node.channel is None and not node.ended.is_set():
            done, _ = await asyncio.wait([waiting], timeout=0.2)
            if done and node.channel is None:
                await asyncio.wait([reading], timeout=2)
                # Before its last line may come a site's welcome.
                said, status = node.said[-1] if node.said else "", starter.returncode or 0
                lost = status < 0 or bool(PASSES.search(said))
                why = f"{Path(node.start[0]).name} {how(status)}" + (f": {said}" if said else "")
                self.lose(node, why, Cause.NODE_LOST if lost else Cause.OTHER)
                return
            if asyncio.get_running_loop().time() > deadline:
                self.lose(node, f"its agent has not connected within {CONNECTED} s; "
                          f"can it reach {self.address}?")  # fmt: skip
                return
        if all(node.channel for node in self.nodes):
            self.file.unlink(missing_ok=True)
            server.close()
        # asyncio prints a traceback if a pipe is still open at its end.
        await reading

    async def read_starter(self, node: Node, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(WHOLE_LINE):
            node.said += [line for line in chunk.decode(errors="replace").splitlines() if line]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run a node's command through an agent that has connected."""
        if self.strangers >= STRANGERS + len(self.nodes):
            writer.close()
            return
        self.strangers += 1
        try:
            met = await accept(reader, writer)
        finally:
            self.strangers -= 1
        if met is None:
            return
        channel, number, machine = met
        if not 0 <= number < len(self.nodes) or self.nodes[number].channel or self.stopping:
            writer.close()
            return
        node = self.nodes[number]
        node.channel, node.machine = channel, machine
        try:
            if same := self.named_before(node):
                why = f"it is the same machine as {same}; name each once"
                self.lose(node, why, Cause.OTHER)
                return
            await channel.send({
                "command": [*self.dispatch, "--node", str(node.number)],
                "stdin": json.dumps({node.number: node.plan}),
                "folder": str(Path.cwd()),
            })  # fmt: skip
            while message := await channel.receive():
                if "status" in message:
                    self.end(node, int(message["status"]))
                    return
                self.printing.put_nowait((node, int(message["stream"]), str(message["text"])))
            await asyncio.sleep(0.2)  # for its last words
            last = f": {node.said[-1]}" if node.said else "; was it killed?"
            self.lose(node, f"its agent has ended{last}")
        except TimeoutError:
            self.lose(node, f"it has not answered for {LOST_AFTER} s")
        except (OSError, Refusal, ValueError, KeyError, TypeError) as error:
            self.lose(node, reason(error))
        finally:
            writer.close()

    def named_before(self, node: Node) -> str:
        """The other name of a node's machine under which an agent has connected; empty if none."""
        others = [other for other in self.nodes if other.host != node.host]
        same = (other.host for other in others if node.machine and other.machine == node.machine)
        return next(same, "")

    async def print_all(self) -> None:
        """Print what the nodes write, and ask each for more once it is printed.

        launch may be suspended, or wait for a disk. The connections are read all the same:
        otherwise the kernel takes us for dead and breaks them.
        """
        while True:
            node, stream, text = await self.printing.get()
            await asyncio.to_thread(self.show, node, stream, text)
            if node.channel and text is not None:
                # One that is lost meanwhile is told of elsewhere.
                with suppress(OSError):
                    await node.channel.send({"printed": stream})
            self.printing.task_done()

    def show(self, node: Node, stream: int, text: str | None) -> None:
        """Print a node's whole lines with its number; at the end of a stream, the rest of it."""
        if text is None:
            text = "\n" if node.pending[stream] else ""
        *lines, node.pending[stream] = (node.pending[stream] + text).split("\n")
        if len(node.pending[stream]) > WHOLE_LINE:
            lines.append(node.pending[stream])
            node.pending[stream] = ""
        if lines:
            block = "".join(f"{node.number}: {line}\n" for line in lines)
            # If launch is gone, we are told to end.
            output = sys.stdout if stream == 1 else sys.stderr
            showing.show(output.buffer, block.encode(errors="replace"))

    def end(self, node: Node, status: int) -> None:
        for stream in node.pending:
            self.printing.put_nowait((node, stream, None))
        node.status = status
        node.ended.set()
        if status < 0 and not self.stopping and not self.trouble:
            text = f"{node.host}: its command {how(status)}"
            self.trouble = Trouble(text, node.host, Cause.LAUNCHER_KILLED)
        if status and self.failed is None:
            self.failed = node
            self.over.set()
        if all(node.ended.is_set() for node in self.nodes):
            self.over.set()

    def lose(self, node: Node, why: str, cause: Cause = Cause.NODE_LOST) -> None:
        if node.ended.is_set():
            return
        node.ended.set()
        if not self.trouble:
            what = "is lost" if cause == Cause.NODE_LOST else "starts no agent"
            self.trouble = Trouble(f"{node.host} {what}: {why}", node.host, cause)
        if self.failed is None:
            self.failed = node
        self.over.set()

    def stop(self) -> None:
        self.stopping = True
        self.over.set()

    async def end_all(self) -> None:
        """Have every agent end its command, and wait for it."""
        self.stopping = True
        for node in self.nodes:
            if node.channel is None:
                node.ended.set()
            elif not node.ended.is_set():
                with suppress(OSError):
                    await asyncio.wait_for(node.channel.send({"signal": "SIGTERM"}), 1)
        waiting = [asyncio.create_task(node.ended.wait()) for node in self.nodes]
        _, late = await asyncio.wait(waiting, timeout=STEP_GRACE)
        for node in self.nodes:
            if late and not node.ended.is_set():
                self.lose(node, f"it has not answered for {STEP_GRACE} s")


def listen(address: str, backlog: int) -> socket.socket:
    """A socket for IPv4 and IPv6 with one port; only on loopback if that is our address."""
    if address == LOOPBACK:
        return socket.create_server((address, 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
        )
    return socket.create_server(("", 0), backlog=backlog)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with told_in_one_line("remote_step"):
        given = json.load(sys.stdin)
        status = asyncio.run(RemoteStep(given).run())
    sys.exit(status)


if __name__ == "__main__":
    main()
