"""The launchers: what starts the ranks on a node. Each is a pure function from a run's geometry and a node's place in it to a
command, all of which start the same program with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html, https://huggingface.co/docs/accelerate/package_reference/cli,
https://slurm.schedmd.com/srun.html.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp import torch_distributed_launch
from ddp.errors import Refusal


@dataclass(frozen=True)
class Geometry:
    """How many processes run where."""

    nodes: int
    nproc_per_node: int
    cpus_per_proc: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node


@dataclass(frozen=True)
class Place:
    """A node's place among the nodes of a run.

    Attributes:
        node_rank: 0 .. nodes - 1.
        address: where the others reach this node.
        master_address: where all reach node 0.
        port: for the rendezvous, on node 0.
        folder: where the launcher may put its own files.
        private: folder that only this user can enter, where all nodes are this machine; empty elsewhere. What the nodes have to tell
            each other goes through files in it: torch's TCP store would answer everybody who reaches this machine.
    """

    node_rank: int
    address: str
    master_address: str
    port: int
    folder: str
    private: str = ""


# Seconds that nodes wait for each other, all of which import torch first, some perhaps from a cold network file system. That they
# can reach node 0 is known by then.
RENDEZVOUS_TIMEOUT = 300
# By default each agent adds a sign of life to the file every 5 s, for ever; launch itself sees that an agent has ended.
FILE_CONFIGURATION = f"store_type=file,keep_alive_interval=1000000,join_timeout={RENDEZVOUS_TIMEOUT},timeout={RENDEZVOUS_TIMEOUT}"

Started = tuple[dict[str, str], tuple[str, ...]]


def module(name: str, options: Mapping[str, object]) -> tuple[str, ...]:
    return ("-m", name, *as_options(options))


def as_options(options: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(f"--{option}" if value is None else f"--{option}={value}" for option, value in options.items())


def torchrun(geometry: Geometry, place: Place) -> Started:
    """Between nodes static rendezvous: the given address and port are the only ones used, and the ranks follow the order of the nodes."""
    return {}, (*module("torch.distributed.run", rendezvous(geometry, place)), "--")


def rendezvous(geometry: Geometry, place: Place) -> dict[str, object]:
    return file_rendezvous(geometry, place) if place.private else static_rendezvous(geometry, place)


def file_rendezvous(geometry: Geometry, place: Place) -> dict[str, object]:
    """The c10d rendezvous through a file: it opens no port. The static one has no such form."""
    return {
        "nnodes": geometry.nodes,
        "nproc-per-node": geometry.nproc_per_node,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": agents_file(place),
        "rdzv-id": "agents",
        "rdzv-conf": FILE_CONFIGURATION,
        "local-addr": place.address,
        "max-restarts": 0,
        "log-dir": place.folder,
    }


def agents_file(place: Place) -> str:
    return f"{place.private}/agents"


def static_rendezvous(geometry: Geometry, place: Place) -> dict[str, object]:
    return {
        "nnodes": geometry.nodes,
        "node-rank": place.node_rank,
        "nproc-per-node": geometry.nproc_per_node,
        "master-addr": place.master_address,
        "master-port": place.port,
        "rdzv-conf": f"timeout={RENDEZVOUS_TIMEOUT}",
        "max-restarts": 0,
        # By default each torchrun leaves a folder in TMPDIR for ever; with /dev/null it was seen to hang at its end.
        "log-dir": place.folder,
    }


def torchrun_c10d(geometry: Geometry, place: Place) -> Started:
    """The c10d rendezvous: ranks go to the nodes in the order in which they arrive; between machines through torchrun_signed.py."""
    if place.private:
        return torchrun(geometry, place)
    options = {
        "nnodes": geometry.nodes,
        "nproc-per-node": geometry.nproc_per_node,
        "rdzv-backend": "c10d-signed",
        "rdzv-endpoint": f"{place.master_address}:{place.port}",
        # Said, because torchrun compares names to find out, and nodes have several.
        "rdzv-conf": f"is_host={int(place.node_rank == 0)},join_timeout={RENDEZVOUS_TIMEOUT},timeout={RENDEZVOUS_TIMEOUT}",
        # c10d opens a second endpoint for the ranks, by default under a name that the other nodes may not know (measured).
        "local-addr": place.address,
        "max-restarts": 0,
        "log-dir": place.folder,
    }
    return {}, (str(Path(__file__).resolve().parents[1] / "torchrun_signed.py"), *as_options(options), "--")


def srun(geometry: Geometry, place: Place) -> Started:
    """Slurm starts the ranks, one task each, and numbers them: no other launcher takes part."""
    environment = {
        "RANK": "$SLURM_PROCID",
        "LOCAL_RANK": "$SLURM_LOCALID",
        "WORLD_SIZE": "$SLURM_NTASKS",
        "LOCAL_WORLD_SIZE": str(geometry.nproc_per_node),
        "MASTER_ADDR": place.master_address,
        "MASTER_PORT": str(place.port),
    }
    return environment, ()


def accelerate(geometry: Geometry, place: Place) -> Started:
    """Hugging Face's launcher, as a starter of processes: what it says of precision and devices is not ours.

    Raises:
        Refusal: it is not installed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise Refusal("launcher: accelerate is not installed for this Python; pip install accelerate, or use torchrun")
    options: dict[str, object] = {
        "num_machines": geometry.nodes,
        "machine_rank": place.node_rank,
        "num_processes": geometry.world_size,
        "main_process_ip": place.master_address,
        "main_process_port": place.port,
        "num_cpu_threads_per_process": geometry.cpus_per_proc,
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "max_restarts": 0,
        "log_dir": place.folder,
    }
    # Its home is moved, so that no default configuration of the user's changes the plan.
    environment = {"HF_HOME": place.folder}
    if geometry.world_size > 1:
        # What it calls multi_gpu is one process a device, whatever the device; it refuses it for a single process.
        options["multi_gpu"] = None
        if place.private:
            options |= {"rdzv_backend": "c10d", "rdzv_conf": FILE_CONFIGURATION}
            # It makes an endpoint of address and port, if there are several nodes; the rest it leaves to torchrun's own variables.
            options["main_process_ip"] = agents_file(place)
            environment |= {"PET_RDZV_ENDPOINT": agents_file(place), "PET_RDZV_ID": "agents", "PET_LOCAL_ADDR": place.address}
        else:
            options |= {"same_network": None, "rdzv_backend": "static", "rdzv_conf": f"timeout={RENDEZVOUS_TIMEOUT}"}
    return environment, module("accelerate.commands.launch", options)


def legacy(geometry: Geometry, place: Place) -> Started:
    """torchrun's predecessor; `--use-env` has it put the rank into the environment, as torchrun does.

    Raises:
        Refusal: the installed torch no longer has it.
    """
    torch_distributed_launch.refuse_if_dropped()
    options = {"use-env": None} | rendezvous(geometry, place)
    return {}, (*module(torch_distributed_launch.MODULE, options), "--")


def none(_geometry: Geometry, _place: Place) -> Started:
    """The program itself, once a node."""
    return {}, ()


LAUNCHERS: dict[str, Callable[[Geometry, Place], Started]] = {
    "torchrun": torchrun,
    "torchrun-c10d": torchrun_c10d,
    "srun": srun,
    "accelerate": accelerate,
    "torch.distributed.launch": legacy,
    "none": none,
}
