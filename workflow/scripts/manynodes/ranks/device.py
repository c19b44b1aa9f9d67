"""The device of a rank, and where a rank waits for it.

A rank that waits for its GPU waits for the others, whose sums are in its queue. Such places of ours
are in this file and in process_group.py, so that `whereabouts` can tell them from the place of a
rank that hangs; torch's own are in its list.
"""

import importlib
import math
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from manynodes.base.errors import Refusal, one_line

CPUINFO = Path("/proc/cpuinfo")
SYSTEM = Path("/sys")
# What torch has asked for, and the size of the GPU.
FULL = re.compile(r"Tried to allocate ([\d.]+ \w+)\..*total capacity of ([\d.]+ \w+)", re.DOTALL)


def numbers(tensor: Tensor) -> Any:
    """The numbers of a tensor, when its device has computed them."""
    return tensor.tolist()


def on_cpu(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, when its device has computed it."""
    return tensor.cpu()


def compute_exactly() -> None:
    """The same numbers every time, and those of fp32; before the first computation."""
    # On the CPU all operations that we use are deterministic; on a GPU a few of torchvision's are
    # not, and torch warns.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("warn")
    # A debugging aid that fills new memory; it took 3 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # By default a GPU rounds the inputs of convolutions to TF32, with 10 bits of mantissa, and
    # NVIDIA's containers have it round those of linear layers too.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def settle(device: torch.device) -> None:
    """Return when a device has computed all before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_cpu_at_once(tree: Any) -> Any:
    """The same nested dicts and lists with the tensors on the CPU, with one wait for all of them.

    Tensors that are there already are not copied.
    """
    on_gpu: list[Tensor] = []

    def copied(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: copied(value) for key, value in node.items()}
        if isinstance(node, list):
            return [copied(value) for value in node]
        if not (isinstance(node, Tensor) and node.is_cuda):
            return node
        on_gpu.append(node)
        room = torch.empty_like(node, device="cpu", pin_memory=True)
        return room.copy_(node, non_blocking=True)

    found = copied(tree)
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return found


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """The names of the tensors of one device with a number that is not finite, with one wait for
    all of them.
    """
    if not tensors:
        return []
    finite = numbers(torch.stack([tensor.isfinite().all() for tensor in tensors.values()]))
    return [name for name, fine in zip(tensors, finite, strict=True) if not fine]


def named(properties: Any) -> str:
    """A GPU as its administrator knows it: its UUID and its place on the PCI bus.

    Args:
        properties: of `torch.cuda.get_device_properties`.
    """
    return f"GPU-{properties.uuid}, PCI {on_the_bus(properties)}"


def on_the_bus(properties: Any) -> str:
    """The place of a GPU on the PCI bus, as the folders of `DEVICES` are named."""
    where = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return "{:04x}:{:02x}:{:02x}.0".format(*where)


def near_cpus(properties: Any, usable: Set[int], system: Path = SYSTEM) -> set[int]:
    """Of the usable CPUs those on the socket of a GPU; none if the system does not know.

    Copies to the GPU and the start of its operations cross sockets otherwise.

    Args:
        properties: of `torch.cuda.get_device_properties`.
        system: where Linux shows its devices, see sysfs(5).
    """
    try:
        device = system / "bus/pci/devices" / on_the_bus(properties)
        node = int((device / "numa_node").read_text())
        text = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
        parts = [list(map(int, part.split("-"))) for part in filter(None, text.split(","))]
    except (OSError, ValueError):
        return set()  # -1 for none, and no such folder
    return {cpu for part in parts for cpu in range(part[0], part[-1] + 1)} & usable


def stay_near(device: torch.device, system: Path = SYSTEM) -> None:
    """Keep this process on the CPUs near its GPU, if they are enough for the threads of all ranks
    that may do the same.

    Threads that exist already are not moved, so this comes before the first computation.
    """
    usable, ranks = os.sched_getaffinity(0), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    near = near_cpus(torch.cuda.get_device_properties(device), usable, system)
    sharing = min(ranks, sum(near_cpus(gpu, usable, system) == near for gpu in gpus))
    if near and len(near) >= sharing * int(os.environ.get("OMP_NUM_THREADS", 1)):
        os.sched_setaffinity(0, near)


def most_memory(device: torch.device) -> int:
    """The most bytes of tensors that this process had on its GPU so far; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


class Meter:
    """What a GPU's own counters say of it since this was made, through NVML.

    Of the whole card, also if it is shared. Nobody knows it without NVML's Python module,
    nvidia-ml-py, on other devices, and where a card or a driver lacks a counter.
    """

    # Seconds between two looks at the samples of its use. An H200 keeps those of 14 s.
    BETWEEN = 5.0

    def __init__(self, device: torch.device) -> None:
        self.nvml, self.card = with_nvml(device)
        self.begun = self.counters()
        self.samples: list[int] = []
        self.seen, self.looked = 0, -math.inf
        self.look()
        self.samples.clear()

    def counters(self) -> tuple[float, ...]:
        """Joules, seconds in which the power limit held its clock down, and seconds in which the
        temperature did.
        """

        def held(policy: str) -> float:
            status = self.nvml.nvmlDeviceGetViolationStatus(self.card, getattr(self.nvml, policy))
            return status.violationTime / 1e9

        return (
            or_nan(lambda: self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.card) / 1e3),
            or_nan(lambda: held("NVML_PERF_POLICY_POWER")),
            or_nan(lambda: held("NVML_PERF_POLICY_THERMAL")),
        )

    def look(self) -> None:
        """Take in the card's own samples of whether it computed, in percent, unless it was done a
        moment ago.
        """
        if time.monotonic() - self.looked < self.BETWEEN:
            return
        self.looked = time.monotonic()
        with suppress(Exception):  # there are none since
            kind = self.nvml.NVML_GPU_UTILIZATION_SAMPLES
            _, found = self.nvml.nvmlDeviceGetSamples(self.card, kind, self.seen)
            self.samples += [sample.sampleValue.uiVal for sample in found]
            self.seen = max(sample.timeStamp for sample in found)

    def read(self) -> tuple[float, ...]:
        """The differences of `counters`, and the share of samples in which the GPU computed; -1
        for what is not known.
        """
        self.looked = -math.inf
        self.look()
        passed = (now - then for now, then in zip(self.counters(), self.begun, strict=True))
        found = (*passed, or_nan(lambda: mean(self.samples) / 100))
        return tuple(-1.0 if math.isnan(number) else number for number in found)


def with_nvml(device: torch.device) -> tuple[Any, Any]:
    """NVML's Python module and its handle of a GPU; None, None without them."""
    if device.type == "cuda":
        with suppress(Exception):  # whatever a driver raises: no training fails of this
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
    return None, None


def limits(device: torch.device) -> dict[str, float | None]:
    """The memory of a GPU in bytes and its power limit in watts, None if that is not known; nothing
    of a CPU.
    """
    if device.type != "cuda":
        return {}
    nvml, card = with_nvml(device)
    watts = or_nan(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1e3)
    return {
        "gpu_total_bytes": torch.cuda.get_device_properties(device).total_memory,
        "gpu_power_limit_watts": None if math.isnan(watts) else watts,
    }


def or_nan(function: Callable[[], float]) -> float:
    try:
        return function()
    except Exception:
        return math.nan


def computes_in_bf16(device: torch.device) -> bool:
    """Whether a CPU or a GPU multiplies matrices of bf16 faster than of fp32, from what it says of
    itself: a measurement would not come to the same every time.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    return bool(flags and {"avx512_bf16", "amx_bf16"} & set(flags[1].split()))


@contextmanager
def told_when_full(remedy: str) -> Iterator[None]:
    """Say in one line that a GPU's memory is full. Not as what would come again: it may be another
    program's.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        found = FULL.search(str(error))
        what = f"{found[2]}, {found[1]} more" if found else one_line(str(error), 70)
        where = socket.gethostname()
        raise Refusal(f"the memory of a GPU on {where} is full ({what}); {remedy}") from None


def choose_device(device: str, local_rank: int) -> torch.device:
    """The device of a rank.

    Args:
        device: `cpu`, `cuda`, or `auto`: a GPU if this node has one that can be used for each of
            its processes.

    Raises:
        Refusal: `cuda`, and there are too few GPUs, or torch cannot compute on them.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    slices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    sliced = slices[0].startswith("MIG-") and len(slices) >= here
    if sliced:
        # Of several slices of a GPU, CUDA shows the first.
        os.environ["CUDA_VISIBLE_DEVICES"] = slices[local_rank]
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if not gpus and device != "cuda":
        return torch.device("cpu")
    trouble = trouble_with_gpus() if gpus else None
    if gpus >= here and not trouble:
        return torch.device("cuda", local_rank)
    # A site may show each process its own GPU alone; the preflight finds one that is shared.
    if gpus == 1 and (device == "cuda" or sliced) and not trouble:
        return torch.device("cuda", 0)
    problem = trouble or f"torch sees {gpus}"
    if device == "cuda":
        raise Refusal(
            f"device: cuda needs a GPU for each of the {here} processes on {socket.gethostname()}; "
            f"{problem}"
        )
    if local_rank == 0:
        print(
            f"preflight: warning: the CPUs of {socket.gethostname()} are used, {here} processes "
            f"have no GPU each: {problem}",
            flush=True,
        )
    return torch.device("cpu")


def trouble_with_gpus() -> str | None:
    """Why torch cannot compute on the GPUs that the system has; None if it can.

    `torch.cuda.device_count` counts them although the driver is too old for this torch.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not torch.cuda.is_available():
            try:
                torch.cuda.init()
            except (RuntimeError, AssertionError) as error:
                return one_line(str(error).splitlines()[0], 100)
            return "torch cannot use them"
    built_for = torch.cuda.get_arch_list()
    for number in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(number)
        if not is_built_for(built_for, *capability):
            name = torch.cuda.get_device_name(number)
            return (
                f"{name} has compute capability {capability[0]}.{capability[1]}, torch "
                f"{torch.__version__} was built for {' '.join(built_for)}"
            )
    return None


def gpus_to_compute_on() -> list[str]:
    """The UUIDs of the GPUs on which torch can compute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not torch.cuda.is_available():
            return []
        count = torch.cuda.device_count()
    known = [
        number
        for number in range(count)
        if is_built_for(torch.cuda.get_arch_list(), *torch.cuda.get_device_capability(number))
    ]
    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in known]


def is_built_for(architectures: Sequence[str], major: int, minor: int) -> bool:
    """Whether code for these architectures runs on a GPU of this compute capability.

    Machine code (`sm_80`) runs on the same major version from its minor one on; intermediate code
    (`compute_80`) on all later ones. Source: CUDA C++ Programming Guide, Compute Capability.
    """
    for each in architectures:
        known = re.fullmatch(r"(sm|compute)_(\d+)(\d)", each)
        if known:
            its = (int(known[2]), int(known[3]))
            if its <= (major, minor) and (known[1] == "compute" or its[0] == major):
                return True
    # Architectures of AMD's GPUs have other names; torch itself says if it lacks one.
    return not any(each.startswith("sm_") for each in architectures)
