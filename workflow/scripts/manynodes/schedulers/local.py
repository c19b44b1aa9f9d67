"""No scheduler: all nodes are this machine."""

import os
from collections.abc import Sequence

from manynodes.base.errors import Refusal
from manynodes.base.processes import process_name
from manynodes.schedulers.base import Allocation, Command, NodeCommand, Scheduler, Step


class Local(Scheduler):
    transport = "local"
    description = "all nodes are this machine"
    executor = "local"
    starter = "the command of node {}"
    shared_cpus = True

    def allocation(self, nodes: int) -> Allocation:
        owner = process_name()
        return Allocation(owner, ("this machine",) * nodes, ("127.0.0.1",) * nodes, os.getpid())

    def on(self, hosts: Sequence[str]) -> Scheduler:
        raise Refusal("transport local is this machine alone; leave --transport or --hosts out")

    def commands(self, step: Step) -> list[Command]:
        def command(node: NodeCommand) -> Command:
            label = f"[node {node.node_rank}] " if len(step.nodes) > 1 else ""
            environment = {**node.environment, **step.private}
            return Command(node.command, environment, label=lambda line: (label, line))

        return [command(node) for node in step.nodes]


SCHEDULER = Local()
