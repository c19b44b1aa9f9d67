"""TrivialAugment is torchvision's."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from classifier.pixels.trivial_augment import (
    OPERATIONS,
    STRENGTHS,
    choices,
    operations,
    trivially_augmented,
)
from classifier.training.limits import refuse_unfit_pixels
from manynodes.base.errors import Refusal

SPACE = v2.TrivialAugmentWide._AUGMENTATION_SPACE


@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_is_torchvision_s(channels) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 200, (channels, 20, 24), dtype=torch.uint8, generator=generator)
    transform, names = v2.TrivialAugmentWide(), list(SPACE)
    changed = set()
    for seed in range(600):
        torch.manual_seed(seed)
        due = transform(image)
        torch.manual_seed(seed)
        which, strength, negative = int(torch.randint(OPERATIONS, ())), 0, False
        magnitudes, signed = SPACE[names[which]]
        if magnitudes(STRENGTHS, 20, 24) is not None:
            strength = int(torch.randint(STRENGTHS, ()))
            negative = signed and bool(torch.rand(()) <= 0.5)
        chosen = 2 * (STRENGTHS * which + strength) + negative
        (found,) = trivially_augmented(image.permute(1, 2, 0)[None], [chosen])
        assert torch.equal(found.permute(2, 0, 1), due), (names[which], strength, negative)
        if not torch.equal(due, image):
            changed.add(names[which])
    # Grey images have no saturation.
    assert set(names) - changed == {"Identity"} | ({"Color"} if channels == 1 else set())


def test_the_strengths_are_torchvision_s() -> None:
    assert len(operations()) == OPERATIONS == len(SPACE)
    for (_, strengths, signed), (magnitudes, its_signed) in zip(
        operations(), SPACE.values(), strict=True
    ):
        due = magnitudes(STRENGTHS, 20, 24)
        assert strengths == (STRENGTHS * [0.0] if due is None else due.tolist())
        assert signed == its_signed


def test_all_are_chosen_equally_often() -> None:
    kinds = 2 * STRENGTHS * OPERATIONS
    counts = np.bincount(choices(100 * kinds, np.random.default_rng(0)), minlength=kinds)
    assert len(counts) == kinds
    assert np.abs(counts - 100).max() < 5 * 10


@pytest.mark.parametrize(("dtype", "channels"), [("float32", 3), ("uint8", 4)])
def test_other_images_are_refused(dtype, channels) -> None:
    line = f"trivial_augment: scans has {dtype} images of {channels} channels; it is for uint8 "
    with pytest.raises(Refusal, match=f"^{line}images of 1 or 3; use trivial_augment: false$"):
        refuse_unfit_pixels("scans", dtype, channels)
    refuse_unfit_pixels("scans", "uint8", 1)
