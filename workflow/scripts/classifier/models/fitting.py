"""Whether a network takes images of a size and gives logits for the classes of the data."""

import inspect
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import torch

from classifier.models.classifier import build, user_maker
from classifier.models.names import Form, is_user_model, refuse_unknown_model, user_sources
from manynodes.base.errors import Refusal, one_line

IMAGES = 4
# Parameters of the networks that were found to fit: an experiment has the same one in many runs.
FITTING: dict[str, int] = {}


def refuse_unfit_model(
    model: str, widths: Sequence[int], arguments: Mapping[str, Any], form: Form
) -> int:
    """Refuse a model that cannot be trained on such images.

    Nothing is computed: torch's device `meta` has only shapes. A network of the user's that cannot
    be made there is made on the CPU.

    Returns:
        The number of its parameters.

    Raises:
        Refusal: naming the model and the problem.
    """
    key = json.dumps([model, list(widths), dict(arguments), astuple(form)], default=str)
    if key not in FITTING:
        refuse_unknown_model(model)
        found = tried(model, widths, arguments, form, "meta")
        if isinstance(found, str) and is_user_model(model):
            found = tried(model, widths, arguments, form, "cpu")
        if isinstance(found, str):
            raise Refusal(f"model: {found}")
        FITTING[key] = found
    return FITTING[key]


def refuse_uncallable(model: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a network of the user's that is not there, or does not take its arguments. For images
    of unknown size.

    Raises:
        Refusal: naming the model and the problem.
    """
    try:
        make, _, _ = user_maker(model, user_sources(model))
        with suppress(ValueError):  # It has no signature.
            inspect.signature(make).bind(1, 1, (1, 1), **arguments)
    except (Refusal, TypeError) as problem:
        raise Refusal(f"model: {model}: {problem}") from None


def tried(
    model: str, widths: Sequence[int], arguments: Mapping[str, Any], form: Form, device: str
) -> str | int:
    """The problem of a network with a few images, or if there is none its number of parameters."""
    try:
        with torch.device(device), warnings.catch_warnings(action="ignore"):
            network = build(
                model,
                widths,
                form.classes,
                (form.height, form.width, form.channels),
                arguments,
            ).network
            # In the order of dimensions that a training uses.
            images = torch.zeros(IMAGES, form.height, form.width, form.channels)
            outputs = [network.train(how)(images.permute(0, 3, 1, 2)) for how in (True, False)]
    except Refusal as refusal:
        return f"{model}: {refusal}"
    except SystemExit:
        return f"{model} ends Python; raise an error instead"
    except Exception as error:
        # The layers raise anything from AssertionError to RuntimeError; all of it means the same
        # here.
        text = one_line((str(error) or type(error).__name__).splitlines()[0], 150)
        return f"{model} does not take {form.size} images: {text}"
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            return (
                f"{model} returns auxiliary outputs as well, which this trainer does not use; "
                "choose another"
            )
        if tuple(output.shape) != (IMAGES, form.classes):
            return (
                f"{model} returns {tuple(output.shape)} for {IMAGES} images; logits "
                f"{(IMAGES, form.classes)} are needed"
            )
    if not any(parameter.requires_grad for parameter in network.parameters()):
        return f"{model} has no parameter to train: none requires a gradient"
    return sum(parameter.numel() for parameter in network.parameters())
