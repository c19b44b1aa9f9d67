"""The pixels of a step: the same on any number of processes, from the disk and from memory."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from classifier.pixels import batches, shares
from classifier.pixels.batches import Augmentation
from classifier.pixels.shares import Shares
from classifier.training import loop
from classifier.training.losses import Weights
from manynodes.ranks.vote import Verdict
from trainings import complete, in_this_process, result

CPU = torch.device("cpu")
# Images of less and of more than LARGE bytes, of which some are not square or not RGB.
FORMS = {
    "32 x 32 x 3": (32, 32, 3),
    "48 x 64 x 1": (48, 64, 1),
    "96 x 80 x 3": (96, 80, 3),
}
WAYS = {
    "shifted": {"shift": 3},
    "in a window": {"shift": 1, "window": (24, 28)},
    "resized": {"area": 0.3, "window": (24, 20)},
    "mixed": {"shift": 3, "mixup": 0.8},
    "trivially augmented": {"shift": 3, "trivial_augment": True},
    "with everything": {
        "area": 0.3,
        "window": (24, 20),
        "colour": 0.4,
        "cutout": 6,
        "random_erasing": 0.5,
        "mixup": 0.8,
        "cutmix": 1.0,
    },
}


def made(form: tuple[int, int, int], resident: bool, **keys) -> Shares:
    images = np.random.default_rng(0).integers(0, 256, (60, *form), dtype=np.uint8)
    how = Augmentation(**{"size": form[:2], "window": form[:2], "flip": True} | keys)
    rows = np.arange(60)[::-1][:50].copy()  # some are held out
    return Shares(images, rows, how, CPU, resident)


def pixels(of: Shares, world_size: int, labels: np.ndarray | None = None) -> list[torch.Tensor]:
    """The pixels of each global batch of an epoch."""
    plan = batches.epoch_plan(len(of.rows), 3, 1, of.how, of.place, labels=labels)
    steps = plan.order.split(batches.batch_sizes(len(of.rows), 12))
    mixes = [batches.mix_of(3, 1, step, of.how) for step in range(len(steps))]
    shares_of = [
        [batches.share(step, rank, world_size, before=mix is not None)
         for step, mix in zip(steps, mixes, strict=True)]
        for rank in range(world_size)
    ]  # fmt: skip
    ranks = [[found for _, found in of.of_epoch(plan, parts, mixes)] for parts in shares_of]
    return [torch.cat(parts) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_the_pixels_of_a_batch_depend_on_nothing_but_seed_and_epoch(form: str, way: str) -> None:
    wanted = pixels(made(FORMS[form], True, **WAYS[way]), 1)
    for world_size in (1, 2, 3):
        for resident in (True, False):
            found = pixels(made(FORMS[form], resident, **WAYS[way]), world_size)
            assert all(map(torch.equal, found, wanted)), (world_size, resident)
    assert wanted[0].dtype == torch.uint8


@pytest.mark.parametrize("form", FORMS)
def test_a_balanced_epoch_is_the_same_on_any_geometry(form: str) -> None:
    labels = (np.arange(50) < 3).astype(np.int64)
    wanted = pixels(made(FORMS[form], True), 1, labels)
    for world_size in (2, 3):
        found = pixels(made(FORMS[form], False), world_size, labels)
        assert all(map(torch.equal, found, wanted))
    # Half of the draws are of the three first images, some of them mirrored.
    of = made(FORMS[form], True)
    rare = of.images[of.rows[:3]]
    both = torch.cat((rare, rare.flip(2)))
    seen = [sum(bool((each == one).all()) for each in torch.cat(wanted)) for one in both]
    assert min(seen) > 0
    assert 15 <= sum(seen) <= 35


def test_large_images_are_copied_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above compares a gather with itself."""
    assert made(FORMS["96 x 80 x 3"], False, shift=2).large
    assert not made(FORMS["96 x 80 x 3"], True, shift=2).large
    assert not made(FORMS["32 x 32 x 3"], False, shift=2).large
    small = pixels(made(FORMS["48 x 64 x 1"], False, shift=2), 1)
    monkeypatch.setattr(shares, "LARGE", 1)
    assert all(map(torch.equal, small, pixels(made(FORMS["48 x 64 x 1"], False, shift=2), 1)))


class Copies(TorchFunctionMode):
    """Counts copies to another device that wait for it, also those of what indexes a tensor."""

    blocking = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func is torch.Tensor.to and found.device != args[0].device:
            self.blocking += not kwargs.get("non_blocking")
        if func is torch.Tensor.copy_ and args[0].device != args[1].device:
            self.blocking += not kwargs.get("non_blocking")
        # From a list.
        if func is torch.tensor:
            self.blocking += found.device.type != "cpu"
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = [each.device for each in index if isinstance(each, torch.Tensor)]
            self.blocking += any(place != args[0].device for place in places)
        return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_no_step_copies_to_the_device_and_waits(form: str, way: str) -> None:
    """A GPU would compute all before first. torch's device without data stands for it.

    Only torchvision does so, for the matrix of each image that it rotates, shears or moves.
    """
    of = made(FORMS[form], False, **WAYS[way])
    of.device = torch.device("meta")
    of.colour = of.colour.to("meta")
    plan = batches.epoch_plan(len(of.rows), 3, 1, of.how, of.place)
    with Copies() as copies:
        mixes = [batches.mix_of(3, 1, step, of.how) for step in range(5)]
        steps = of.of_epoch(plan, plan.order.split(batches.batch_sizes(len(of.rows), 12)), mixes)
        next(steps)
        before = copies.blocking
        assert sum(1 for _ in steps) == 4
    assert before > 0
    assert (copies.blocking > before) == (way == "trivially augmented")


