"""The networks of the built-in models, designed for 32 x 32 images.

A network may have two methods that `Classifier` calls: `fit_to(images)` sets what is computed from
the training images, and `parameter_groups(weight_decay, muon)` returns the optimizer groups with a
learning rate of their own.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manynodes.base.optional import torchvision


class Residual(nn.Sequential):
    """Adds its input to its output."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden)


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.factor


class GlobalMaxPool(nn.Module):
    """torch calls the gradient of AdaptiveMaxPool2d not deterministic on a GPU."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.max_pool2d(hidden, hidden.shape[2:])


class Airbench(nn.Module):
    """The network of airbench94 with three blocks of the given widths; with residual layers, of
    airbench96.

    Source: K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, and its repository
    cifar10-airbench.
    """

    # Factors on the learning rate: of the BatchNorm biases (section 3.4 there), and of the filters
    # under Muon (airbench94_muon.py: 0.24, when the rest has 1.66 for the mean loss of 2000
    # images).
    BIAS_RATE = 64.0
    FILTER_RATE = 0.145

    def __init__(self, widths: Sequence[int], classes: int, channels: int, residual: bool) -> None:
        super().__init__()
        patches = 2 * channels * 2**2  # the whitening filters and their negatives
        self.whitening = nn.Conv2d(channels, patches, kernel_size=2)
        self.whitening.weight.requires_grad_(False)
        ins = (patches, *widths[:-1])
        self.blocks = nn.Sequential(
            *(airbench_block(i, o, residual) for i, o in zip(ins, widths, strict=True))
        )
        self.head = nn.Linear(widths[-1], classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(nn.functional.gelu(self.whitening(images)))
        # 3 x 3 for images of 32 x 32.
        return self.head(nn.functional.max_pool2d(hidden, hidden.shape[2:]).flatten(1)) / 9

    def fit_to(self, images: Tensor) -> None:
        """Set the first filters to the principal directions of 2 x 2 patches, scaled to unit
        variance (section 3.2 there).
        """
        # (n, c, h - 1, w - 1, 2, 2) to rows of c x 2 x 2 values, one per patch
        channels = images.shape[1]
        patches = (
            images.unfold(2, 2, 1)
            .unfold(3, 2, 1)
            .permute(0, 2, 3, 1, 4, 5)
            .reshape(-1, channels * 4)
            .to(torch.float64)
        )
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = vectors.T.reshape(-1, channels, 2, 2) / torch.sqrt(
            values.reshape(-1, 1, 1, 1) + 5e-4
        )
        self.whitening.weight.copy_(torch.cat((filters, -filters)))

    def parameter_groups(self, weight_decay: float, muon: bool) -> list[dict[str, Any]]:
        """The groups with their own learning rate: BatchNorm biases, and the filters under Muon."""
        biases = [m.bias for m in self.modules() if isinstance(m, nn.BatchNorm2d)]
        decay = weight_decay / self.BIAS_RATE
        groups: list[dict[str, Any]] = [
            {"params": biases, "rate": self.BIAS_RATE, "weight_decay": decay}
        ]
        if muon:
            filters = [p for p in self.blocks.parameters() if p.dim() == 4]
            groups.append({
                "params": filters, "rate": self.FILTER_RATE, "weight_decay": 0.0,
                "momentum": 0.0, "nesterov": False, "filters": True,
            })  # fmt: skip
        return groups


def airbench_block(channels_in: int, channels_out: int, residual: bool) -> nn.Sequential:
    def conv(channels: int) -> nn.Conv2d:
        layer = nn.Conv2d(channels, channels_out, kernel_size=3, padding="same", bias=False)
        nn.init.dirac_(layer.weight.data[: layer.weight.size(1)])
        return layer

    def norm() -> nn.BatchNorm2d:
        # Not airbench's eps of 1e-12: the grey images of `digits` have channels without variance,
        # which it amplifies.
        layer = nn.BatchNorm2d(channels_out, momentum=0.1 if residual else 0.4)
        layer.weight.requires_grad_(False)
        return layer

    second = [conv(channels_out), norm()]
    if residual:
        second = [Residual(*second, nn.GELU(), conv(channels_out), norm())]
    return nn.Sequential(conv(channels_in), nn.MaxPool2d(2), norm(), nn.GELU(), *second, nn.GELU())


airbench = partial(Airbench, residual=False)
airbench96 = partial(Airbench, residual=True)


def resnet18(_widths: Sequence[int], classes: int, channels: int) -> nn.Module:
    """torchvision's, with a 3 x 3 first convolution and no first pooling, as usual for 32 x 32
    images.
    """
    network = torchvision().models.resnet18(num_classes=classes)
    network.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


def resnet18_imagenet(_widths: Sequence[int], classes: int, channels: int) -> nn.Module:
    network = torchvision().models.resnet18(num_classes=classes)
    if channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return network


def resnet9(_widths: Sequence[int], classes: int, channels: int) -> nn.Sequential:
    """The network of his entry to DAWNBench.

    Source: D. Page, "How to Train Your ResNet", 2018, part 4.
    """

    def conv(channels_in: int, channels_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )

    return nn.Sequential(
        conv(channels, 64),
        conv(64, 128), nn.MaxPool2d(2), Residual(conv(128, 128), conv(128, 128)),
        conv(128, 256), nn.MaxPool2d(2),
        conv(256, 512), nn.MaxPool2d(2), Residual(conv(512, 512), conv(512, 512)),
        GlobalMaxPool(), nn.Flatten(), nn.Linear(512, classes, bias=False), Scale(0.125),
    )  # fmt: skip
