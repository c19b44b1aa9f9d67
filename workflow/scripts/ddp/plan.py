"""The launch plan: from a run's geometry to one command and environment per node. Pure, so it is compared with golden files."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ddp.launchers import LAUNCHERS, Geometry, Place


@dataclass(frozen=True)
class NodeCommand:
    """What is started on one node.

    Attributes:
        node_rank: 0 .. nodes - 1.
        host: name of the node, as the scheduler has it.
        environment: variables added to those that are there; `$NAME` at the beginning of a value is looked up on the node.
        command: argument list.
    """

    node_rank: int
    host: str
    environment: dict[str, str]
    command: tuple[str, ...]

    def __str__(self) -> str:
        variables = [f"{name}={value if value.startswith('$') else shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return f"[node {self.node_rank}, {self.host}] {' '.join(variables)} {shlex.join(self.command)}"


# One machine's ranks listen on loopback only.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def local_plan(launcher: str, geometry: Geometry, program: Sequence[str], port: int, folder: str, gpus: Sequence[str]) -> list[NodeCommand]:
    """One command per node, all of them on this machine and joined over loopback.

    Args:
        launcher: one of LAUNCHERS less `srun`; `none` is the program itself, once a node.
        geometry: of the run; with `none` only its nodes matter.
        program: path of a Python program and its arguments.
        port: free TCP port, for programs that ask for one.
        folder: that only this user can enter; the launcher may put its own files there.
        gpus: one for every process, or none to compute on the CPU.
    """
    plan = []
    for node_rank in range(geometry.nodes):
        own = gpus[node_rank * geometry.nproc_per_node :][: geometry.nproc_per_node]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(own)} | LOOPBACK
        place = Place(node_rank, "127.0.0.1", "127.0.0.1", port, folder, private=folder)
        plan.append(node_command(launcher, geometry, program, place, "this machine", environment))
    return plan


def srun_plan(
    launcher: str, geometry: Geometry, program: Sequence[str], hosts: Sequence[str], addresses: Sequence[str], port: int, folder: str
) -> list[NodeCommand]:
    """One command per node of a Slurm job, rank 0 on its first node.

    Args:
        hosts: names of the job's nodes, in Slurm's order.
        addresses: where each of them is reached.
        folder: where the launcher may put its own files, on each node; on a job of one node as for `local_plan`.

    The rest is as for `local_plan`. Between several nodes, which network to use is left to gloo and NCCL; the GPUs are those that Slurm
    shows.
    """
    alone = len(hosts) == 1
    plan = []
    for node_rank, host in enumerate(hosts):
        own, master = ("127.0.0.1", "127.0.0.1") if alone else (addresses[node_rank], addresses[0])
        place = Place(node_rank, own, master, port, folder, private=folder if alone else "")
        plan.append(node_command(launcher, geometry, program, place, host, LOOPBACK if alone else {}))
    return plan


def node_command(
    launcher: str, geometry: Geometry, program: Sequence[str], place: Place, host: str, environment: dict[str, str]
) -> NodeCommand:
    common = {
        "NODE_RANK": str(place.node_rank),
        "OMP_NUM_THREADS": str(geometry.cpus_per_proc),
        # libgomp's threads spin while they wait, by default so long that on a busy machine they keep the CPU from those they wait for.
        # With this count a step takes 1.02 times as long on an idle machine and 0.67 times on a busy one (benchmarks/busy.py).
        "GOMP_SPINCOUNT": "10000",
        # So that a program's lines arrive as they are written, through pipes too.
        "PYTHONUNBUFFERED": "1",
    }
    if place.private:
        # Else the agents would open a store for the ranks to meet at, which answers everybody who reaches this machine.
        common |= {"RUN_STORE": f"{place.private}/ranks", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    own, command = LAUNCHERS[launcher](geometry, place)
    return NodeCommand(place.node_rank, host, environment | common | own, (sys.executable, *command, *program))


def srun_command(launcher: str, geometry: Geometry, gpus_per_node: int, program: Sequence[str]) -> tuple[str, ...]:
    """One job step over all nodes of the job: a task a node, or with the launcher `srun` a task a rank.

    Every option is given: inside a Snakemake job the variables are gone from which srun would take them, and since Slurm 22.05 it
    takes --cpus-per-task from nowhere else.
    """
    per_rank = launcher == "srun"
    tasks = geometry.nproc_per_node if per_rank else 1
    options: dict[str, object] = {
        "nodes": geometry.nodes,
        "ntasks": geometry.nodes * tasks,
        "ntasks-per-node": tasks,
        "cpus-per-task": geometry.cpus_per_proc * (1 if per_rank else geometry.nproc_per_node),
        # A task a node in Slurm's order: node ranks, and so ranks, are then the same in every attempt.
        "distribution": "block",
        "kill-on-bad-exit": 1,
        # Not a site's own: it ends tasks that are still at work so long after the first is done.
        "wait": 0,
        "label": None,
        # Ranks find each other by themselves.
        "mpi": "none",
        # A step that cannot begin within so many seconds, in a job whose resources another step holds, fails aloud.
        "immediate": 60,
        # The batch shell of the job holds no step of its own, but an interactive one does.
        "overlap": None,
    }
    if gpus_per_node:
        options["gres"] = f"gpu:{gpus_per_node}"
    return ("srun", *(f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()), *program)
