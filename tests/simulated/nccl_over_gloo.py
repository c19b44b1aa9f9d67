"""A process group over gloo that behaves as NCCL does on GPUs, for tests of faults without any GPU.

What it does was seen of two ranks with NCCL on one H200 (torch 2.11), or stands in the source of
torch's ProcessGroupNCCL. The sums are gloo's; what differs is when they end, and what is told of a
fault:

- A collective returns at once. What computes with its result waits, in C, where Python does not
  hear of signals.
- Nobody is told of a peer that is gone: the operations with it do not end.
- A thread ends the process when an operation has taken longer than the time-out of the group.
- To join and to leave have no time-out, nor has the end of Python.
"""

import atexit
import functools
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.overrides import TorchFunctionMode

from nccl_texts import DUMP, WATCHDOG

NAME = "nccl_over_gloo"
# Longer than any test.
FOREVER = timedelta(days=1)
# What torch takes for these if they are not set.
DUMPS, SLEEPS = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
DEFAULTS = {DUMPS: "1", SLEEPS: "15000"}
# Results that what computes next waits for.
QUEUED: deque[Future] = deque()
# What asks for a number on the device, and waits for all before.
ASKING = {
    "tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__",
}  # fmt: skip


def synchronize(result: Future) -> None:
    """Wait as for a GPU."""
    torch._C.Future.wait(result)


def asked(result: Future) -> None:
    """The same for a number."""
    torch._C.Future.wait(result)


def late() -> bool:
    """Whether the others do not come: then what only computes goes on, as it would on a GPU."""
    return False


class Queue(TorchFunctionMode):
    """Everything that computes waits for the collectives before it."""

    def __torch_function__(
        self, function: Callable, _types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        asks = function.__name__ in ASKING or chooses(function, arguments)
        while QUEUED and (asks or not late()):
            (asked if asks else synchronize)(QUEUED.popleft())
        return function(*arguments, **(options or {}))


def chooses(function: Callable, arguments: Any) -> bool:
    """Whether the number of results depends on the numbers in an index."""
    if function.__name__ != "__getitem__":
        return False
    index = arguments[1] if isinstance(arguments[1], tuple) else (arguments[1],)
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in index)


def seen_in(function: Any, file: str) -> None:
    function.__code__ = function.__code__.replace(co_filename=file)


# In the file where a rank on a GPU is seen to wait; for a number it waits without a frame of
# Python's, so these are as if they were not there.
seen_in(synchronize, torch.cuda.streams.__file__)
seen_in(asked, "<CUDA>")
seen_in(Queue.__torch_function__, "<CUDA>")


def queued(collective: Callable) -> Callable:
    """The same function of torch, which returns before its result is there."""

    @functools.wraps(collective)
    def call(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        work = collective(*arguments, async_op=True, **options)
        if async_op:
            return work
        QUEUED.append(work.get_future())
        return None

    return call


class NcclOverGloo(dist.ProcessGroup):
    """The group of all ranks.

    Attributes:
        begun: when the operations were begun that have not ended, the oldest first.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.timeout = store, timeout.total_seconds()
        self.orders: queue.SimpleQueue[tuple[str, tuple, dict, Future]] = queue.SimpleQueue()
        self.begun: deque[float] = deque()
        # It waits here for those that have not come.
        self.gloo = dist.ProcessGroupGloo(store, rank, size, FOREVER)
        self.left = False
        # Without a frame of Python's, as in the destructor of NCCL's group; the last one is the
        # first to be called.
        gone = [f"{other} has gone" for other in range(size)]
        self.leave = [
            partial(store.wait, gone, FOREVER),
            partial(store.set, gone[rank], ""),
        ]
        for step in self.leave:
            atexit.register(step)
        for body in (self.work, self.watch):
            threading.Thread(target=body, daemon=True).start()

    def begin(self, name: str, *arguments: Any, **options: Any) -> dist.Work:
        result: Future = Future()
        self.begun.append(time.monotonic())
        self.orders.put((name, arguments, options, result))
        return _create_work_from_future(result)

    def work(self) -> None:
        """One operation after the other, as on a stream of a GPU. After an error, none ends."""
        while True:
            name, arguments, options, result = self.orders.get()
            try:
                getattr(self.gloo, name)(*arguments, **options).wait()
            except RuntimeError:
                return
            self.begun.popleft()
            result.set_result(arguments[0] if arguments else None)

    def watch(self) -> None:
        """The watchdog. Who has waited too long tells the others, unless that is turned off."""
        tells = setting(DUMPS) != "0"
        while not self.left:
            time.sleep(0.1)
            for since in list(self.begun)[:1]:
                if time.monotonic() - since > self.timeout:
                    if tells:
                        self.store.set("dump", "")
                    say(WATCHDOG[:2])
                    time.sleep(4 * int(setting(SLEEPS)) / 1000)
                    say(WATCHDOG[2:])
                    os.abort()
            if tells and self.store.check(["dump"]):
                say(DUMP)
                os.abort()

    def shutdown(self) -> None:
        """Wait until all others have come here too."""
        for step in reversed(self.leave):
            atexit.unregister(step)
            step()
        self.left = True


for each in ("allgather", "allreduce", "barrier", "broadcast", "gather"):
    setattr(NcclOverGloo, each, partialmethod(NcclOverGloo.begin, each))
NcclOverGloo.getBackendName = lambda _group: NAME


def setting(name: str) -> str:
    return os.environ.get(name, DEFAULTS[name])


def say(lines: Sequence[str]) -> None:
    """As they were recorded, of any rank."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def install() -> None:
    """From now on, every group is like this, and the main thread queues what it computes."""
    dist.Backend.register_backend(NAME, NcclOverGloo, devices=["cpu"])
    join = dist.init_process_group
    dist.init_process_group = lambda _backend, **options: join(NAME, **options)
    # Not `barrier`, which NCCL's waits for too.
    for name in ("all_gather", "all_reduce", "broadcast", "gather"):
        setattr(dist, name, queued(getattr(dist, name)))
    Queue().__enter__()
