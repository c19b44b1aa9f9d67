"""The same pixels on any number of processes, and every image once."""

import numpy as np
import pytest
import torch

from classifier.pixels import batches
from classifier.pixels.batches import Augmentation
from manynodes.data.folder import DataFolder


def how(**keys) -> Augmentation:
    return Augmentation((32, 32), (32, 32), **keys)


def crop(images, indices, plan, how):
    return batches.crop(images, indices, indices, plan, how)


def global_batch(images, plan, batch, world_size, how):
    """The pixels of a global batch as its ranks see them, one after the other."""
    return torch.cat(
        [
            crop(images, batches.share(batch, rank, world_size), plan, how)
            for rank in range(world_size)
        ]
    )


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_one_process_and_many_see_identical_global_batches(digits, world_size) -> None:
    images = torch.from_numpy(DataFolder.read(digits).split("train")[0])
    shifted = how(flip=True, shift=2)
    for epoch in (1, 2):
        plan = batches.epoch_plan(len(images), 5, epoch, shifted)
        for batch in plan.order.split(batches.batch_sizes(len(images), 84)):
            alone, shared = (
                global_batch(images, plan, batch, 1, shifted),
                global_batch(images, plan, batch, world_size, shifted),
            )
            assert alone.dtype == torch.uint8
            assert torch.equal(alone, shared)


@pytest.mark.parametrize(
    ("n", "size"), [(45_000, 500), (45_000, 512), (1_298, 64), (10, 3), (10, 10), (7, 4)]
)
def test_an_epoch_is_dealt_into_the_fewest_equal_batches(n, size) -> None:
    sizes = batches.batch_sizes(n, size)
    assert sum(sizes) == n
    assert len(sizes) == -(-n // size)
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1


def test_an_epoch_sees_every_image_once_in_an_order_of_its_own() -> None:
    first, again, later, other = (
        batches.epoch_plan(1000, seed, epoch, how(flip=True, shift=2)).order
        for seed, epoch in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert torch.equal(first.sort().values, torch.arange(1000))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)


def test_an_image_s_augmentation_does_not_depend_on_its_batch() -> None:
    images = torch.randint(
        0, 256, (50, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    shifted = how(flip=True, shift=4)
    plan = batches.epoch_plan(50, 3, 1, shifted)
    everything = crop(images, torch.arange(50), plan, shifted)
    assert torch.equal(crop(images, torch.tensor([49, 7]), plan, shifted), everything[[49, 7]])


def test_crop_is_the_slice_and_the_mirror_image_that_the_plan_says() -> None:
    images = torch.randint(
        0, 256, (40, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    padded = batches.pad(images, 2)
    shifted = how(flip=True, shift=2)
    plan = batches.epoch_plan(40, 0, 1, shifted)
    cropped = crop(images, torch.arange(40), plan, shifted)
    for i in range(40):
        window = padded[i, plan.down[i] : plan.down[i] + 32, plan.right[i] : plan.right[i] + 32]
        assert torch.equal(cropped[i], window.flip(1) if plan.flipped[i] else window)
    assert 0 < plan.flipped.sum() < 40
    assert set(plan.down.tolist()) == {0, 1, 2, 3, 4}


def test_padding_is_numpy_s_reflection() -> None:
    images = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8)
    for shift in (0, 2, 16):
        border = ((0, 0), (shift, shift), (shift, shift), (0, 0))
        assert np.array_equal(
            batches.pad(images, shift).numpy(), np.pad(images.numpy(), border, mode="reflect")
        )


def test_flips_alternate_and_can_be_switched_off() -> None:
    first, second = (batches.epoch_plan(100, 0, epoch, how(flip=True)).flipped for epoch in (1, 2))
    assert torch.equal(first, ~second)
    assert not batches.epoch_plan(100, 0, 1, how()).flipped.any()


def test_without_augmentation_the_pixels_are_the_images() -> None:
    images = torch.randint(0, 256, (9, 32, 32, 3), dtype=torch.uint8)
    plan = batches.epoch_plan(9, 0, 1, how())
    assert torch.equal(crop(images, plan.order, plan, how()), images[plan.order])


def test_the_validation_split_has_a_seed_of_its_own_and_loses_nothing() -> None:
    training, held_out = batches.validation_split(1000, 100, 0)
    assert (len(training), len(held_out)) == (900, 100)
    assert sorted([*training, *held_out]) == list(range(1000))
    assert np.array_equal(held_out, batches.validation_split(1000, 100, 0)[1])
    assert not np.array_equal(held_out, batches.validation_split(1000, 100, 1)[1])
    assert len(batches.validation_split(10, 0, 0)[1]) == 0


def test_holes_are_whole_anywhere_and_of_one_colour() -> None:
    images = torch.randint(0, 200, (300, 32, 32, 3), dtype=torch.uint8)
    plan = batches.epoch_plan(300, 0, 1, how(flip=True, shift=2, cutout=12))
    colour = torch.tensor([201, 202, 203], dtype=torch.uint8)
    covered = batches.cut_out(images, torch.arange(300), plan, 12, colour)
    hole = (covered == colour).all(-1)
    assert torch.equal(covered[~hole], images[~hole])
    assert (hole.sum((1, 2)) == 12 * 12).all()
    rows, columns = hole.any(2), hole.any(1)
    assert (rows.sum(1) == 12).all()
    assert (columns.sum(1) == 12).all()
    # From the first to the last place that there is.
    assert (
        sorted(set(rows.float().argmax(1).tolist()))
        == list(range(21))
        == sorted(set(columns.float().argmax(1).tolist()))
    )
