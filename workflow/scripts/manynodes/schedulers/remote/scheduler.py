"""What schedulers that start their steps through agents have in common."""

import json
import os
import secrets
import socket
import sys
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from manynodes.base.atomic import TEMPORARY
from manynodes.base.environment import SCRIPTS
from manynodes.schedulers.base import Command, Scheduler, Step, Trouble, labelled

LOOPBACK = "127.0.0.1"


class AgentScheduler(Scheduler):
    """Starts an agent on every node, which runs the node's command; see remote_step.py."""

    starter = "remote_step"

    @abstractmethod
    def reach(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """The command that starts another one on a host."""

    def start(self, number: int, host: str, command: Sequence[str]) -> list[str]:
        """The command that starts another one on a node of the step; this is node 0."""
        if not number:
            return list(command)
        # The rest of the environment comes through the agent, whose own Python may need this.
        path = os.environ.get("LD_LIBRARY_PATH")
        first = ["env", f"LD_LIBRARY_PATH={path}"] if path else []
        return list(self.reach(host, [*first, *command]))

    def commands(self, step: Step) -> list[Command]:
        # Unique: launches of several users or runs may share the folder.
        file = step.folder.absolute() / f".step-{secrets.token_hex(8)}{TEMPORARY}"
        agent = [sys.executable, str(SCRIPTS / "node_agent.py"), "--step", str(file)]
        hosts = [node.host for node in step.nodes]
        given = {
            "file": str(file),
            "address": hosts[0] if len(set(hosts)) > 1 else LOOPBACK,
            "private": dict(step.private),
            "dispatch": [*step.dispatch],
            "nodes": [
                {
                    "host": node.host,
                    "start": self.start(number, node.host, [*agent, "--node", str(number)]),
                    "plan": {"environment": node.environment, "command": node.command},
                }
                for number, node in enumerate(step.nodes)
            ],
        }
        return [
            Command(
                (sys.executable, str(SCRIPTS / "remote_step.py")),
                stdin=json.dumps(given),
                label=partial(labelled, "node"),
            )
        ]

    def preview(self, step: Step) -> list[str]:
        agent = ["node_agent.py"]
        hosts = [node.host for node in step.nodes]
        started = [" ".join(self.start(number, host, agent)) for number, host in enumerate(hosts)]
        return [*started, *super().preview(step)]

    def explain(self, errors: Sequence[str]) -> Trouble | None:
        # remote_step: pbs_tmrsh: No such file or directory; is it on PATH here?
        said = [text for text in errors if text.startswith("remote_step: ")]
        return Trouble(said[0].removeprefix("remote_step: ")) if said else None


def is_here(host: str) -> bool:
    """Whether this machine has one of the host's addresses."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, _, _, _, address in found:
        with socket.socket(family) as probe:
            try:
                probe.bind((address[0], 0))
                return True
            except OSError:
                continue
    return False
