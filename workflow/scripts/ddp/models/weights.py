"""Weights files: safetensors with a description of their network."""

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError

from ddp.base import atomic
from ddp.base.errors import Refusal
from ddp.base.optional import torchvision
from ddp.base.reading import parse_json
from ddp.models.classifier import Classifier, build
from ddp.models.names import OWN_MODELS

# Limits for the description in a weights file.
MOST_CHANNELS = 4096
MOST_CLASSES = 1_000_000


def save(classifier: Classifier, path: Path) -> None:
    """Write weights and description atomically as safetensors."""
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in classifier.state_dict().items()
    }
    # A single metadata key: safetensors writes several in varying order, and the file must be
    # reproducible.
    atomic.write_bytes(
        path,
        safetensors.torch.save(
            tensors, metadata={"classifier": json.dumps(classifier.description)}
        ),
    )


def load(path: Path | str) -> Classifier:
    """The classifier in a weights file. It is built only if the file holds exactly its tensors.

    Raises:
        Refusal: the file is missing, damaged, or not written by `save`.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise FileNotFoundError if not path.exists() else ValueError("it is not a regular file")
        with safetensors.safe_open(path, framework="pt") as file:
            description = described((file.metadata() or {})["classifier"])
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118, it is no mapping
            with torch.device("meta"):
                wanted = {
                    name: tuple(tensor.shape)
                    for name, tensor in build(**description).state_dict().items()
                }
            if shapes != wanted:
                raise ValueError("its tensors are not those of the network that it describes")
            tensors = {name: file.get_tensor(name) for name in shapes}
        classifier = build(**description)
        if any(
            tensor.dtype != tensors[name].dtype for name, tensor in classifier.state_dict().items()
        ):
            raise ValueError("its tensors are of another type")
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError("a weight is not finite")
        classifier.load_state_dict(tensors)
    except FileNotFoundError:
        raise Refusal(f"{path} is not there; train the run first") from None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise Refusal(
            f"{path} is damaged or was not written by this workflow: {str(error).splitlines()[0]}"
        ) from None
    return classifier


def described(text: str) -> dict[str, Any]:
    """The description in a weights file.

    Raises:
        ValueError: there is no valid one.
    """
    found = parse_json(text)
    if not isinstance(found, dict) or set(found) != {"model", "widths", "classes"}:
        raise ValueError("it has no description of a network")
    widths, classes = found["widths"], found["classes"]
    whole = (
        isinstance(widths, list)
        and len(widths) == 3
        and all(type(number) is int for number in (*widths, classes))
    )
    model = found["model"]
    # Other builders of torchvision, for detection for instance, download weights.
    known = isinstance(model, str) and (
        model in OWN_MODELS
        or model in torchvision().models.list_models(module=torchvision().models)
    )
    sizes = (
        whole
        and all(1 <= width <= MOST_CHANNELS for width in widths)
        and 1 <= classes <= MOST_CLASSES
    )
    if not sizes or not known:
        raise ValueError("its description is of no network")
    return found
