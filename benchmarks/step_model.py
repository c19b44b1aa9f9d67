"""A model of a data-parallel step: compute / P + latency + bytes / bandwidth."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

MOST = 2**14  # processes that `last_that_pays` looks at


@dataclass(frozen=True)
class Network:
    """The network between the processes.

    Attributes:
        hop: seconds per message to the next process of a ring.
        bandwidth: of each process, in bytes per second and direction.
        tree_hop: seconds per level of a tree; None if there is no tree.
    """

    hop: float
    bandwidth: float
    tree_hop: float | None = None

    def latency_seconds(self, processes: int) -> float:
        """Latency of an all-reduce: around the ring and back, or up and down the tree,
        whichever is faster.
        """
        ring = 2 * (processes - 1) * self.hop
        return (
            ring if self.tree_hop is None else min(ring, 2 * math.log2(processes) * self.tree_hop)
        )

    def all_reduce_seconds(self, processes: int, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes; a ring sends 2 (P - 1) / P of them from
        each process.
        """
        return (
            self.latency_seconds(processes)
            + 2 * (processes - 1) / processes * size / self.bandwidth
        )


@dataclass(frozen=True)
class Compute:
    """The computation of one process.

    Attributes:
        image: seconds per image.
        step: seconds per step, for any number of images.
    """

    image: float
    step: float = 0.0


def step_seconds(
    processes: int,
    batch: float,
    compute: Compute,
    network: Network,
    size: float,
    at_once: int | None = None,
) -> float:
    """Seconds of a step on a global batch, without overlap of the all-reduce and the backward
    pass.

    Args:
        size: of all gradients, in bytes as sent.
        at_once: the most processes that can compute at the same time, if they share CPUs.
    """
    sharing = processes / min(processes, at_once or processes)
    return sharing * (
        compute.step + compute.image * batch / processes
    ) + network.all_reduce_seconds(processes, size)


def last_that_pays(seconds: Callable[[int], float], least: float = 0.1) -> int:
    """The first power of 2 of processes at which doubling gains less than the share `least`."""
    processes = 1
    while processes < MOST and seconds(processes) >= (1 + least) * seconds(2 * processes):
        processes *= 2
    return processes


def fit_network(measured: Sequence[tuple[int, float, float]]) -> Network:
    """Fit to all-reduces as (processes, bytes, seconds): least squares of relative errors."""
    rows = np.array(
        [
            (2 * (processes - 1), 2 * (processes - 1) / processes * size)
            for processes, size, _ in measured
        ]
    )
    hop, byte = nonnegative(rows, [seconds for _, _, seconds in measured])
    return Network(hop, 1 / byte)


def fit_compute(
    measured: Sequence[tuple[int, int, float]], network: Network, size: float, at_once: int
) -> Compute:
    """Fit to steps as (processes, global batch, seconds), minus their time on the network."""
    sharing = [processes / min(processes, at_once) for processes, _, _ in measured]
    rows = np.array(
        [
            (share, share * batch / processes)
            for share, (processes, batch, _) in zip(sharing, measured, strict=True)
        ]
    )
    left = [
        max(seconds - network.all_reduce_seconds(processes, size), 1e-9)
        for processes, _, seconds in measured
    ]
    step, image = nonnegative(rows, left)
    return Compute(image, step)


def nonnegative(rows: np.ndarray, seconds: Sequence[float]) -> tuple[float, float]:
    """The two coefficients, at least tiny, of `rows` (n, 2) that come nearest to `seconds` (n,) in
    relative error.
    """
    relative = rows / np.array(seconds)[:, None]
    both, *_ = np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)
    if (both <= 0).any():
        # One of the two is not to be seen in the noise: then the other alone, if it is the better
        # of the two.
        single = [float(column.sum() / (column @ column)) for column in relative.T]
        errors = [
            float(((column * value - 1) ** 2).sum())
            for column, value in zip(relative.T, single, strict=True)
        ]
        keep = int(np.argmin(errors))
        both = np.array([single[i] if i == keep else 1e-15 for i in range(2)])
    return float(both[0]), float(both[1])
