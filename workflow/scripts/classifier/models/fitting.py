"""Whether a network takes images of a size and gives logits for the classes of the data."""

import inspect
import json
import random
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from torch import nn

from classifier.models.classifier import Classifier, build, user_maker
from classifier.models.names import Form, is_user_model, refuse_unknown_model, user_sources
from manynodes.base.errors import Refusal, one_line

IMAGES = 4
# Whether it is trained, and with how many images: the last part of an evaluation may be a single
# one.
PASSES = ((True, IMAGES), (False, IMAGES), (False, 1))
# What safetensors holds.
KEPT = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.uint64, torch.uint32, torch.uint16),
}
# A state has the global generators only.
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
# Parameters of the networks that were found to fit: an experiment has the same one in many runs.
FITTING: dict[str, int] = {}


def made(run: Any, form: Form) -> Classifier:
    """The network of a run for images of this form, on torch's default device."""
    shape = (form.height, form.width, form.channels)
    return build(run.model, run.widths, form.classes, shape, run.model_args)


def refuse_unfit_model(run: Any, form: Form) -> int:
    """Refuse a run whose model cannot be trained on such images.

    Nothing is computed: torch's device `meta` has only shapes. A network of the user's that cannot
    be made there is made on the CPU.

    Returns:
        The number of its parameters.

    Raises:
        Refusal: naming the model and the problem.
    """
    network = [run.model, list(run.widths), dict(run.model_args)]
    key = json.dumps([*network, astuple(form)], default=str)
    if key not in FITTING:
        refuse_unknown_model(run.model)
        found = tried(run, form, "meta")
        if isinstance(found, str) and is_user_model(run.model):
            found = tried(run, form, "cpu")
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


def tried(run: Any, form: Form, device: str) -> str | int:
    """The problem of a network with a few images, or if there is none its number of parameters."""
    model, count = run.model, IMAGES
    try:
        with torch.device(device), warnings.catch_warnings(action="ignore"):
            classifier = made(run, form)
            network = classifier.network
            if problem := unkept(network):
                return f"{model} {problem}"
            before = forms(network)
            # In the order of dimensions that a training uses.
            images = torch.zeros(IMAGES, form.height, form.width, form.channels)
            outputs = []
            for training, count in PASSES:
                outputs.append(network.train(training)(images[:count].permute(0, 3, 1, 2)))
            after = forms(network)
            trained = [each for each in network.parameters() if each.requires_grad]
            if trained:
                classifier.parameter_groups(5e-4)
    except Refusal as refusal:
        return f"{model}: {refusal}"
    except SystemExit:
        return f"{model} ends Python; raise an error instead"
    except Exception as error:
        # The layers raise anything from AssertionError to RuntimeError; all of it means the same
        # here.
        text = one_line((str(error) or type(error).__name__).splitlines()[0], 150)
        size = f"{form.height}x{form.width}x{form.channels}"
        what = f"{size} images" if count > 1 else f"a single image of {size}"
        return f"{model} does not take {what}: {text}"
    if problem := misshapen(outputs, form.classes) or changed(before, after):
        return f"{model} {problem}"
    if not trained:
        return f"{model} has no parameter to train: none requires a gradient"
    if not outputs[0].requires_grad:
        return f"{model} gives logits without a gradient; leave torch.no_grad out of forward"
    return sum(parameter.numel() for parameter in network.parameters())


def depends_on_others(run: Any, form: Form) -> bool:
    """Whether a network that fits gives an image other logits in evaluation if it is alone.

    This makes a network of its own on the CPU, and draws from the global generators.
    """
    # One of a GPU's own layers may do nothing on a CPU.
    with suppress(Exception), torch.no_grad(), warnings.catch_warnings(action="ignore"):
        network = made(run, form).network.eval()
        images = torch.randn(2, form.height, form.width, form.channels).permute(0, 3, 1, 2)
        logits = network(images)
        if not torch.equal(logits, network(images)):
            # Random, or not finite.
            return False
        # Another batch size may be computed in another order.
        return not torch.allclose(logits[:1], network(images[:1]), rtol=0.02, atol=1e-3)
    return False


def misshapen(outputs: Sequence[Any], classes: int) -> str | None:
    """What is wrong with what a network returns in PASSES; None if nothing is."""
    for output, (_, count) in zip(outputs, PASSES, strict=True):
        if not isinstance(output, torch.Tensor):
            return (
                "returns auxiliary outputs as well, which this trainer does not use; choose another"
            )
        if tuple(output.shape) != (count, classes):
            images = f"{count} images" if count > 1 else "a single image"
            return (
                f"returns {tuple(output.shape)} for {images}; logits {(count, classes)} are needed"
            )
    return None


def unkept(network: nn.Module) -> str | None:
    """What of a network cannot be trained here, or would be lost in a file; None if nothing is."""
    for name, value in {**dict(network.named_buffers()), **network.state_dict()}.items():
        if not isinstance(value, torch.Tensor):
            return f"has {name} in its state_dict, a {type(value).__name__}; make it a tensor"
        if value.dtype not in KEPT or value.layout != torch.strided:
            kind = str(value.dtype if value.layout == torch.strided else value.layout)
            return (
                f"has {name} as {kind.removeprefix('torch.')}, which no weights file holds; keep "
                "it in another form, such as float32"
            )
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            return (
                f"trains complex numbers, {name}; make its real and imaginary parts the parameter "
                "(torch.view_as_real)"
            )
    for layer, module in network.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, GENERATORS):
                return (
                    f"keeps random numbers of its own, {f'{layer}.{name}'.strip('.')}, which no "
                    "state holds; draw them from torch's global generator"
                )
    return None


def forms(network: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor in a network's state."""
    return {name: (tuple(each.shape), each.dtype) for name, each in network.state_dict().items()}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """How the `forms` of a network have changed, so that its weights would fit no network that is
    made again; None if they have not.
    """
    for name in after:
        if name not in before:
            return f"makes {name} in forward; make it in __init__"
    for name, (shape, dtype) in before.items():
        if name not in after:
            return f"removes {name} in forward; leave it as it is made in __init__"
        if after[name] != (shape, dtype):
            was, now = f"{dtype} {shape}", "{1} {0}".format(*after[name])
            return (
                f"changes {name} in forward from {was} to {now}; give it one size and type in "
                "__init__"
            ).replace("torch.", "")
    return None
