"""TrivialAugment: one random operation of random strength on each image.

Source: S. G. Müller and F. Hutter, "TrivialAugment: Tuning-free Yet State-of-the-Art Data
    Augmentation", 2021, as torchvision.transforms.v2.TrivialAugmentWide.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from manynodes.base.optional import torchvision

# Strengths of each operation.
STRENGTHS = 31
# How many operations there are; a choice is 2 (31 operation + strength) + 1 if it is negative.
OPERATIONS = 14


def choices(n: int, random: np.random.Generator) -> np.ndarray:
    """The choices for n images, int64 (n,)."""
    return random.integers(0, 2 * STRENGTHS * OPERATIONS, n)


@cache
def operations() -> tuple[tuple[Callable[[Tensor, float], Tensor], list[float], bool], ...]:
    """For each operation: the function of an image (c, h, w) and a strength, its strengths, and
    whether they may be negative.

    Raises:
        Refusal: torchvision is not installed.
    """
    torchvision()
    from torchvision.transforms.v2 import functional

    def sheared(image: Tensor, x: float = 0.0, y: float = 0.0) -> Tensor:
        shear = [math.degrees(math.atan(x)), math.degrees(math.atan(y))]
        return functional.affine(image, 0.0, [0, 0], 1.0, shear, center=[0, 0])

    def moved(image: Tensor, x: float = 0.0, y: float = 0.0) -> Tensor:
        return functional.affine(image, 0.0, [int(x), int(y)], 1.0, [0.0, 0.0])

    def up_to(most: float) -> list[float]:
        return torch.linspace(0.0, most, STRENGTHS).tolist()

    none = STRENGTHS * [0.0]
    bits = (8 - torch.arange(STRENGTHS) / ((STRENGTHS - 1) / 6)).round().tolist()
    return (
        (lambda image, _: image, none, False),
        (lambda image, x: sheared(image, x=x), up_to(0.99), True),
        (lambda image, y: sheared(image, y=y), up_to(0.99), True),
        (lambda image, x: moved(image, x=x), up_to(32.0), True),
        (lambda image, y: moved(image, y=y), up_to(32.0), True),
        (lambda image, angle: functional.rotate(image, angle), up_to(135.0), True),
        (lambda image, by: functional.adjust_brightness(image, 1.0 + by), up_to(0.99), True),
        (lambda image, by: functional.adjust_saturation(image, 1.0 + by), up_to(0.99), True),
        (lambda image, by: functional.adjust_contrast(image, 1.0 + by), up_to(0.99), True),
        (lambda image, by: functional.adjust_sharpness(image, 1.0 + by), up_to(0.99), True),
        (lambda image, bits: functional.posterize(image, int(bits)), bits, False),
        (
            lambda image, share: functional.solarize(image, 255 * share),
            torch.linspace(1.0, 0.0, STRENGTHS).tolist(),
            False,
        ),
        (lambda image, _: functional.autocontrast(image), none, False),
        (lambda image, _: functional.equalize(image), none, False),
    )


def trivially_augmented(images: Tensor, chosen: Sequence[int]) -> Tensor:
    """Images after one operation each.

    One by one, so that the number of images in a batch cannot change a mean.

    Args:
        images: uint8 (b, h, w, c), of 1 or 3 channels.
        chosen: see `choices`.
    """
    found = torch.empty_like(images)
    for place, choice in enumerate(chosen):
        number, negative = divmod(choice, 2)
        which, strength = divmod(number, STRENGTHS)
        function, strengths, signed = operations()[which]
        by = strengths[strength] * (-1 if signed and negative else 1)
        found[place] = function(images[place].permute(2, 0, 1), by).permute(1, 2, 0)
    return found
