"""A rank's share of the images of each step, on its device: gathered from mapped arrays ahead of
time, or from the device's memory.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from classifier.pixels.batches import (
    Augmentation,
    Epoch,
    Mix,
    centred,
    changed_colours,
    copy_windows,
    crop,
    cut_out,
    mixed,
    resized_boxes,
)
from classifier.pixels.trivial_augment import trivially_augmented

# From this size of an image on, windows are copied one by one, in threads, while earlier steps are
# computed. For smaller images one gather of all pixels is faster.
LARGE = 16_384  # bytes
# Threads, and steps that are gathered ahead.
THREADS = 4
AHEAD = 4
# Share of a GPU's free memory that images may fill.
RESIDENT = 0.4


def mapped_tensor(images: np.ndarray) -> Tensor:
    """A tensor of a read-only array, without a copy."""
    with warnings.catch_warnings(action="ignore"):  # nobody writes to it
        return torch.from_numpy(images)


class Shares:
    """The training images of one rank.

    Args:
        images: all images of the split, (n, h, w, c), mapped.
        rows: the training images among them, int64 (m,).
        how: their augmentation.
        resident: hold them in the memory of the device.

    Attributes:
        colour: of holes, (c,); set after the images are known.
    """

    def __init__(
        self,
        images: np.ndarray,
        rows: np.ndarray,
        how: Augmentation,
        device: torch.device,
        resident: bool,
    ) -> None:
        self.how, self.device = how, device
        # A plain array of the mapped pages: slicing numpy's memmap takes longer than copying.
        self.mapped = None if resident else np.asarray(images)
        self.images = torch.tensor(images, device=device) if resident else mapped_tensor(images)
        self.rows = torch.from_numpy(rows).to(self.images.device)
        self.large = not resident and images[0].nbytes >= LARGE
        self.colour = torch.zeros(images.shape[3], dtype=self.images.dtype, device=device)

    @property
    def place(self) -> torch.device:
        """Where the images are, and where an epoch's plan must be."""
        return self.images.device

    def take(self, indices: Tensor) -> Tensor:
        """The middle of some training images as the network sees it, on the device."""
        return centred(self.images[self.rows[indices.to(self.place)]], self.how.window).to(
            self.device
        )

    def of_epoch(
        self, plan: Epoch, parts: Iterable[Tensor], mixes: Iterable[Mix | None] = repeat(None)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each step, this rank's part of the batch and its pixels, on the device.

        Args:
            parts: numbers of training images, on `place`.
            mixes: of the steps; the part of a step with one has the image before it too.
        """
        parts = list(parts)
        if not parts:
            return
        # Once per epoch: in a step, such a copy would wait until a GPU has computed all before.
        there = plan.to(self.device)
        parts_there = torch.cat(parts).to(self.device).split([len(part) for part in parts])
        # On the host, which starts the operations: in a step, this copy would wait too.
        chosen: Iterable[Tensor | None] = repeat(None)
        if plan.choices is not None:
            chosen = plan.choices[torch.cat(parts)].cpu().split([len(part) for part in parts])
        gather = partial(self.gathered, plan)
        gathered = ahead(gather, parts) if self.large else map(gather, parts)
        # Of choices and mixes, there may be more: `repeat` has no end.
        steps = zip(parts_there, chosen, mixes, strict=False)
        for (mine, choices, mix), pixels in zip(steps, gathered, strict=True):
            yield mine, self.augmented(pixels, there, mine, choices, mix)

    def gathered(self, plan: Epoch, part: Tensor) -> Tensor:
        """The windows of some images, or of resized crops the images, in the memory where the
        images are.
        """
        rows, how = self.rows[plan.images(part)], self.how
        # Of resized crops the whole images: their boxes are resized on the device.
        resized = how.area is not None
        if not self.large:
            pixels = self.images[rows] if resized else crop(self.images, rows, part, plan, how)
            # From other memory, a copy to a GPU waits for it.
            to_gpu = self.device.type == "cuda" and not pixels.is_cuda
            return pixels.pin_memory() if to_gpu else pixels
        assert self.mapped is not None
        out = torch.empty(
            (len(part), *(how.size if resized else how.window), self.images.shape[3]),
            dtype=self.images.dtype,
            pin_memory=self.device.type == "cuda",
        )
        if resized:
            # With another mode, numpy takes them to memory of its own first.
            np.take(self.mapped, rows.numpy(), axis=0, out=out.numpy(), mode="clip")
        else:
            copy_windows(self.mapped, rows, part, plan, how, out)
        return out

    def augmented(
        self, pixels: Tensor, plan: Epoch, mine: Tensor, choices: Tensor | None, mix: Mix | None
    ) -> Tensor:
        """What remains to be done on the device.

        Args:
            plan: on the device too.
            mine: numbers of training images, int64 (b,), on the device.
            choices: see `Epoch.choices`, (b,), on the host; None without them.
            mix: of the step; then the first image is only mixed in.
        """
        pixels = pixels.to(self.device, non_blocking=True)
        if plan.boxes is not None:
            pixels = resized_boxes(pixels, plan.boxes[mine], self.how.window)
        if self.how.flip and (self.large or plan.boxes is not None):
            flipped = plan.flipped[mine][:, None, None, None]
            pixels = torch.where(flipped, pixels.flip(2), pixels)
        if choices is not None:
            pixels = trivially_augmented(pixels, choices.tolist())
        if plan.colours is not None:
            pixels = changed_colours(pixels, plan.colours[mine])
        if self.how.cutout:
            edge = self.how.cutout
            pixels = cut_out(pixels, plan.top[mine], plan.left[mine], edge, edge, self.colour)
        if plan.holes is not None:
            top, left, height, width = plan.holes[mine].unbind(1)
            pixels = cut_out(pixels, top, left, height, width, self.colour)
        return pixels if mix is None else mixed(pixels, mix)


def ahead(gather: Callable[[Tensor], Tensor], parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """The pixels of each part, gathered in threads while earlier ones are computed with."""
    waiting: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(THREADS, "gather") as threads:
        try:
            for part in parts:
                waiting.append(threads.submit(gather, part))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # The training may stop between two steps.
            threads.shutdown(cancel_futures=True)


def fits(images: np.ndarray, device: torch.device) -> bool:
    """Whether images should be held in the memory of a device.

    On a CPU, the page cache holds what is mapped, once for all ranks of a node.
    """
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return images.nbytes <= RESIDENT * free
