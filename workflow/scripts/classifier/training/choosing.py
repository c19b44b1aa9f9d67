"""Parameters that a configuration chooses by regular expressions for their names."""

import difflib
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from manynodes.base.errors import Refusal, one_line


def freeze(run: Any, network: nn.Module) -> list[nn.Module]:
    """Let the parameters that `freeze` names have no gradient.

    Returns:
        The BatchNorm layers without another parameter, which stay in evaluation mode.

    Raises:
        Refusal: a regular expression matches nothing, or no parameter is left to train.
    """
    patterns = [run.freeze] if isinstance(run.freeze, str) else run.freeze or []
    if not patterns:
        return []
    for name in chosen("freeze", patterns, network):
        network.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise Refusal(f"freeze: {run.model} has no other parameters, nothing is left to train")
    frozen: list[nn.Module] = []
    for layer, module in network.named_modules():
        tensors = [*module.named_parameters()] or [*module.named_buffers()]
        if isinstance(module, _BatchNorm) and all(
            first(patterns, f"{layer}.{name}") for name, _ in tensors
        ):
            frozen.append(module.eval())
    return frozen


def rates(run: Any, network: nn.Module) -> dict[Tensor, float]:
    """The factors on the learning rate that `rates` gives to parameters.

    Raises:
        Refusal: a regular expression matches nothing, or nothing that is trained.
    """
    found = chosen("rates", run.rates, network)
    for pattern in run.rates:
        named = [name for name in found if re.search(pattern, name)]
        if not any(network.get_parameter(name).requires_grad for name in named):
            raise Refusal(f"rates: {pattern} matches only parameters that are not trained")
    return {network.get_parameter(name): run.rates[pattern] for name, pattern in found.items()}


def chosen(key: str, patterns: Iterable[str], network: nn.Module) -> dict[str, str]:
    """The first regular expression that matches, by name of the parameter that it matches.

    Raises:
        Refusal: one of them matches no name.
    """
    names = [name for name, _ in network.named_parameters()]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            # The names of the layers too: a, a.b and a.b.c of a.b.c.
            known = [each for name in names for each in accumulate(name.split("."), "{}.{}".format)]
            near = difflib.get_close_matches(pattern, known, n=1)
            layers = ", ".join(name for name, _ in network.named_children())
            hint = f"did you mean {near[0]}?" if near else f"it has {one_line(layers, 150)}"
            raise Refusal(f"{key}: {pattern} matches no parameter of the network; {hint}")
    found = {name: first(patterns, name) for name in names}
    return {name: pattern for name, pattern in found.items() if pattern is not None}


def first(patterns: Iterable[str], name: str) -> str | None:
    return next((pattern for pattern in patterns if re.search(pattern, name)), None)
