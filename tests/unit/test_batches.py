"""The same pixels on any number of processes, and every image once."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as transform_functional

from classifier.pixels import batches
from classifier.pixels.batches import Augmentation
from classifier.training import splits
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_part_begins_with_the_image_before_it(world_size) -> None:
    batch = torch.arange(20, 31)
    found = [batches.share(batch, rank, world_size, before=True) for rank in range(world_size)]
    assert torch.equal(torch.cat([part[1:] for part in found]), batch)
    assert torch.equal(torch.cat([part[:-1] for part in found]), batch.roll(1))


def test_an_epoch_sees_every_image_once_in_an_order_of_its_own() -> None:
    first, again, later, other = (
        batches.epoch_plan(1000, seed, epoch, how(flip=True, shift=2)).order
        for seed, epoch in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert torch.equal(first.sort().values, torch.arange(1000))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)


def test_balanced_draws_are_uniform_over_classes_and_over_the_images_of_each() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 3], [9000, 900, 100]))
    plain, first, again, later = (
        batches.epoch_plan(10_000, 0, epoch, how(flip=True, shift=2), labels=given)
        for epoch, given in ((1, None), (1, labels), (1, labels), (2, labels))
    )
    assert plain.drawn is None
    assert first.drawn is not None
    assert torch.equal(first.drawn, again.drawn)
    assert not torch.equal(first.drawn, later.drawn)
    # All other draws are those of an epoch of all images.
    assert torch.equal(first.order, plain.order)
    assert torch.equal(first.down, plain.down)
    counts = np.bincount(labels[first.drawn])
    # 3333 draws of each class, and 33.3 of each of the rarest class's images: five deviations.
    assert np.abs(counts[[0, 1, 3]] - 3333.3).max() < 5 * np.sqrt(10_000 * 2 / 9)
    rarest = np.bincount(first.drawn, minlength=10_000)[labels == 3]
    assert np.abs(rarest - 33.3).max() < 5 * np.sqrt(33.3)


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
    training, held_out = splits.validation_split(1000, 100, 0)
    assert (len(training), len(held_out)) == (900, 100)
    assert sorted([*training, *held_out]) == list(range(1000))
    assert np.array_equal(held_out, splits.validation_split(1000, 100, 0)[1])
    assert not np.array_equal(held_out, splits.validation_split(1000, 100, 1)[1])
    assert len(splits.validation_split(10, 0, 0)[1]) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_are_mixed_as_torchvision_mixes_them(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (7, 20, 24, 3), generator=generator).to(dtype)
    labels = torch.arange(7)
    box = batches.cut_mix(0.4, (3, 20), (20, 24))
    mixes = [(v2.MixUp, batches.Mix(0.7), {"lam": 0.7}),
             (v2.CutMix, box, {"box": (11, 0, 24, 10), "lam_adjusted": box.kept})]  # fmt: skip
    both = batches.mixed_labels(torch.cat((labels[-1:], labels)))
    for kind, mix, params in mixes:
        transform = kind(num_classes=7)
        params |= {"labels": labels, "batch_size": 7}
        found = batches.mixed(torch.cat((images[-1:], images)), mix)
        due = transform.transform(images.float().permute(0, 3, 1, 2), params).permute(0, 2, 3, 1)
        assert found.dtype == dtype
        soft = transform.transform(labels, params)
        for own, other, due_label in zip(*both.T, soft, strict=True):
            shares = torch.zeros(7)
            shares[own], shares[other] = mix.kept, 1 - mix.kept
            torch.testing.assert_close(due_label, shares)
        # uint8 stays so, in whole levels.
        assert torch.equal(found, due.round().to(dtype) if dtype == torch.uint8 else due)


def test_the_box_of_a_mixture_is_torchvision_s() -> None:
    cutmix = v2.CutMix(alpha=1.0, num_classes=7)
    images = torch.zeros(2, 3, 20, 24)
    for seed in range(200):
        torch.manual_seed(seed)
        due = cutmix.make_params([images])
        torch.manual_seed(seed)
        kept = float(torch.distributions.Beta(1.0, 1.0).sample(()))
        right, down = (int(torch.randint(edge, (1,))) for edge in (24, 20))
        found = batches.cut_mix(kept, (down, right), (20, 24))
        assert found.box is not None
        rows, columns = found.box
        assert due["box"] == (columns.start, rows.start, columns.stop, rows.stop)
        assert due["lam_adjusted"] == found.kept


def test_a_step_is_mixed_by_its_seed_epoch_and_number_alone() -> None:
    both = how(mixup=0.2, cutmix=1.0)
    mixes = [batches.mix_of(0, 1, step, both) for step in range(1000)]
    assert mixes == [batches.mix_of(0, 1, step, both) for step in range(1000)]
    assert batches.mix_of(1, 1, 0, both) != mixes[0] != batches.mix_of(0, 2, 0, both)
    assert 420 < sum(mix.box is None for mix in mixes) < 580
    # Of Beta(a, a) the variance is 1 / (4 (2 a + 1)), that of the mean of 1000 a 1000th of it.
    for alpha in (0.2, 1.0):
        kept = [batches.mix_of(0, 1, step, how(mixup=alpha)).kept for step in range(1000)]
        assert np.mean(kept) == pytest.approx(0.5, abs=0.05)
        assert np.var(kept) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)
    assert batches.mix_of(0, 1, 0, how()) is None
    assert all(batches.mix_of(0, 1, step, how(cutmix=1.0)).box for step in range(20))


def test_holes_are_whole_anywhere_and_of_one_colour() -> None:
    images = torch.randint(0, 200, (300, 32, 32, 3), dtype=torch.uint8)
    plan = batches.epoch_plan(300, 0, 1, how(flip=True, shift=2, cutout=12))
    colour = torch.tensor([201, 202, 203], dtype=torch.uint8)
    covered = batches.cut_out(images, plan.top, plan.left, 12, 12, colour)
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


def test_the_holes_of_random_erasing_are_torchvision_s() -> None:
    erasing = v2.RandomErasing()
    image = torch.randint(0, 200, (3, 20, 24), dtype=torch.uint8)
    colour = torch.tensor([201, 202, 203], dtype=torch.uint8)
    drawn = 0
    for seed in range(300):
        torch.manual_seed(seed)
        due = erasing.make_params([image])
        torch.manual_seed(seed)
        for _ in range(10):
            drawn += 1
            area, log_ratio = (
                torch.empty(1).uniform_(*limits).numpy()
                for limits in ((0.02, 0.33), erasing._log_ratio.tolist())
            )
            height, width = batches.hole_edges(area, np.exp(log_ratio), (20, 24))[0]
            if height < 20 and width < 24:
                break
        assert (height, width) == (due["h"], due["w"])
        where = (torch.tensor([due[name]]) for name in ("i", "j", "h", "w"))
        found = batches.cut_out(image.permute(1, 2, 0)[None], *where, colour)
        filled = transform_functional.erase(
            image, due["i"], due["j"], due["h"], due["w"], colour[:, None, None]
        )
        assert torch.equal(found[0].permute(2, 0, 1), filled)
    assert drawn > 300


def test_holes_fit_in_the_window_and_are_as_frequent_as_asked() -> None:
    plan, again, plain = (
        batches.epoch_plan(4000, 0, 1, Augmentation((32, 40), (20, 24), **keys))
        for keys in ({"random_erasing": 0.25}, {"random_erasing": 0.25}, {})
    )
    assert plain.holes is None
    assert torch.equal(plan.order, plain.order)
    assert torch.equal(plan.holes, again.holes)
    top, left, height, width = plan.holes.unbind(1)
    there = height > 0
    assert 850 < there.sum() < 1150
    assert torch.equal(there, width > 0)
    assert (top.min(), left.min()) == (0, 0)
    assert (height.max() < 20, width.max() < 24) == (True, True)
    assert (top + height).max() == 20
    assert (left + width).max() == 24
    share = (height * width)[there] / (20 * 24)
    # Rounding to whole pixels widens the limits of 0.02 and 0.33.
    assert 0.01 < share.min() < 0.04 < 0.31 < share.max() < 0.35
