"""Photographs that are in both splits in another size or quality."""

from collections.abc import Iterator

import numpy as np
from PIL import Image

from manynodes.data.user.writing import ArrayFile

# Small pictures, such as digits, are alike without being the same.
LEAST_SIDE = 64
# Between the darkest and the brightest of the parts that are compared.
LEAST_RANGE = 16
# Of the 64 bits of a fingerprint that are 0, and of those that are 1. A gradient has hardly any of
# one kind, and every other gradient the same ones.
LEAST_BITS = 8
# Pixels of a side, and their mean difference, of two copies of one photograph. Measured on 1,500
# images: at most 1.1 in half the size or at a JPEG's quality of 30; 65 to 86 % of these were found,
# and among 4,000 x 4,000 different ones, none.
SIDE, MOST_DIFFERENCE = 16, 1.5
# Images with one fingerprint that are compared: a series has many.
MOST_CANDIDATES = 8


def fingerprints(pixels: np.ndarray) -> tuple[bytes, ...]:
    """Whether each part of an image is brighter than its neighbour to the left, and above it.

    Copies in another size or quality have at least one of the two in common. This is the difference
    hash of Krawetz (2013).

    Args:
        pixels: uint8 (h, w, c).

    Returns:
        64 bits each; without those that say nothing because the image is small or uniform.
    """
    if min(pixels.shape[:2]) < LEAST_SIDE:
        return ()
    parts = shrunk(pixels, 9)
    if np.ptp(parts) < LEAST_RANGE:
        return ()
    across, down = parts[:8, 1:] > parts[:8, :-1], parts[1:, :8] > parts[:-1, :8]
    return tuple(
        np.packbits(bits).tobytes()
        for bits in (across, down)
        if LEAST_BITS <= bits.sum() <= bits.size - LEAST_BITS
    )


def shrunk(pixels: np.ndarray, side: int) -> np.ndarray:
    """The mean brightness of side x side parts, float32."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).convert("L")
    return np.asarray(image.resize((side, side), Image.Resampling.BOX), np.float32)


def similar_images(train: ArrayFile, test: ArrayFile) -> Iterator[tuple[int, int]]:
    """Test images that are almost one of train, each with one of these; equal ones are not meant.

    Yields:
        The rows of both.
    """
    known: dict[bytes, list[int]] = {}
    for row, found in enumerate(train.fingerprints):
        for one in found:
            # The first ones alone are compared, and a blank picture may be there a million times.
            if len(same := known.setdefault(one, [])) < MOST_CANDIDATES:
                same.append(row)
    for row, found in enumerate(test.fingerprints):
        candidates = {other for one in found for other in known.get(one, [])}
        if not candidates:
            continue
        image = test.read(row)
        others = {other: train.read(other) for other in sorted(candidates)[:MOST_CANDIDATES]}
        if any(np.array_equal(image, other) for other in others.values()):
            continue
        ours = shrunk(image, SIDE)
        for number, other in others.items():
            if np.abs(ours - shrunk(other, SIDE)).mean() <= MOST_DIFFERENCE:
                yield row, number
                break
