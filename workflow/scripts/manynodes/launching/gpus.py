"""The GPUs of this machine, to be shared by its agents."""

import os
import shutil
import socket
import subprocess

from manynodes.base.errors import Refusal


def usable_gpus(device: str, world_size: int) -> list[str]:
    """The GPUs to share; none if the device is `cpu`, or `auto` and there are too few.

    Raises:
        Refusal: the device is `cuda` and there are fewer GPUs than processes.
    """
    gpus = [] if device == "cpu" else visible_gpus()
    if device == "cuda" and len(gpus) < world_size:
        raise Refusal(
            f"device: cuda needs {world_size} GPUs, one per process; {socket.gethostname()} has "
            f"{len(gpus)}"
        )
    return gpus if len(gpus) >= world_size else []


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise Refusal(
            f"nvidia-smi does not answer on {socket.gethostname()}; its GPUs need an administrator"
        ) from None
    return done.stdout.split() if done.returncode == 0 else []
