"""The optimizers by name, and the learning rate of each step."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from classifier.models.classifier import Classifier
from classifier.training.choosing import rates
from manynodes.experiment.config import Run


class Muon(torch.optim.SGD):
    """SGD in which the steps of filters are orthogonalised.

    The filters, in groups with `filters`, take steps of equal size in all directions. Each filter
    bank is also kept at a norm of the square root of its number of filters, so weight decay would
    have no effect. The other groups use plain SGD.

    Source: K. Jordan, airbench94_muon.py in cifar10-airbench, 2024, with its momentum, iterations
        and coefficients.

    Args:
        at_once: orthogonalise many filter banks together, with other roundings. A GPU would wait
            for the start of each operation on a single bank.
    """

    MOMENTUM = 0.6

    def __init__(self, groups: Iterable[dict[str, Any]], at_once: bool, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.at_once = at_once

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["filters"]:
                self.orthogonalise([each for each in group["params"] if each.grad is not None])
        super().step(closure)

    def orthogonalise(self, banks: list[Tensor]) -> None:
        """Replace the gradients of filter banks by their steps, and normalise the filters."""
        if not banks:
            return
        gradients = [cast(Tensor, filters.grad) for filters in banks]
        momenta = []
        for filters in banks:
            state = self.state[filters]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(filters)
            momenta.append(state["momentum"])
        torch._foreach_mul_(momenta, self.MOMENTUM)
        torch._foreach_add_(momenta, gradients)
        ahead = torch._foreach_add(gradients, momenta, alpha=self.MOMENTUM)
        scales = torch._foreach_reciprocal(torch._foreach_norm(banks))
        torch._foreach_mul_(scales, [len(filters) ** 0.5 for filters in banks])
        torch._foreach_mul_(banks, scales)
        matrices = [each.flatten(1) for each in ahead]
        steps = all_orthogonalised(matrices) if self.at_once else map(orthogonalised, matrices)
        # SGD without momentum then adds them to the filters.
        torch._foreach_copy_(
            gradients, [step.view_as(each) for step, each in zip(steps, gradients, strict=True)]
        )


def orthogonalised(matrix: Tensor, iterations: int = 3) -> Tensor:
    """The matrix, (rows, columns), with its singular values moved towards 1 by Newton-Schulz
    iterations.

    Three iterations bring values above a tenth of the largest to 0.68 to 1.2, and multiply small
    ones by at most 41 (measured): of values that span three orders of magnitude, some stay at 0.02.
    """
    # A GPU multiplies bfloat16 fastest; the CPUs measured were slower with it.
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    wide = x.size(0) <= x.size(1)
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x if wide else x.T).to(matrix.dtype)


def all_orthogonalised(matrices: Sequence[Tensor], iterations: int = 3) -> list[Tensor]:
    """Each of the matrices as by `orthogonalised`, in a few operations for many of them.

    Smaller ones are filled up with zeros, which stay zeros: on a GPU, the start of an operation
    costs more than what it computes.
    """
    found: dict[int, Tensor] = {}
    wide = [each if each.size(0) <= each.size(1) else each.mT for each in matrices]
    for numbers in together([(each.size(0), each.size(1)) for each in wide]):
        own = [wide[number] for number in numbers]
        kind = torch.bfloat16 if own[0].is_cuda else torch.float32
        room = [max(each.size(side) for each in own) for side in (0, 1)]
        x = torch.zeros((len(own), *room), dtype=kind, device=own[0].device)
        torch._foreach_copy_(
            [x[k, : each.size(0), : each.size(1)] for k, each in enumerate(own)], own
        )
        x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(iterations):
            a = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        x = x.to(own[0].dtype)
        for k, number in enumerate(numbers):
            step = x[k, : wide[number].size(0), : wide[number].size(1)]
            found[number] = step if wide[number] is matrices[number] else step.mT
    return [found[number] for number in range(len(matrices))]


def together(shapes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The numbers of shapes in groups, so that all of a group have room in its largest rows and
    columns, and at most half of that is filled up.
    """
    groups: list[list[int]] = []
    rows = columns = held = 0
    for number in sorted(range(len(shapes)), key=lambda n: (math.prod(shapes[n]), n), reverse=True):
        own = shapes[number]
        rows, columns, held = max(rows, own[0]), max(columns, own[1]), held + math.prod(own)
        if not groups or (len(groups[-1]) + 1) * rows * columns > 2 * held:
            groups.append([])
            rows, columns, held = *own, math.prod(own)
        groups[-1].append(number)
    return groups


def make_optimizer(run: Run, classifier: Classifier) -> torch.optim.Optimizer:
    """The run's optimizer, with one kernel for all weights instead of several per weight."""
    groups = divided(run, classifier)
    if run.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=run.learning_rate, fused=True)
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    if run.optimizer == "muon":
        kind = partial(Muon, at_once=next(classifier.parameters()).is_cuda)
    optimizer = kind(
        groups, lr=run.learning_rate, momentum=run.momentum, nesterov=run.momentum > 0, fused=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            # If fp16's scaler skips the first step, torch uses uninitialised memory as the momentum
            # (seen in 2.14.1).
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def divided(run: Run, classifier: Classifier) -> list[dict[str, Any]]:
    """The network's groups, divided further where `rates` and `weight_decay_on` differ in them."""
    factors = rates(run, classifier.network)
    found: dict[tuple[int, float, float], dict[str, Any]] = {}
    for number, group in enumerate(
        classifier.parameter_groups(run.weight_decay, run.optimizer == "muon")
    ):
        for parameter in group["params"]:
            decays = run.weight_decay_on == "all" or parameter.dim() > 1
            rate = group["rate"] * factors.get(parameter, 1.0)
            decay = group["weight_decay"] if decays else 0.0
            own = {"params": [], "rate": rate, "weight_decay": decay}
            found.setdefault((number, rate, decay), group | own)["params"].append(parameter)
    return list(found.values())


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the result of `optimizer.state_dict`, perhaps from another kind of device.

    Fused kernels need its tensors in the memory format of the weights.

    Raises:
        ValueError: it belongs to another optimizer.
    """
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for key, value in own.items():
            # A state has lists instead of tuples, and another version of torch may have other
            # settings.
            kept = saved.get(key, None if key in ("rate", "filters") else value)
            if (
                key not in ("params", "lr")
                and kept != (list(value) if isinstance(value, tuple) else value)
                and kept != value
            ):
                raise ValueError(f"its optimizer has another {key}")
    optimizer.load_state_dict(state)
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if value.shape == parameter.shape:
                kept[name] = torch.empty_like(parameter).copy_(value)


def learning_rate(run: Run, steps_per_epoch: int, done: int) -> float:
    """The learning rate of the step after `done` steps: linear warm-up to the peak, then the run's
    schedule.
    """
    steps = run.epochs * steps_per_epoch
    peak = run.warmup * steps
    # At the middle of the step, so that neither the first nor the last step has a rate of 0.
    now = done + 0.5
    if now < peak:
        return run.learning_rate * (now / peak)
    left = (steps - now) / (steps - peak)
    return run.learning_rate * SCHEDULES[run.schedule](left)


# The share of the peak, by the share of the steps after the peak that are left.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
    "constant": lambda _left: 1.0,
}
