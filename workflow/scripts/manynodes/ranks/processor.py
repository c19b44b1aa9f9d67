"""The CPU features that decide torch's code paths, and with them the last bits of a result."""

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

# Lines of /proc/cpuinfo that identify a CPU; virtual machines give many models one name.
IDENTITY = (
    "model name",
    "vendor_id",
    "cpu family",
    "model",
    "stepping",
    "CPU implementer",
    "CPU part",
    "CPU variant",
    "CPU revision",
)
# Results of MKL's functions of these names, as in MKL_CBWR and MKL_VERBOSE. MKL documents neither
# function.
MKL_CBWR = {1: "off", 2: "auto", 3: "compatible", 10: "avx2", 12: "avx512", 14: "avx512_e1"}
OF_GPUS = ("cuda", "cudnn", "nccl", "driver", "nccl_settings")
# Of NCCL's variables those that choose the order of its sums, or what chooses it.
ORDERING = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_BUFFSIZE",
    "NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_TUNER_PLUGIN", "NCCL_TUNER_CONFIG_FILE",
)  # fmt: skip
DRIVER = Path("/sys/module/nvidia/version")
MKL_KERNELS = {0: "default", 5: "avx2", 7: "avx512"}


@cache
def processor() -> dict[str, str | None]:
    """CPU and instruction sets; None if unknown.

    Returns:
        cpu: the CPU type.
        onednn_isa: the highest that oneDNN uses, in its own words; ONEDNN_MAX_CPU_ISA limits it.
        mkl: MKL's mode of reproducibility (MKL_CBWR) and its kernels.
        aten: the instruction set of torch's own kernels.
    """
    return {name: attempt(read) for name, read in READERS.items()}


def gpu_software(device: torch.device) -> dict[str, str | None]:
    """What besides torch decides the last bits on a GPU: OF_GPUS; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    found = (
        torch.version.cuda,
        str(torch.backends.cudnn.version()),
        attempt(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
        attempt(lambda: DRIVER.read_text().strip()),
        " ".join(f"{name}={os.environ[name]}" for name in ORDERING if name in os.environ) or None,
    )
    return dict(zip(OF_GPUS, found, strict=True))


def attempt(read: Callable[[], str | None]) -> str | None:
    try:
        return read() or None
    except (OSError, AttributeError, RuntimeError, ValueError):
        return None


def cpu() -> str:
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    found = dict(re.findall(r"^(.*?)\s*:[ \t]*(.*)$", first, re.MULTILINE))
    return " ".join(found[key] for key in IDENTITY if found.get(key))


def onednn_isa() -> str | None:
    """From the line that oneDNN prints when it is first made verbose; torch has no function for
    it.
    """
    if (
        os.environ.get("ONEDNN_VERBOSE", os.environ.get("DNNL_VERBOSE", "0")) != "0"
        or not torch.backends.mkldnn.is_available()
    ):
        return None
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file, os.fdopen(os.dup(1), "wb") as stdout:
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(1):
                torch.ones(1, device="cpu").to_mkldnn()
        finally:
            os.dup2(stdout.fileno(), 1)
        file.seek(0)
        found = re.search(r"cpu,isa:(.*)", file.read().decode())
    return found[1].strip() if found else None


def mkl() -> str | None:
    if not torch.backends.mkl.is_available():
        return None
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    mode, kernels = library.mkl_serv_cbwr_get(-1) & 0xFFFF, library.mkl_serv_cpu_detect()
    return f"CBWR {MKL_CBWR.get(mode, mode)}, {MKL_KERNELS.get(kernels, kernels)} kernels"


READERS: dict[str, Callable[[], str | None]] = {
    "cpu": cpu,
    "onednn_isa": onednn_isa,
    "mkl": mkl,
    "aten": torch.backends.cpu.get_cpu_capability,
}
