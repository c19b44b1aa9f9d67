"""Run train.py with something added, for gpu_day.py: python benchmarks/in_training.py train.py …

The environment says what:
    SHARED_GPU  several ranks may share a GPU: NCCL takes them for ranks of several hosts
    FAULT       what rank 1 does in step 20: raise, kill, stop, loop; assert: its GPU fails
    PROFILE     file for the operations of epoch 3 as JSON: kernels, busy GPU, hidden waits
    TIMES       file for the seconds and the CPU seconds of each epoch as JSON
    SPINS       a rank that waits for its GPU does not sleep
"""

import json
import math
import os
import runpy
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))

from classifier.training.loop import Training
from classifier.training.steps import Stepper
from manynodes.ranks import preflight
from manynodes.ranks.preflight import RankReport

RANK = int(os.environ.get("RANK", 0))
FAULTY_STEP, PROFILED_EPOCH = 20, 3
# In torch's warning of `set_sync_debug_mode`.
SYNCHRONIZES = "synchronizing CUDA operation"


def share_the_gpu() -> None:
    os.environ["NCCL_HOSTID"] = f"rank {RANK}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

    def agreed(reports: Sequence[RankReport]) -> None:
        del reports

    preflight.judge = agreed


def fail(how: str) -> None:
    step, taken = Stepper.step, iter(range(1, 1_000_000))

    def failing(*args: Any, **options: Any) -> Any:
        if next(taken) == FAULTY_STEP and RANK == 1:
            if how == "raise":
                raise ValueError("a fault that was asked for")
            if how == "loop":
                while True:
                    time.sleep(0.01)
            if how == "assert":
                absent = torch.full((1,), 5, device=args[2].device)
                args[2].flatten()[:1].index_select(0, absent)
                return step(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return step(*args, **options)

    Stepper.step = failing  # type: ignore[method-assign]


def profile_an_epoch(path: str) -> None:
    train_epoch = Training.train_epoch
    on_gpu = torch.cuda.is_available()

    def profiled(self: Training, *args: Any) -> Any:
        if self.epoch + 1 != PROFILED_EPOCH:
            return train_epoch(self, *args)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with warnings.catch_warnings(record=True) as waits, profile(activities=activities) as done:
            warnings.simplefilter("always")
            if on_gpu:
                torch.cuda.set_sync_debug_mode("warn")
            begun = time.perf_counter()
            found = train_epoch(self, *args)
            seconds = time.perf_counter() - begun
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
        steps = len(self.sizes)
        # A range that torch or a program has named is an event of the GPU too.
        on_device = [
            event
            for event in done.events()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        operations = [event for event in done.events() if event.device_type == DeviceType.CPU]
        spans = sorted((e.time_range.start, e.time_range.end) for e in on_device)
        places = Counter(
            f"{each.filename}:{each.lineno}" for each in waits if SYNCHRONIZES in str(each.message)
        )
        about = {
            "steps": steps,
            "graphs_per_step": sum("cudaGraphLaunch" in e.name for e in operations) / steps,
            "kernels_per_step": len(on_device) / steps,
            "operations_per_step": len(operations) / steps,
            "seconds_per_step": seconds / steps,
            "gpu_busy": covered(spans) / 1e6 / seconds,
            "kernels": most(((e.name[:60], e.time_range.elapsed_us()) for e in on_device), steps),
            "operations": most(((e.name[:60], e.self_cpu_time_total) for e in operations), steps),
            "waits": places,
        }
        with Path(path).open("w") as file:
            json.dump(about, file)
        return found

    Training.train_epoch = profiled  # type: ignore[method-assign,assignment]


def time_epochs(path: str) -> None:
    train_epoch, found = Training.train_epoch, []

    def timed(self: Training, *args: Any) -> Any:
        begun, used = time.perf_counter(), time.process_time()
        reason = train_epoch(self, *args)
        found.append((time.perf_counter() - begun, time.process_time() - used))
        Path(path).write_text(json.dumps(found))
        return reason

    Training.train_epoch = timed  # type: ignore[method-assign,assignment]


def spin() -> None:
    event = torch.cuda.Event
    torch.cuda.Event = lambda **_options: event()  # type: ignore[misc,assignment]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of sorted spans together, what is in several of them once."""
    found, until = 0.0, -math.inf
    for begin, end in spans:
        found += max(0.0, end - max(begin, until))
        until = max(until, end)
    return found


def most(named: Iterable[tuple[str, float]], steps: int) -> list[list[Any]]:
    """The 40 names with most time: name, calls and milliseconds per step."""
    calls: Counter[str] = Counter()
    times: dict[str, float] = defaultdict(float)
    for name, microseconds in named:
        calls[name] += 1
        times[name] += microseconds
    longest = sorted(times, key=times.__getitem__, reverse=True)[:40]
    return [[name, calls[name] / steps, times[name] / 1e3 / steps] for name in longest]


if "SHARED_GPU" in os.environ:
    share_the_gpu()
if how := os.environ.get("FAULT"):
    fail(how)
if path := os.environ.get("PROFILE"):
    profile_an_epoch(path)
if path := os.environ.get("TIMES"):
    time_epochs(path)
if "SPINS" in os.environ:
    spin()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
