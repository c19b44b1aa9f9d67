"""The order and the pixels of each step: a function of (seed, epoch, image), for any number of
processes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from classifier.pixels.trivial_augment import choices


def batch_sizes(n: int, global_batch_size: int) -> list[int]:
    """Sizes of an epoch's global batches: as few as possible, equal to within one image.

    Every image is seen once per epoch, and no small last batch has a noisy gradient.
    """
    return [
        len(part)
        for part in np.array_split(np.empty(n, dtype=np.bool_), -(-n // global_batch_size))
    ]


def share(batch: Tensor, rank: int, world_size: int, before: bool = False) -> Tensor:
    """This rank's part of a global batch; the parts of all ranks, in order, are the batch.

    Args:
        before: begin with the image before the part; before the first image is the last one.
    """
    part = batch.tensor_split(world_size)[rank]
    return torch.cat((share(batch.roll(1), rank, world_size)[:1], part)) if before else part


@dataclass(frozen=True)
class Augmentation:
    """How images are varied in training.

    Attributes:
        size: height and width of the stored images.
        window: height and width of what the network sees.
        flip: mirror each image in every other epoch.
        shift: of the window beyond the image's edge, where the image is mirrored, in pixels.
        area: least share of the image's area in a random resized crop; None: a window of the
            image as it is.
        trivial_augment: one random operation on each image, see `trivial_augment.py`.
        colour: largest change of brightness, contrast and saturation, as a share.
        cutout: edge of a hole in the mean colour, in pixels.
        random_erasing: probability of a hole of random size and shape in the mean colour.
        mixup, cutmix: alpha of the mixtures of a step's images; 0 is off.
    """

    size: tuple[int, int]
    window: tuple[int, int]
    flip: bool = False
    shift: int = 0
    area: float | None = None
    trivial_augment: bool = False
    colour: float = 0.0
    cutout: int = 0
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0


class Epoch(NamedTuple):
    """The order and augmentation of an epoch's images, on the device of the images.

    With `sampling: balanced`, image i is draw i of the epoch.

    Attributes:
        order: order of the n images, int64 (n,).
        flipped: whether image i is mirrored, bool (n,).
        down, right: start of image i's window in the image with its mirrored border, int64 (n,).
        top, left: start of the hole in image i's window, int64 (n,), 0 .. window - cutout.
        boxes: of random resized crops: top, left, height and width as shares of the image, float32
            (n, 4); None without them.
        colours: factors of image i's brightness, contrast and saturation, float32 (n, 3); None
            without them.
        choices: of the operation of TrivialAugment on image i, int64 (n,); None without them.
        holes: of random erasing in image i's window: top, left, height and width, int64 (n, 4);
            None without them.
        drawn: the training image of draw i, int64 (n,); None: each image once.
    """

    order: Tensor
    flipped: Tensor
    down: Tensor
    right: Tensor
    top: Tensor
    left: Tensor
    boxes: Tensor | None = None
    colours: Tensor | None = None
    choices: Tensor | None = None
    holes: Tensor | None = None
    drawn: Tensor | None = None

    def images(self, part: Tensor) -> Tensor:
        """The numbers of some images among the training images."""
        return part if self.drawn is None else self.drawn[part]

    def to(self, device: torch.device) -> "Epoch":
        return Epoch._make(None if each is None else each.to(device) for each in self)


def epoch_plan(
    n: int,
    seed: int,
    epoch: int,
    how: Augmentation,
    device: torch.device | str = "cpu",
    block: int | None = None,
    labels: np.ndarray | None = None,
) -> Epoch:
    """Order and augmentation of the n images in an epoch.

    Mirroring alternates from epoch to epoch, after a random start per image, which varies less than
    a random choice in every epoch. Source: K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single
    GPU", 2024, section 3.6.

    Args:
        block: images of a block that is read in one piece, see `block_order`; None: any order.
        labels: of the images, (n,), to draw each class with equal chance; None: each image once.
    """

    def random(number: int) -> np.random.Generator:
        return np.random.default_rng((seed, epoch, number))

    each_epoch = np.random.default_rng((seed, epoch))
    order = block_order(n, block, each_epoch) if block else each_epoch.permutation(n)
    down, right = (
        each_epoch.integers(0, 2 * how.shift + size - window + 1, size=n)
        for size, window in zip(how.size, how.window, strict=True)
    )
    top, left = (
        each_epoch.integers(0, max(0, window - how.cutout) + 1, size=n) for window in how.window
    )
    coin = np.random.default_rng(seed).integers(0, 2, size=n)
    flipped = (coin + epoch) % 2 == 1 if how.flip else np.zeros(n, dtype=np.bool_)
    boxes = random_boxes(n, how, random(1)) if how.area else None
    colours = None
    if how.colour:
        drawn = random(2).uniform(-how.colour, how.colour, (n, 3))
        colours = (1 + drawn).astype(np.float32)
    chosen = choices(n, random(6)) if how.trivial_augment else None
    holes = random_holes(n, how, random(5)) if how.random_erasing else None
    draws = None if labels is None else balanced_draws(labels, random(3))
    arrays = (order, flipped, down, right, top, left, boxes, colours, chosen, holes, draws)
    return Epoch._make(
        None if array is None else torch.from_numpy(array).to(device) for array in arrays
    )


@dataclass(frozen=True)
class Mix:
    """How the images of a step are mixed, each with the one before it.

    Attributes:
        kept: share of each image that stays, and of the loss for its label.
        box: rows and columns that become the other image's (CutMix); None: all pixels are mixed
            (MixUp).
    """

    kept: float
    box: tuple[slice, slice] | None = None


def mix_of(seed: int, epoch: int, step: int, how: Augmentation) -> Mix | None:
    """The mixture of a step; None if its images are not mixed.

    Source: torchvision.transforms.v2.MixUp and CutMix, and RandomChoice of both.
    """
    if not (how.mixup or how.cutmix):
        return None
    random = np.random.default_rng((seed, epoch, 4, step))
    cut = not how.mixup or (how.cutmix > 0 and random.random() < 0.5)
    alpha = how.cutmix if cut else how.mixup
    kept = random.beta(alpha, alpha)
    return cut_mix(kept, random.integers(how.window).tolist(), how.window) if cut else Mix(kept)


def cut_mix(kept: float, centre: Sequence[int], size: tuple[int, int]) -> Mix:
    """The box about a centre that leaves this share of an image, without what is beyond its edges.

    Args:
        centre, size: down and right, in pixels.
    """
    half = 0.5 * math.sqrt(1 - kept)
    rows, columns = (
        slice(max(0, middle - int(half * edge)), min(edge, middle + int(half * edge)))
        for middle, edge in zip(centre, size, strict=True)
    )
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return Mix(1 - area / math.prod(size), (rows, columns))


# Blocks whose images are mixed with each other.
MIXED_BLOCKS = 8


def block_order(n: int, block: int, random: np.random.Generator) -> np.ndarray:
    """An order of n images in which a disk reads whole blocks of neighbours: the blocks in random
    order, and the images of every few of them mixed.
    """
    blocks = np.array_split(np.arange(n), max(1, -(-n // block)))
    shuffled = random.permutation(len(blocks))
    return np.concatenate(
        [
            random.permutation(np.concatenate([blocks[number] for number in group]))
            for group in np.split(shuffled, range(MIXED_BLOCKS, len(blocks), MIXED_BLOCKS))
        ]
    )


def balanced_draws(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """As many images as there are labels, drawn with replacement, of each class with equal chance:
    int64 (n,).
    """
    by_class = np.argsort(labels, kind="stable")
    _, first, count = np.unique(labels[by_class], return_index=True, return_counts=True)
    classes = random.integers(0, len(count), len(labels))
    return by_class[first[classes] + random.integers(0, count[classes])]


def random_boxes(n: int, how: Augmentation, random: np.random.Generator) -> np.ndarray:
    """Boxes of random area and of aspect ratio 3:4 to 4:3, as shares of the image: float32 (n, 4).
    A side that is longer than the image's is cut.

    Source: C. Szegedy et al., "Going Deeper with Convolutions", 2015, section 6.
    """
    height, width = how.size
    area = random.uniform(how.area or 1, 1, n) * height * width
    ratio = np.exp(random.uniform(math.log(3 / 4), math.log(4 / 3), n))
    high = np.minimum(np.sqrt(area / ratio), height) / height
    wide = np.minimum(np.sqrt(area * ratio), width) / width
    top, left = random.uniform(size=(2, n)) * (1 - np.stack((high, wide)))
    return np.stack((top, left, high, wide), axis=1).astype(np.float32)


def random_holes(n: int, how: Augmentation, random: np.random.Generator) -> np.ndarray:
    """Holes of random erasing: top, left, height and width, int64 (n, 4); 0 x 0 for no hole.

    Source: torchvision.transforms.v2.RandomErasing, which draws a hole that does not fit again, up
        to ten times in all.
    """
    edges = np.zeros((n, 2), dtype=np.int64)
    left = np.flatnonzero(random.random(n) < how.random_erasing)
    for _ in range(10):
        area = random.uniform(0.02, 0.33, len(left))
        ratio = np.exp(random.uniform(math.log(0.3), math.log(3.3), len(left)))
        drawn = hole_edges(area, ratio, how.window)
        fits = (drawn < how.window).all(1)
        edges[left[fits]] = drawn[fits]
        left = left[~fits]
    return np.concatenate((random.integers(0, how.window - edges + 1), edges), axis=1)


def hole_edges(area: np.ndarray, ratio: np.ndarray, window: tuple[int, int]) -> np.ndarray:
    """Height and width, int64 (n, 2), of holes of these shares of a window, (n,), and these ratios
    of height to width, (n,).
    """
    pixels = area * math.prod(window)
    return np.rint(np.sqrt((pixels * ratio, pixels / ratio))).astype(np.int64).T


@cache
def mirrored(size: int, border: int, device: torch.device | str = "cpu") -> Tensor:
    """For each row of an image with a mirrored border, the row of the image: int64
    (size + 2 border,), made once.
    """
    reach = torch.arange(-border, size + border, device=device).abs()
    if size == 1:
        return torch.zeros_like(reach)
    reach = reach % (2 * (size - 1))
    return torch.where(reach < size, reach, 2 * (size - 1) - reach)


def pad(images: Tensor, border: int) -> Tensor:
    """Images (n, h, w, c) with a mirrored border: (n, h + 2 border, w + 2 border, c)."""
    height, width = images.shape[1:3]
    return images[:, mirrored(height, border, images.device)][
        :, :, mirrored(width, border, images.device)
    ]


def centred(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle of images (n, h, w, c), of the given height and width."""
    top, left = ((images.shape[1 + axis] - size[axis]) // 2 for axis in (0, 1))
    return images[:, top : top + size[0], left : left + size[1]]


# Values of the images that are evaluated at once: 500 images of 32 x 32 x 3. A GPU would wait for
# the start of each operation on so few.
PASS = 500 * 32 * 32 * 3
PASS_ON_GPU = 8 * PASS


def images_per_pass(images: Tensor | np.ndarray, device: str) -> int:
    """How many images are evaluated at once: a function of their size and the type of the device
    alone, so that each image meets the same arithmetic on any number of processes.
    """
    values = PASS if device == "cpu" else PASS_ON_GPU
    return max(8, values // math.prod(images.shape[1:]))


class Examples(NamedTuple):
    """The images that a network is validated or tested on, and their labels.

    Attributes:
        images: of the whole split, (n, h, w, c), in any memory.
        rows: of these images among them, int64 (m,), on the device of the images.
        labels: of these images, (m,), on the device of this process.
    """

    images: Tensor
    rows: Tensor
    labels: Tensor

    def passes(
        self, count: int, size: tuple[int, int], rank: int, world_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The numbers and the middle of at most so many images at once, on the device of this
        process, which shares these parts with the others.

        Args:
            size: height and width of the middle.
        """
        numbers = torch.arange(len(self.rows), device=self.rows.device)
        for part in numbers.split(count)[rank::world_size]:
            pixels = centred(self.images[self.rows[part]], size)
            yield part.to(self.labels.device), pixels.to(self.labels.device)


def crop(images: Tensor, rows: Tensor, indices: Tensor, plan: Epoch, how: Augmentation) -> Tensor:
    """The windows of some images, shifted and mirrored in one gather, on any device.

    Args:
        images: all stored images (n, h, w, c).
        rows: where images `indices` are stored, int64 (b,).
        indices: the images to crop, int64 (b,); the plan counts only training images.

    Returns:
        (b, *window, c).
    """
    height, width = (torch.arange(window, device=images.device) for window in how.window)
    down = mirrored(how.size[0], how.shift, images.device)[plan.down[indices, None] + height]
    right = mirrored(how.size[1], how.shift, images.device)[
        plan.right[indices, None]
        + torch.where(plan.flipped[indices, None], how.window[1] - 1 - width, width)
    ]
    return images[rows[:, None, None], down[:, :, None], right[:, None, :]]


def copy_windows(
    images: np.ndarray, rows: Tensor, indices: Tensor, plan: Epoch, how: Augmentation, out: Tensor
) -> None:
    """The windows of some images, not mirrored, copied one by one: faster than `crop` for large
    images, whose rows are contiguous.

    Args:
        out: (b, *window, c), to be filled.
    """
    (height, width), target = how.window, out.numpy()
    borders = [mirrored(size, how.shift).numpy() for size in how.size]
    # Lists, because taking a number out of a tensor takes longer than copying an image.
    places = zip(
        rows.tolist(), plan.down[indices].tolist(), plan.right[indices].tolist(), strict=True
    )
    for place, (row, down, right) in enumerate(places):
        top, left = down - how.shift, right - how.shift
        if 0 <= top <= how.size[0] - height and 0 <= left <= how.size[1] - width:
            target[place] = images[row, top : top + height, left : left + width]
        else:
            beyond = borders[0][down : down + height], borders[1][right : right + width]
            target[place] = images[row][beyond[0]][:, beyond[1]]


def resized_boxes(images: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Boxes of images, resized (bilinear): one per image.

    Args:
        images: (b, h, w, c).
        boxes: see `Epoch.boxes`, (b, 4).

    Returns:
        (b, *size, c), of the type of the images.
    """
    axes = [
        # -1 and 1 are the image's edges; a pixel is sampled at its centre.
        2 * (boxes[:, start, None] + boxes[:, start + 2, None] * centres) - 1
        for start, centres in (
            (axis, (torch.arange(size[axis], device=images.device) + 0.5) / size[axis])
            for axis in (0, 1)
        )
    ]
    grid = torch.stack(
        (
            axes[1][:, None, :].expand(-1, size[0], -1),
            axes[0][:, :, None].expand(-1, -1, size[1]),
        ),
        dim=3,
    )
    found = functional.grid_sample(
        images.permute(0, 3, 1, 2).to(torch.float32),
        grid,
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    ).permute(0, 2, 3, 1)
    # Networks are a fifth slower on images that are not stored by pixels (measured).
    return levels(found, images).contiguous()


def changed_colours(images: Tensor, factors: Tensor) -> Tensor:
    """Images (b, h, w, c) with their brightness, contrast and, if they are RGB, saturation
    multiplied by factors, (b, 3).
    """
    brightness, contrast, saturation = factors.to(torch.float32)[:, :, None, None, None].unbind(1)
    pixels = images.to(torch.float32) * brightness
    # In double precision, so that the number of images in a batch cannot change the mean.
    mean = pixels.double().mean(dim=(1, 2, 3), keepdim=True).to(torch.float32)
    pixels = mean + (pixels - mean) * contrast
    if images.shape[3] == 3:
        # ITU-R 601
        red, green, blue = pixels.unbind(3)
        grey = (0.299 * red + 0.587 * green + 0.114 * blue)[..., None]
        pixels = grey + (pixels - grey) * saturation
    return levels(pixels, images)


def levels(pixels: Tensor, like: Tensor) -> Tensor:
    """Pixels in the type of these images: rounded to whole levels if they are uint8."""
    return pixels.round().clamp(0, 255).to(torch.uint8) if like.dtype == torch.uint8 else pixels


def mixed(pixels: Tensor, mix: Mix) -> Tensor:
    """Images, each mixed with the one before it.

    Args:
        pixels: (b + 1, h, w, c); the first is only mixed in.

    Returns:
        (b, h, w, c), of the type of the pixels.
    """
    own, other = pixels[1:], pixels[:-1]
    if mix.box is None:
        other = other.to(torch.float32) * (1 - mix.kept)
        return levels(other + own.to(torch.float32) * mix.kept, pixels)
    own = own.clone()
    own[:, *mix.box] = other[:, *mix.box]
    return own


def mixed_labels(labels: Tensor) -> Tensor:
    """For `mixed` images the own label and that of the image before, (b, 2).

    Args:
        labels: (b + 1,), as the pixels.
    """
    return torch.stack((labels[1:], labels[:-1]), dim=1)


def cut_out(
    pixels: Tensor,
    top: Tensor,
    left: Tensor,
    height: Tensor | int,
    width: Tensor | int,
    colour: Tensor,
) -> Tensor:
    """Images, each with a hole in one colour.

    Args:
        pixels: (b, h, w, c).
        top, left, height, width: of the holes, (b,).
        colour: (c,), of the type of the pixels.
    """
    in_rows, in_columns = (
        (pixel >= start[:, None]) & (pixel < (start + length)[:, None])
        for start, length, pixel in (
            (top, height, torch.arange(pixels.shape[1], device=pixels.device)),
            (left, width, torch.arange(pixels.shape[2], device=pixels.device)),
        )
    )
    return torch.where((in_rows[:, :, None] & in_columns[:, None, :])[..., None], colour, pixels)
