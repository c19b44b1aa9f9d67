"""One interface for all networks: uint8 images in, logits out."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ddp.base.optional import torchvision
from ddp.models import networks
from ddp.models.names import OWN_MODELS

# Minimum ratio of a training's steps to the steps that BatchNorm's running statistics average over.
BATCHNORM_WINDOWS = 20


class Classifier(nn.Module):
    """A network with the normalisation of its training images, complete in one weights file.

    Args:
        network: from normalised images, float (b, 3, h, w) in channels_last order, to logits
            (b, classes).
        description: arguments with which `build` makes the same network again.
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
        # A permuted NHWC tensor is already an NCHW tensor in channels_last order: nothing is
        # copied.
        normalised = (images.to(torch.float32) - self.mean) / self.std
        return self.network(normalised.permute(0, 3, 1, 2))

    def move_to(self, device: torch.device) -> Self:
        """Move it to a device, with its filters in the best memory format there."""
        # A GPU would convert the filters to the format of the images in every step. A CPU converts
        # them to a format of its own anyway, and there torch's fused optimizers copy filters that
        # are not contiguous: 9 % of a ResNet-18's step (measured).
        return self.to(device).to(
            memory_format=torch.channels_last if device.type == "cuda" else torch.preserve_format
        )

    @torch.no_grad()
    def fit_to(self, images: Tensor) -> None:
        """Set what is computed from the training images, uint8 (n, h, w, 3), and not learned."""
        levels = torch.arange(256, dtype=torch.float64, device=images.device)
        for channel in range(3):
            # From the histogram: sums of integers are exact, and need no float copy of all pixels.
            share = (
                torch.bincount(images[..., channel].flatten(), minlength=256).to(torch.float64)
                / images[..., channel].numel()
            )
            self.mean[channel] = (share * levels).sum()
            self.std[channel] = (share * (levels - self.mean[channel]) ** 2).sum().sqrt()
        if fit := getattr(self.network, "fit_to", None):
            some = (images[:2000].to(torch.float32) - self.mean) / self.std
            fit(some.permute(0, 3, 1, 2))

    def average_recent_steps(self, steps: int) -> None:
        """Let every BatchNorm average over at most the last 20th of the training.

        The networks of torchvision average over 10 to 100 steps (momentum 0.1 to 0.01). In a
        training of some hundred steps, these statistics lag so far behind the weights that
        validation is at chance level (measured: mobilenet_v3_small, 63 % training, 9.7 %
        validation).
        """
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d) and module.momentum is not None:
                module.momentum = max(module.momentum, min(1.0, BATCHNORM_WINDOWS / steps))

    def parameter_groups(self, weight_decay: float, muon: bool = False) -> list[dict[str, Any]]:
        """Optimizer groups with a `rate`, the factor on the learning rate; the decay per step
        is equal.

        Args:
            muon: put the filters into their own group, marked `filters`, see `optimizers.Muon`.
        """
        own = getattr(self.network, "parameter_groups", None)
        special = own(weight_decay, muon) if own else []
        apart = {id(parameter) for group in special for parameter in group["params"]}
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in apart]
        groups = [{"params": rest, "rate": 1.0, "weight_decay": weight_decay}, *special]
        return [{"filters": False} | group for group in groups if group["params"]]


def build(model: str, widths: Sequence[int], classes: int) -> Classifier:
    """A model by its name in the configuration, initialised from torch's global generator.

    A name that is not in OWN_MODELS is torchvision's.
    """
    description = {"model": model, "widths": list(widths), "classes": classes}
    if model in OWN_MODELS:
        network = getattr(networks, OWN_MODELS[model].builder)(widths, classes)
    else:
        network = torchvision().models.get_model(model, weights=None, num_classes=classes)
    return Classifier(network, description)
