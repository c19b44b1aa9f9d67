"""The networks, each behind the same door: uint8 images in, logits out, and its own description in the weights file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torchvision
from safetensors import SafetensorError
from torch import Tensor, nn

from ddp import atomic
from ddp.errors import Refusal


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

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimizer groups with a `rate`, the factor on the learning rate; the decay per step is the same in each."""
        fast = self.network.fast_parameters() if isinstance(self.network, Airbench) else []
        fast_ids = {id(parameter) for parameter in fast}
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in fast_ids]
        groups = [{"params": rest, "rate": 1.0, "weight_decay": weight_decay}]
        if fast:
            groups.append({"params": fast, "rate": Airbench.RATE, "weight_decay": weight_decay / Airbench.RATE})
        return groups


class Airbench(nn.Module):
    """The network of airbench94 with three blocks of the given widths, for 32 x 32 images.

    Source: K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, and its repository cifar10-airbench.
    """

    RATE = 64.0  # factor on the learning rate of the BatchNorm biases (section 3.4 there)

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        patches = 2 * 3 * 2**2  # the whitening filters and their negatives
        self.whitening = nn.Conv2d(3, patches, kernel_size=2)
        self.whitening.weight.requires_grad_(False)
        ins = (patches, *widths[:-1])
        self.blocks = nn.Sequential(*(airbench_block(i, o) for i, o in zip(ins, widths, strict=True)))
        self.head = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(nn.functional.gelu(self.whitening(images)))
        return self.head(nn.functional.max_pool2d(hidden, 3).flatten(1)) / 9

    def whiten(self, images: Tensor) -> None:
        """Set the first filters to the principal directions of 2 x 2 patches, scaled to unit variance (section 3.2 there)."""
        # (n, 3, h - 1, w - 1, 2, 2) to one row of 3 x 2 x 2 values a patch
        patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12).to(torch.float64)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = vectors.T.reshape(-1, 3, 2, 2) / torch.sqrt(values.reshape(-1, 1, 1, 1) + 5e-4)
        self.whitening.weight.copy_(torch.cat((filters, -filters)))

    def fast_parameters(self) -> list[nn.Parameter]:
        return [m.bias for m in self.modules() if isinstance(m, nn.BatchNorm2d)]


def airbench_block(channels_in: int, channels_out: int) -> nn.Sequential:
    def conv(channels: int) -> nn.Conv2d:
        layer = nn.Conv2d(channels, channels_out, kernel_size=3, padding="same", bias=False)
        nn.init.dirac_(layer.weight.data[: layer.weight.size(1)])
        return layer

    def norm() -> nn.BatchNorm2d:
        # Not airbench's eps of 1e-12: the grey images of `digits` have channels without variance, which it blows up.
        layer = nn.BatchNorm2d(channels_out, momentum=0.4)
        layer.weight.requires_grad_(False)
        return layer

    return nn.Sequential(
        conv(channels_in), nn.MaxPool2d(2), norm(), nn.GELU(), conv(channels_out), norm(), nn.GELU()
    )  # fmt: skip


def build(model: str, widths: Sequence[int], classes: int) -> Classifier:
    """A model by its name in the configuration, freshly initialised from torch's global generator.

    `resnet18` is torchvision's with a 3 x 3 first convolution and no first pooling, as usual for 32 x 32 images;
    `resnet18_imagenet` is torchvision's as it is; any other name is torchvision's own.
    """
    description = {"model": model, "widths": list(widths), "classes": classes}
    if model == "airbench":
        network: nn.Module = Airbench(widths, classes)
    elif model == "resnet18":
        network = torchvision.models.resnet18(num_classes=classes)
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    else:
        name = "resnet18" if model == "resnet18_imagenet" else model
        network = torchvision.models.get_model(name, weights=None, num_classes=classes)
    return Classifier(network.to(memory_format=torch.channels_last), description)


def save(classifier: Classifier, path: Path) -> None:
    """Write weights and description as safetensors, whole or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in classifier.state_dict().items()}
    # A single metadata key: safetensors writes several in an order of its own, and the file must be the same every time.
    atomic.write_bytes(path, safetensors.torch.save(tensors, metadata={"classifier": json.dumps(classifier.description)}))


def load(path: Path) -> Classifier:
    """The classifier in a weights file.

    Raises:
        Refusal: the file is missing, damaged, or not one that `save` wrote.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {})["classifier"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        classifier = build(**description)
        classifier.load_state_dict(tensors)
    except FileNotFoundError:
        raise Refusal(f"{path} is not there; train the run first") from None
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise Refusal(f"{path} is damaged or was not written by this workflow: {str(error).splitlines()[0]}") from None
    return classifier
