"""The networks, each behind the same door: uint8 images in, logits out, and its own description in the weights file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ddp import atomic
from ddp.errors import Refusal
from ddp.model_names import OWN_MODELS
from ddp.networks import Airbench, resnet9
from ddp.optional import torchvision
from ddp.reading import parse_json

# A training's steps divided by the steps that BatchNorm's running statistics average over, at least.
BATCHNORM_WINDOWS = 20
# Channels of a layer, and classes, that a weights file may describe.
MOST_CHANNELS = 4096
MOST_CLASSES = 1_000_000


class Classifier(nn.Module):
    """A network with the normalisation of its training images, so that its weights file needs nothing beside it.

    Args:
        network: from normalised images, float (b, 3, h, w) in channels_last order, to logits (b, classes).
        description: what `build` needs to make the same network again.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, description: dict[str, Any]) -> None:
        super().__init__()
        self.network = network
        self.description = description
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("std", torch.ones(3))

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float32 (b, classes), of uint8 images (b, h, w, 3)."""
        # A permuted NHWC tensor is an NCHW tensor in channels_last order already: nothing is moved.
        normalised = (images.to(torch.float32) - self.mean) / self.std
        return self.network(normalised.permute(0, 3, 1, 2))

    def place(self, device: torch.device) -> Self:
        """Move it to where it is used, with its filters in the order that is best there."""
        # A GPU would bring filters into the images' order in every step. A CPU brings them into an order of its own whatever theirs is,
        # and torch's fused optimizers copy there what is not contiguous, to and fro: 9 % of a ResNet-18's step (measured).
        return self.to(device).to(memory_format=torch.channels_last if device.type == "cuda" else torch.preserve_format)

    @torch.no_grad()
    def fit_to(self, images: Tensor) -> None:
        """Set what is computed from the training images, uint8 (n, h, w, 3), rather than learned."""
        levels = torch.arange(256, dtype=torch.float64, device=images.device)
        for channel in range(3):
            # From the histogram: the sums are over integers, hence exact, and need no float copy of all pixels.
            share = torch.bincount(images[..., channel].flatten(), minlength=256).to(torch.float64) / images[..., channel].numel()
            self.mean[channel] = (share * levels).sum()
            self.std[channel] = (share * (levels - self.mean[channel]) ** 2).sum().sqrt()
        if isinstance(self.network, Airbench):
            some = (images[:2000].to(torch.float32) - self.mean) / self.std
            self.network.whiten(some.permute(0, 3, 1, 2))

    def average_recent_steps(self, steps: int) -> None:
        """Have every BatchNorm's running statistics follow the last 20th of a training, or its own shorter window.

        The networks of torchvision average over 10 to 100 steps (momentum 0.1 to 0.01). In a training of some hundred steps that lags so
        far behind the weights that validation is at chance level (measured: mobilenet_v3_small, 63 % training, 9.7 % validation).
        """
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d) and module.momentum is not None:
                module.momentum = max(module.momentum, min(1.0, BATCHNORM_WINDOWS / steps))

    def parameter_groups(self, weight_decay: float, muon: bool = False) -> list[dict[str, Any]]:
        """Optimizer groups with a `rate`, the factor on the learning rate; the decay per step is the same in each.

        Args:
            muon: put the filters into a group of their own, marked `filters`, see `optimizers.Muon`.
        """
        network, none = self.network, list[nn.Parameter]()
        fast, filters = (network.biases(), network.filters() if muon else none) if isinstance(network, Airbench) else (none, none)
        apart = {id(parameter) for parameter in (*fast, *filters)}
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in apart]
        groups = [
            {"params": rest, "rate": 1.0, "weight_decay": weight_decay},
            {"params": fast, "rate": Airbench.BIAS_RATE, "weight_decay": weight_decay / Airbench.BIAS_RATE},
            {"params": filters, "rate": Airbench.FILTER_RATE, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False},
        ]
        return [group | {"filters": group["params"] is filters} for group in groups if group["params"]]


def build(model: str, widths: Sequence[int], classes: int) -> Classifier:
    """A model by its name in the configuration, freshly initialised from torch's global generator.

    `airbench`, `airbench96` and `resnet9` are those of `networks`; `resnet18` is torchvision's with a 3 x 3 first convolution and no first
    pooling, as usual for 32 x 32 images; `resnet18_imagenet` is torchvision's as it is; any other name is torchvision's own.
    """
    description = {"model": model, "widths": list(widths), "classes": classes}
    if model in ("airbench", "airbench96"):
        network: nn.Module = Airbench(widths, classes, residual=model == "airbench96")
    elif model == "resnet9":
        network = resnet9(classes)
    elif model == "resnet18":
        network = torchvision().models.resnet18(num_classes=classes)
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    else:
        name = "resnet18" if model == "resnet18_imagenet" else model
        network = torchvision().models.get_model(name, weights=None, num_classes=classes)
    return Classifier(network, description)


def save(classifier: Classifier, path: Path) -> None:
    """Write weights and description as safetensors, whole or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in classifier.state_dict().items()}
    # A single metadata key: safetensors writes several in an order of its own, and the file must be the same every time.
    atomic.write_bytes(path, safetensors.torch.save(tensors, metadata={"classifier": json.dumps(classifier.description)}))


def load(path: Path | str) -> Classifier:
    """The classifier in a weights file. Nothing is built before the file is seen to hold just the tensors that its description needs.

    Raises:
        Refusal: the file is missing, damaged, or not one that `save` wrote.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise FileNotFoundError if not path.exists() else ValueError("it is not a regular file")
        with safetensors.safe_open(path, framework="pt") as file:
            description = described((file.metadata() or {})["classifier"])
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118, it is no mapping
            with torch.device("meta"):
                wanted = {name: tuple(tensor.shape) for name, tensor in build(**description).state_dict().items()}
            if shapes != wanted:
                raise ValueError("its tensors are not those of the network that it describes")
            tensors = {name: file.get_tensor(name) for name in shapes}
        classifier = build(**description)
        if any(tensor.dtype != tensors[name].dtype for name, tensor in classifier.state_dict().items()):
            raise ValueError("its tensors are of another type")
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError("a weight is not finite")
        classifier.load_state_dict(tensors)
    except FileNotFoundError:
        raise Refusal(f"{path} is not there; train the run first") from None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise Refusal(f"{path} is damaged or was not written by this workflow: {str(error).splitlines()[0]}") from None
    return classifier


def described(text: str) -> dict[str, Any]:
    """The description in a weights file.

    Raises:
        ValueError: it is none.
    """
    found = parse_json(text)
    if not isinstance(found, dict) or set(found) != {"model", "widths", "classes"}:
        raise ValueError("it has no description of a network")
    widths, classes = found["widths"], found["classes"]
    whole = isinstance(widths, list) and len(widths) == 3 and all(type(number) is int for number in (*widths, classes))
    model = found["model"]
    # Others of its builders, for detection say, fetch weights.
    known = isinstance(model, str) and (model in OWN_MODELS or model in torchvision().models.list_models(module=torchvision().models))
    sizes = whole and all(1 <= width <= MOST_CHANNELS for width in widths) and 1 <= classes <= MOST_CLASSES
    if not sizes or not known:
        raise ValueError("its description is of no network")
    return found
