"""The launchers, which start the ranks on a node.

Each is a pure function from a run's geometry and a node's place in it to a command. All commands
start the same program with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

Sources:
https://docs.pytorch.org/docs/stable/elastic/run.html,
https://huggingface.co/docs/accelerate/package_reference/cli
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from manynodes.base.environment import SCRIPTS
from manynodes.base.errors import Refusal
from manynodes.base.timeouts import RENDEZVOUS
from manynodes.schedulers.base import as_options


@dataclass(frozen=True)
class Geometry:
    """How many processes run where.

    Attributes:
        cpus_per_proc: CPUs of each process.
        wanted_cpus: the same as the user gave it; `auto` for an even share.
        device: `auto`, `cpu` or `cuda`.
    """

    nodes: int
    nproc_per_node: int
    cpus_per_proc: int
    wanted_cpus: str = "auto"
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node


@dataclass(frozen=True)
class Place:
    """A node among the nodes of a run.

    Attributes:
        node_rank: 0 .. nodes - 1.
        address: where the other nodes reach this node.
        master_address: where all nodes reach node 0.
        port: for the rendezvous, on node 0.
        folder: where the launcher may put its own files.
        one_machine: all nodes are one machine, and only this user can enter the folder. The nodes
            exchange their addresses through files in it, because torch's TCP store answers every
            process that can reach the machine.
    """

    node_rank: int
    address: str
    master_address: str
    port: int
    folder: str
    one_machine: bool = False


TIMEOUTS = f"join_timeout={RENDEZVOUS},timeout={RENDEZVOUS}"
# By default each agent appends a heartbeat to the file every 5 s, without end; launch itself
# notices the end of an agent.
FILE_CONFIGURATION = f"store_type=file,keep_alive_interval=1000000,{TIMEOUTS}"

# Additional variables, and the command that stands before the program.
Started = tuple[dict[str, str], tuple[str, ...]]
Launcher = Callable[[Geometry, Place], Started]


def torchrun(geometry: Geometry, place: Place) -> Started:
    """torchrun. Between nodes it uses static rendezvous: only the given address and port, and
    ranks in the order of the nodes.
    """
    return {}, torchrun_program(rendezvous(geometry, place))


def torchrun_program(options: Mapping[str, object]) -> tuple[str, ...]:
    return (script("torchrun.py"), *as_options(options), "--")


def script(name: str) -> str:
    """The path of a program of the workflow."""
    return f"{SCRIPTS}/{name}"


def rendezvous(geometry: Geometry, place: Place) -> dict[str, object]:
    """Static between nodes. On one machine c10d through a file, which opens no port; the static
    rendezvous has no such form.
    """
    how: dict[str, object] = {
        "node-rank": place.node_rank,
        "master-addr": place.master_address,
        "master-port": place.port,
        "rdzv-conf": f"timeout={RENDEZVOUS}",
    }
    if place.one_machine:
        how = {
            "rdzv-backend": "c10d",
            "rdzv-endpoint": agents_file(place),
            "rdzv-id": "agents",
            "rdzv-conf": FILE_CONFIGURATION,
            "local-addr": place.address,
        }
    return agent(geometry, place, how)


def agent(geometry: Geometry, place: Place, how: Mapping[str, object]) -> dict[str, object]:
    """The options of torchrun on a node.

    Args:
        how: options by which the nodes find each other.
    """
    return {
        "nnodes": geometry.nodes,
        "nproc-per-node": geometry.nproc_per_node,
        **how,
        "max-restarts": 0,
        # By default each torchrun leaves a folder in TMPDIR; with /dev/null it was seen to hang at
        # its end.
        "log-dir": place.folder,
    }


def agents_file(place: Place) -> str:
    return f"{place.folder}/agents"


def torchrun_c10d(geometry: Geometry, place: Place) -> Started:
    """torchrun with c10d rendezvous, which numbers nodes in the order of their arrival; signed
    between nodes.
    """
    if place.one_machine:
        return torchrun(geometry, place)
    how = {
        "rdzv-backend": "c10d-signed",
        "rdzv-endpoint": f"{place.master_address}:{place.port}",
        # Given explicitly: torchrun would compare names, and nodes have several.
        "rdzv-conf": f"is_host={int(place.node_rank == 0)},{TIMEOUTS}",
        # c10d opens a second endpoint for the ranks, by default under a name that the other nodes
        # may not know (measured).
        "local-addr": place.address,
    }
    return {}, torchrun_program(agent(geometry, place, how))


def accelerate(geometry: Geometry, place: Place) -> Started:
    """Hugging Face's launcher, used only to start processes; its precision is the user's variable,
    its device is unused.

    Raises:
        Refusal: it is not installed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise Refusal(
            "launcher: accelerate is not installed for this Python; pip install accelerate, or use "
            "torchrun"
        )
    options: dict[str, object] = {
        "num_machines": geometry.nodes,
        "machine_rank": place.node_rank,
        "num_processes": geometry.world_size,
        "main_process_ip": place.master_address,
        "main_process_port": place.port,
        "num_cpu_threads_per_process": geometry.cpus_per_proc,
        "mixed_precision": os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
        "dynamo_backend": "no",
        "max_restarts": 0,
        "log_dir": place.folder,
    }
    if geometry.world_size == 1:
        # It gives a single process no place among others.
        environment = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": place.master_address,
            "MASTER_PORT": str(place.port),
        }
    else:
        environment = {}
        # Its multi_gpu means one process per device of any kind, and it refuses that for one
        # process.
        options["multi_gpu"] = None
        if place.one_machine:
            options |= {"rdzv_backend": "c10d", "rdzv_conf": FILE_CONFIGURATION}
            # With several nodes it builds the endpoint from address and port; the rest comes from
            # torchrun's own variables.
            options["main_process_ip"] = agents_file(place)
            environment |= {
                "PET_RDZV_ENDPOINT": agents_file(place),
                "PET_RDZV_ID": "agents",
                "PET_LOCAL_ADDR": place.address,
            }
        else:
            options |= {
                "same_network": None,
                "rdzv_backend": "static",
                "rdzv_conf": f"timeout={RENDEZVOUS}",
            }
    return environment, (script("accelerate_launch.py"), *as_options(options))


def legacy(geometry: Geometry, place: Place) -> Started:
    """torch.distributed.launch, torchrun's predecessor, which torch will drop; with `--use-env` it
    passes the rank like torchrun.

    Raises:
        Refusal: the installed torch no longer has it.
    """
    module = "torch.distributed.launch"
    # Looked up as a file: find_spec on the module would import torch, which takes seconds.
    torch = importlib.util.find_spec("torch")
    origin = torch.origin if torch else None
    if not origin or not Path(origin).with_name("distributed").joinpath("launch.py").exists():
        raise Refusal(
            f"launcher: the installed torch has no {module} any more; use torchrun, its successor"
        )
    options = {"use-env": None} | rendezvous(geometry, place)
    return {}, ("-m", module, *as_options(options), "--")


def none(_geometry: Geometry, _place: Place) -> Started:
    """The program itself, once per node."""
    return {}, ()


LAUNCHERS: dict[str, Launcher] = {
    "torchrun": torchrun,
    "torchrun-c10d": torchrun_c10d,
    "accelerate": accelerate,
    "torch.distributed.launch": legacy,
    "none": none,
}
