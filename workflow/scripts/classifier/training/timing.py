"""Where a rank's time goes, and which host is slower than the others.

All ranks take the same time for a step, because they wait for each other in it. What a rank
computes alone before it sends anything, the forward pass, tells them apart. Four looks at the clock
a step, and one exchange of two numbers an epoch.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, median_low
from typing import TypeVar

import torch

# How much slower a host's forward pass is from which on it is named, if it is so in so many looks
# in a row, each at the epochs of so many seconds at least.
SLOW = 1.3
LOOKS = 3
SECONDS = 10
T = TypeVar("T")


class Clock:
    """A rank's seconds in the present epoch.

    Attributes:
        forward: in the forward pass; on a GPU as the GPU measures it.
        waiting: for the pixels of a batch.
        steps, batches: how many they are of.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.reset()

    def reset(self) -> None:
        self.forward, self.waiting, self.steps, self.batches = 0.0, 0.0, 0, 0
        self.running.clear()

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around a forward pass; never waits for a GPU."""
        if not self.on_gpu:
            start = time.perf_counter()
            yield
            self.forward += time.perf_counter() - start
            self.steps += 1
            return
        self.take_finished()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.running.append((begin, end))

    def take_finished(self) -> None:
        """Count the forward passes that a GPU has finished."""
        while self.running and self.running[0][1].query():
            begin, end = self.running.popleft()
            self.forward += begin.elapsed_time(end) / 1000
            self.steps += 1

    def inputs(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time until each of them comes is counted."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.waiting += time.perf_counter() - start
            self.batches += 1
            yield batch

    def per_step(self) -> tuple[float, float]:
        """Mean seconds of the forward pass, and of waiting for pixels; zero before the first."""
        self.take_finished()
        return self.forward / max(1, self.steps), self.waiting / max(1, self.batches)


class SlowHosts:
    """Watches the hosts of a training, epoch by epoch. On rank 0.

    Args:
        hosts: of the ranks, in their order.
        before: what is known of slow nodes from before the training, a line each.
    """

    def __init__(self, hosts: Sequence[str], before: Sequence[str] = ()) -> None:
        self.hosts = hosts
        self.before = before
        self.looks: deque[dict[str, float]] = deque(maxlen=LOOKS)
        self.named: set[str] = set()
        self.slow: dict[str, float] = {}
        self.epochs: list[Sequence[float]] = []
        self.lasted = 0.0

    def add(self, forward: Sequence[float], lasted: float) -> list[str]:
        """Take an epoch's seconds per forward pass of each rank, and its duration; returns a line
        per host that is found to be slow for the first time.
        """
        self.epochs.append(forward)
        self.lasted += lasted
        if self.lasted < SECONDS:
            return []
        seconds = [mean(of_rank) for of_rank in zip(*self.epochs, strict=True)]
        self.epochs, self.lasted = [], 0.0
        self.looks.append(slowness(self.hosts, seconds))
        self.slow = {
            host: self.looks[-1][host]
            for host in self.looks[-1]
            if len(self.looks) == LOOKS and all(each.get(host, 0.0) >= SLOW for each in self.looks)
        }
        new = sorted(self.slow.keys() - self.named)
        self.named |= self.slow.keys()
        return [
            f"{host} computes {self.slow[host]:.1f} times slower than the median of the hosts "
            f"({mean(of_host(self.hosts, seconds, host)) * 1000:.1f} ms a forward pass), and all "
            "others wait for it in every step"
            for host in new
        ]

    def live(self) -> dict[str, str]:
        """The hosts that are slow now, see workflow/schemas/live.schema.yaml."""
        slow = [f"{host} is {ratio:.1f} times slower" for host, ratio in self.slow.items()]
        words = [*self.before, *slow]
        return {"slow": ", ".join(words)[:300]} if words else {}


def slowness(hosts: Sequence[str], seconds: Sequence[float]) -> dict[str, float]:
    """How much slower each host is than the median of the hosts; empty for a single one.

    Of two hosts the median is the faster one.
    """
    means = {host: mean(of_host(hosts, seconds, host)) for host in dict.fromkeys(hosts)}
    usual = median_low(means.values())
    if len(means) < 2 or usual <= 0:
        return {}
    return {host: value / usual for host, value in means.items()}


def of_host(hosts: Sequence[str], seconds: Sequence[float], host: str) -> list[float]:
    return [each for name, each in zip(hosts, seconds, strict=True) if name == host]
