"""The exponential moving average of the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Share of the first step's weights in an average that is told.
MOST_OF_FIRST = 0.1


def warning(decay: float, steps: int) -> str:
    """A line if the average after all steps is mostly one of early weights; empty if it is not."""
    first = decay ** (steps - 1)
    if not decay or first < MOST_OF_FIRST:
        return ""
    return (
        f"warning: ema: after all {steps:,} steps, {first:.0%} of the average are the weights of "
        f"the first one; use a smaller decay, such as {max(0.0, 1 - 10 / steps):.3g}"
    )


class WeightAverage:
    """Average of the trained weights over the steps, which evaluation uses instead of them.

    It is equal on all ranks without communication, because the weights are. Buffers, such as
    BatchNorm's running statistics, are not averaged.

    Source: torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn, the same bits.

    Attributes:
        weights: of the network by name; none without a decay.
        averages: of these; none before the first step.
    """

    def __init__(self, decay: float, classifier: nn.Module) -> None:
        self.decay = decay
        self.weights = {
            name: parameter
            for name, parameter in classifier.named_parameters()
            if decay and parameter.requires_grad
        }
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        if self.averages:
            torch._foreach_lerp_(
                list(self.averages.values()), list(self.weights.values()), 1 - self.decay
            )
        else:
            self.averages = {name: each.detach().clone() for name, each in self.weights.items()}

    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Continue from the averages of a state.

        Raises:
            KeyError: it lacks one.
        """
        self.averages = {
            name: torch.empty_like(each).copy_(averages[name])
            for name, each in self.weights.items()
        }

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within this context, the network's weights are the averages."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        for name, average in self.averages.items():
            parameter = self.weights[name]
            self.averages[name], parameter.data = parameter.data, average
