"""The environment of a user's program: the contract, our modules, and the network between nodes."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from manynodes.base.environment import MODULES, Environment, variable
from manynodes.ranks.network import interface_of, local_address
from manynodes.schedulers import registry

# For examples only (RFC 5737): the way there is the default route. Nothing is sent.
OUTSIDE = "192.0.2.1"
# Name the GPUs of a job.
OF_GPUS = {f"{maker}_VISIBLE_DEVICES" for maker in ("CUDA", "ROCR", "HIP")}


def without_folder(words: Sequence[str], python: str) -> tuple[list[str], str]:
    """The command line, and the folder that a module is in: `-m folder:module` is ours alone.

    Args:
        python: the interpreter of the program.
    """
    if len(words) > 2 and words[:2] == [python, "-m"]:
        folder, _, module = words[2].rpartition(":")
        return [*words[:2], module, *words[3:]], folder
    return list(words), ""


def safely(words: Sequence[str], python: str, directory: str | None) -> list[str]:
    """The words of a program with which a module does not import from the folder where it starts,
    in which an earlier attempt, or others of a group, may have left a csv.py. Of our own Python:
    another one may be older than 3.11, which does not know the option. The variable of the same
    effect would be passed on to what the program starts.

    Args:
        words, python: as of `without_folder`.
        directory: where the program is to start; None for its results folder.
    """
    if directory or list(words[:2]) != [sys.executable, "-m"] or python != sys.executable:
        return list(words)
    return [python, "-P", *words[1:]]


def environment_of(contract: Environment, before: Mapping[str, str], folder: str) -> dict[str, str]:
    """The environment of the program.

    Args:
        folder: for Python to find modules in; empty for none.
        contract: added to it; its `device` decides whether a GPU may be used.
        before: this process's own environment.
    """
    found = dict(before)
    paths = [str(MODULES), *filter(None, [before.get("PYTHONPATH")])]
    if folder:
        paths.insert(0, folder)
    found |= {"PYTHONPATH": os.pathsep.join(paths)} | contract.variables()
    on_cpus = not gpu_here(contract.device, before)
    return gloo_interface(before) | found | for_accelerate(on_cpus, before)


def for_accelerate(on_cpus: bool, before: Mapping[str, str]) -> dict[str, str]:
    """What accelerate needs to connect processes on CPUs: without it each would train alone.

    Args:
        before: this process's own environment, in which the user may have said otherwise.
    """
    return {"ACCELERATE_USE_CPU": "true"} if on_cpus and "ACCELERATE_USE_CPU" not in before else {}


def sees_no_gpu(device: str | None, environment: Mapping[str, str]) -> bool:
    """Whether it is certain that programs find no GPU, of whatever kind."""
    return device == "cpu" or environment.get("CUDA_VISIBLE_DEVICES") == ""


def gpu_here(device: str | None, environment: Mapping[str, str]) -> bool:
    """Whether the program of a run may find a GPU on this node."""
    if sees_no_gpu(device, environment):
        return False
    # A job gets GPUs for `cuda`; without, it sees none, although the node has some.
    given = OF_GPUS & environment.keys()
    if device != "cuda" and not given and not registry.active(environment).shared_cpus:
        return False
    return any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def gloo_interface(environment: Mapping[str, str]) -> dict[str, str]:
    """The interface on which gloo is reached by other nodes.

    gloo takes the address of this host's own name, which Debian sets to 127.0.1.1.
    """
    master = environment.get("MASTER_ADDR", "")
    address = local_address(master) if master else ""
    several = int(environment.get(variable("nodes"), 1)) > 1
    if several and address.startswith("127.") and not master.startswith("127."):
        # MASTER_ADDR is this host's own name. The others come the way that leads out.
        address = local_address(OUTSIDE)
    if not address or address.startswith("127."):
        return {}
    interface = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}
