"""The launch plan: from a run's geometry to one command and environment per node.

Pure functions; tests compare their result with golden files.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial

from manynodes.base.environment import Environment
from manynodes.base.errors import Refusal
from manynodes.launching.launchers import LAUNCHERS, Geometry, Launcher, Place, Started
from manynodes.schedulers.base import Allocation, NodeCommand, Scheduler
from manynodes.schedulers.registry import task_launchers

# The ranks of one machine listen on loopback only.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def launcher_names() -> tuple[str, ...]:
    """The launchers, and those of the schedulers."""
    return (*LAUNCHERS, *task_launchers())


def find_launcher(name: str, scheduler: Scheduler) -> Launcher:
    """A launcher by its name.

    Raises:
        Refusal: it needs another scheduler.
    """
    owner = task_launchers().get(name)
    if owner is None:
        return LAUNCHERS[name]
    if owner is not scheduler:
        raise Refusal(
            f"launcher: {name} needs transport {owner.transport}; "
            f"with transport {scheduler.transport} use torchrun"
        )
    return partial(tasks, scheduler.task_variables)


def tasks(variables: Mapping[str, str], geometry: Geometry, place: Place) -> Started:
    """The scheduler starts one task per rank and numbers them; there is no other launcher."""
    environment = dict(variables) | {
        "LOCAL_WORLD_SIZE": str(geometry.nproc_per_node),
        "MASTER_ADDR": place.master_address,
        "MASTER_PORT": str(place.port),
    }
    return environment, ()


def make_plan(
    launcher: Launcher,
    geometry: Geometry,
    program: Sequence[str],
    allocation: Allocation,
    port: int,
    folder: str,
    gpus: Sequence[str] | None,
    python: Sequence[str] = (sys.executable,),
) -> list[NodeCommand]:
    """One command per node, with rank 0 on the first node.

    Args:
        program: path of a Python program and its arguments.
        port: free TCP port of the first node for the rendezvous.
        folder: where the launcher may put its own files. If all nodes are one machine, only this
            user can enter it, and the nodes exchange their addresses through files in it.
        gpus: if the nodes share one machine, one GPU for every process, or none to compute on
            the CPU. None: each node uses the GPUs that it sees.
        python: the words that start a Python.
    """
    per_node = geometry.nproc_per_node
    one_machine = allocation.one_machine
    plan = []
    for node_rank, host in enumerate(allocation.hosts):
        address = allocation.addresses[node_rank]
        place = Place(node_rank, address, allocation.addresses[0], port, folder, one_machine)
        visible = {"CUDA_VISIBLE_DEVICES": ""} if geometry.device == "cpu" else {}
        if gpus is not None:
            here = gpus[node_rank * per_node :][:per_node]
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(here)}
        started, command = launcher(geometry, place)
        environment = visible | common(geometry, place) | started
        plan.append(NodeCommand(node_rank, host, environment, (*python, *command, *program)))
    return plan


def common(geometry: Geometry, place: Place) -> dict[str, str]:
    """The variables that every node gets with any launcher."""
    contract = Environment(
        node_rank=place.node_rank,
        nodes=geometry.nodes,
        nproc_per_node=geometry.nproc_per_node,
        cpus_per_proc=geometry.wanted_cpus,
        device=geometry.device,
        store=f"{place.folder}/ranks" if place.one_machine else None,
    )
    found = contract.variables() | {
        "OMP_NUM_THREADS": str(geometry.cpus_per_proc),
        # libgomp's waiting threads spin, by default for so long that on a busy machine they keep
        # the CPU from the threads that they wait for. With this count a step takes 1.02 times as
        # long on an idle machine and 0.67 times as long on a busy one (benchmarks/busy.py).
        "GOMP_SPINCOUNT": "10000",
        # Lines arrive as they are written, through pipes too.
        "PYTHONUNBUFFERED": "1",
    }
    if place.one_machine:
        # Otherwise the agents open a TCP store for the ranks, which answers every process that
        # can reach this machine.
        found |= LOOPBACK | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return found
