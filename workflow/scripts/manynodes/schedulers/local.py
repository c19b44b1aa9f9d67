"""No scheduler: all nodes are this machine."""

import os
from collections.abc import Mapping
from functools import partial

from manynodes.base.processes import process_name
from manynodes.schedulers.base import Allocation, Command, Scheduler, Step


class Local(Scheduler):
    transport = "local"
    description = "all nodes are this machine"
    executor = "local"
    shared_cpus = True

    def active(self, environment: Mapping[str, str]) -> bool:
        return False

    def allocation(self, nodes: int) -> Allocation:
        owner = process_name()
        return Allocation(owner, ("this machine",) * nodes, ("127.0.0.1",) * nodes, os.getpid())

    def commands(self, step: Step) -> list[Command]:
        label = "[node {}] " if len(step.nodes) > 1 else ""
        return [
            Command(
                node.command,
                {**node.environment, **step.private},
                label=partial(labelled, label.format(node.node_rank)),
            )
            for node in step.nodes
        ]

    def starter(self, number: int) -> str:
        return f"the command of node {number}"


def labelled(label: str, line: str) -> tuple[str, str]:
    return label, line


SCHEDULER = Local()