@pytest.mark.parametrize(
    "way", [{}, {"mixup": 0.8, "class_weights": "balanced"}, {"sampling": "balanced"}]
)
def test_no_step_of_a_training_copies_to_the_device_and_waits(
    monkeypatch: pytest.MonkeyPatch, digits: Path, way: dict[str, object]
) -> None:
    """With weights of the images; what computes on the device is left out."""
    training, there = in_this_process(digits, epochs=1, **way), torch.device("meta")
    training.shares.device = there
    training.shares.colour = training.shares.colour.to(there)
    training.labels = training.labels.to(there)
    classes = training.weights.classes
    of_images = torch.ones(len(training.labels), device=there)
    training.weights = Weights(None if classes is None else classes.to(there), of_images)
    training.totals = training.totals.to(there)
    found = []

    def step(*_arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        found.append(copies.blocking)
        return torch.zeros(2, device=there), torch.zeros((), device=there)

    monkeypatch.setattr(training.stepper, "step", step)
    verdict = SimpleNamespace(verdict=lambda: Verdict(None, False, None, None))
    monkeypatch.setattr(loop, "Vote", lambda *_arguments: verdict)
    nothing = SimpleNamespace(reason=None, due=False, update=lambda: None)
    with Copies() as copies:
        training.train_epoch(nothing, nothing, nothing)
    assert len(found) == len(training.sizes)
    assert found[0] > 0
    assert set(found) == {found[0]}


def test_float_images_keep_their_values() -> None:
    images = np.random.default_rng(0).normal(size=(9, 20, 24, 2)).astype(np.float32)
    of = Shares(images, np.arange(9), Augmentation((20, 24), (20, 24)), CPU, False)
    plan = batches.epoch_plan(9, 3, 1, of.how)
    (found,) = pixels(of, 1)[:1]
    assert torch.equal(found, torch.from_numpy(images)[plan.order[: len(found)]])


def test_an_epoch_can_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "LARGE", 1)
    of = made(FORMS["32 x 32 x 3"], False)
    plan = batches.epoch_plan(50, 0, 1, of.how)
    steps = of.of_epoch(plan, plan.order.split(2))
    next(steps)
    steps.close()


@pytest.mark.parametrize("n", [1, 7, 100, 1001])
@pytest.mark.parametrize("block", [1, 8, 64])
def test_an_order_of_blocks_has_every_image_once_and_reads_neighbours(n: int, block: int) -> None:
    order = batches.block_order(n, block, np.random.default_rng(0))
    assert sorted(order) == list(range(n))
    for group in range(0, n, block * batches.MIXED_BLOCKS):
        some = np.sort(order[group : group + block * batches.MIXED_BLOCKS])
        # About as many pieces as blocks: blocks differ by an image, and groups end within one.
        assert (np.diff(some) > 1).sum() <= 4 * batches.MIXED_BLOCKS


@pytest.mark.faults
def test_blocks_from_the_disk_and_from_memory_come_to_the_same_weights(digits, tmp_path) -> None:
    found = []
    for where in ("disk", "memory"):
        complete(tmp_path / where, digits, "--images-in", where, order="blocks", epochs=2)
        found.append(result(tmp_path / where))
    assert found[0] == found[1]


def test_a_box_that_is_the_whole_image_is_the_image() -> None:
    images = torch.randint(0, 256, (4, 13, 17, 3), dtype=torch.uint8)
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(4, 1)
    assert torch.equal(batches.resized_boxes(images, whole, (13, 17)), images)
    left = torch.tensor([[0.0, 0.0, 1.0, 0.5]]).repeat(4, 1)
    halves = batches.resized_boxes(images[:, :, :16], left, (13, 8))
    assert torch.equal(halves, images[:, :, :8])


def test_boxes_are_inside_and_as_large_as_asked() -> None:
    how = Augmentation((60, 80), (60, 80), area=0.5)
    plan = batches.epoch_plan(2000, 0, 1, how)
    assert plan.boxes is not None
    top, left, high, wide = plan.boxes.double().unbind(1)
    assert min(top.min(), left.min()) >= 0
    assert max((top + high).max(), (left + wide).max()) <= 1 + 1e-6
    assert (high * wide).min() > 0.5 * 0.75
    assert 0.7 < (high * wide).mean() < 0.8


def test_colours_change_by_at_most_the_share() -> None:
    images = torch.full((3, 4, 4, 3), 100, dtype=torch.uint8)
    one = torch.ones(3, 3)
    assert torch.equal(batches.changed_colours(images, one), images)
    brighter = batches.changed_colours(images, one * torch.tensor([1.3, 1, 1]))
    assert brighter.unique().tolist() == [130]


def test_validation_and_test_see_the_middle() -> None:
    images = torch.arange(36).reshape(1, 6, 6, 1)
    assert batches.centred(images, (2, 4)).flatten().tolist() == [13, 14, 15, 16, 19, 20, 21, 22]
