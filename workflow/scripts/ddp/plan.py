"""The launch plan: from a run's geometry to one command and environment per node. Pure, so it is compared with golden files."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """How many processes run where."""

    nodes: int
    nproc_per_node: int
    cpus_per_proc: int


@dataclass(frozen=True)
class NodeCommand:
    """What is started on one node.

    Attributes:
        node_rank: 0 .. nodes - 1.
        environment: variables added to those of the launcher.
        command: argument list.
    """

    node_rank: int
    environment: dict[str, str]
    command: tuple[str, ...]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return f"[node {self.node_rank}] {' '.join(variables)} {shlex.join(self.command)}"


def local_plan(launcher: str, geometry: Geometry, program: Sequence[str], port: int, folder: str, gpus: Sequence[str]) -> list[NodeCommand]:
    """One command per node, all of them on this machine and joined over loopback.

    Args:
        launcher: `torchrun` (static rendezvous) starts nproc_per_node processes, `none` the program itself, once.
        geometry: of the run; with `none` only its nodes matter.
        program: path of a Python program and its arguments.
        port: free TCP port for the rendezvous.
        folder: where torchrun may put its own files.
        gpus: one for every process, or none to compute on the CPU.
    """
    plan = []
    for node_rank in range(geometry.nodes):
        own = gpus[node_rank * geometry.nproc_per_node :][: geometry.nproc_per_node]
        environment = {
            "CUDA_VISIBLE_DEVICES": ",".join(own),
            "GLOO_SOCKET_IFNAME": "lo",
            "NODE_RANK": str(node_rank),
            "NCCL_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(geometry.cpus_per_proc),
            # So that a program's lines arrive as they are written, through pipes too.
            "PYTHONUNBUFFERED": "1",
        }
        command = torchrun_command(geometry, node_rank, "127.0.0.1", port, folder) if launcher == "torchrun" else (sys.executable,)
        plan.append(NodeCommand(node_rank, environment, (*command, *program)))
    return plan


def torchrun_command(geometry: Geometry, node_rank: int, address: str, port: int, folder: str) -> tuple[str, ...]:
    """torchrun with static rendezvous: the given address and port are the only ones used.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html; that c10d opens a second endpoint under a name of its own
    choosing was measured.
    """
    options = {
        "nnodes": geometry.nodes,
        "node-rank": node_rank,
        "nproc-per-node": geometry.nproc_per_node,
        "master-addr": address,
        "master-port": port,
        "max-restarts": 0,
        # By default each torchrun leaves a folder in TMPDIR for ever; with /dev/null it was seen to hang at its end.
        "log-dir": folder,
    }
    return (sys.executable, "-m", "torch.distributed.run", *(f"--{name}={value}" for name, value in options.items()), "--")
