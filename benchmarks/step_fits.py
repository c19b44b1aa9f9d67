"""Fits of the network and of the computation to steps that were measured for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manynodes.reporting.step_model import nonnegative


@dataclass(frozen=True)
class Network:
    """The network between the processes.

    Attributes:
        hop: seconds per message to the next process of a ring.
        bandwidth: of each process, in bytes per second and direction.
    """

    hop: float
    bandwidth: float

    def latency_seconds(self, processes: int) -> float:
        """Latency of an all-reduce: around the ring and back."""
        return 2 * (processes - 1) * self.hop

    def bandwidth_seconds(self, processes: int, size: float) -> float:
        """Seconds that `size` bytes take; a ring sends 2 (P - 1) / P of them from each process."""
        return 2 * (processes - 1) / processes * size / self.bandwidth


@dataclass(frozen=True)
class Compute:
    """The computation of one process.

    Attributes:
        image: seconds per image.
        step: seconds per step, for any number of images.
    """

    image: float
    step: float = 0.0


@dataclass(frozen=True)
class TreeNetwork(Network):
    """A network that also sends along a tree, as NCCL does.

    Attributes:
        tree_hop: seconds per level of the tree.
    """

    tree_hop: float

    def latency_seconds(self, processes: int) -> float:
        """Around the ring and back, or up and down the tree, whichever is faster."""
        tree = 2 * math.log2(processes) * self.tree_hop
        return min(super().latency_seconds(processes), tree)


def all_reduce_seconds(network: Network, processes: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes."""
    return network.latency_seconds(processes) + network.bandwidth_seconds(processes, size)


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
    computation = compute.step + compute.image * batch / processes
    return sharing * computation + all_reduce_seconds(network, processes, size)


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
        max(seconds - all_reduce_seconds(network, processes, size), 1e-9)
        for processes, _, seconds in measured
    ]
    step, image = nonnegative(rows, left)
    return Compute(image, step)
