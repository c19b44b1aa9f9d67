"""A model of a data-parallel step: compute / P + latency + bytes / bandwidth."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

LEAST_HELD_OUT = 3  # sizes that a fit must predict before it is believed


@dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
        threads: of each process.
        batch: global, in images.
        sharing: threads per CPU, at least 1.
        size: of all gradients, in bytes as sent.
        seconds: of the step.
    """

    processes: int
    threads: int
    batch: int
    sharing: float
    size: float
    seconds: float


@dataclass(frozen=True)
class Model:
    """Steps as fitted.

    Attributes:
        image: seconds per image of one process, by its threads.
        step: seconds per step of one process, for any number of images.
        hop: seconds per message to the next process of a ring.
        bandwidth: of each process, in bytes per second and direction.
        error: median relative error on sizes that were held out of the fit.
    """

    image: dict[int, float]
    step: float
    hop: float
    bandwidth: float
    error: float

    def parts(self, step: Step) -> dict[str, float]:
        """The seconds of a step by what takes them."""
        own = self.image[step.threads] * step.batch / step.processes
        # Messages of each process in an all-reduce, around the ring and back: each has the P-th
        # part of the bytes.
        ring = 2 * (step.processes - 1)
        return {
            "computation": own,
            "shared CPUs": (step.sharing - 1) * (own + self.step),
            "each step's fixed cost": self.step,
            "latency of the all-reduce": ring * self.hop,
            "bandwidth of the all-reduce": ring / step.processes * step.size / self.bandwidth,
        }

    def seconds(self, step: Step) -> float:
        return sum(self.parts(step).values())


def last_that_pays(seconds: Callable[[int], float], most: int) -> int:
    """The first power of 2 of processes at which doubling gains less than a tenth, or the first of
    at least `most`.
    """
    processes = 1
    while processes < most and seconds(processes) >= 1.1 * seconds(2 * processes):
        processes *= 2
    return processes


def fit(measured: Sequence[Step]) -> Model | None:
    """The model with the fewest terms among those that predict held-out sizes best.

    Each measured step in turn is held out of the fit and predicted. Terms: the computation, then
    bandwidth, fixed cost and latency.

    Returns:
        None if there are too few different steps to hold one out.
    """
    found = None
    for terms in range(4):
        error = held_out_error(measured, terms)
        if error is not None and (found is None or error < found.error):
            found = fitted(measured, terms, error)
    return found


def held_out_error(measured: Sequence[Step], terms: int) -> float | None:
    """Median relative error on the steps that the others allow to predict; None if they are few."""
    errors = []
    for number, step in enumerate(measured):
        rest = [*measured[:number], *measured[number + 1 :]]
        columns = {other.threads for other in rest}
        if step.threads in columns and len(rest) >= len(columns) + terms:
            predicted = fitted(rest, terms, math.nan).seconds(step)
            errors.append(abs(predicted / step.seconds - 1))
    return float(np.median(errors)) if len(errors) >= LEAST_HELD_OUT else None


def fitted(measured: Sequence[Step], terms: int, error: float) -> Model:
    """A fit of the computation and the first so many of its other terms."""
    threads = sorted({step.threads for step in measured})
    rows = np.array([list(row(step, threads))[: len(threads) + terms] for step in measured])
    found = [*nonnegative(rows, [step.seconds for step in measured]), *[0.0] * (3 - terms)]
    byte, fixed, hop = found[len(threads) :]
    image = dict(zip(threads, found, strict=False))
    return Model(image, fixed, hop, 1 / byte if byte else math.inf, error)


def row(step: Step, threads: Sequence[int]) -> Iterator[float]:
    """What each term of the model is multiplied by in a step."""
    for number in threads:
        yield step.sharing * step.batch / step.processes if number == step.threads else 0.0
    yield 2 * (step.processes - 1) / step.processes * step.size
    yield step.sharing
    yield 2 * (step.processes - 1)


def nonnegative(rows: np.ndarray, seconds: Sequence[float]) -> list[float]:
    """The coefficients, at least tiny, of `rows` (n, k) that come nearest to `seconds` (n,) in
    relative error.
    """
    # Most experiments have too few sizes for a fit, and importing it takes half a second.
    from scipy.optimize import nnls

    relative = rows / np.array(seconds)[:, None]
    # Of columns of one size: seconds per image and per byte differ by orders of magnitude.
    largest = np.abs(relative).max(axis=0)
    largest[largest == 0] = 1.0
    found, _ = nnls(relative / largest, np.ones(len(relative)))
    return [float(value) for value in np.maximum(found / largest, 1e-15)]
