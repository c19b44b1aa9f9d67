"""Small data sets of the user's own, as files: shapes that a small network can tell apart."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("circle", "cross", "stripes")


def picture(label: int, number: int, height: int, width: int) -> np.ndarray:
    """A grey image of a class, uint8 (h, w); every number gives another one."""
    random = np.random.default_rng((label, number))
    y, x = np.mgrid[:height, :width]
    cy, cx = random.uniform(0.35, 0.65, 2) * (height, width)
    r = random.uniform(0.2, 0.3) * min(height, width)
    if label == 0:
        shape = abs(np.hypot(y - cy, x - cx) - r) < 2.5
    elif label == 1:
        shape = (abs(y - cy) < 2.5) | (abs(x - cx) < 2.5)
    else:
        shape = (y + x + number) % 8 < 4
    level = random.uniform(100, 200)
    return (shape * level + random.uniform(0, 50, (height, width))).astype(np.uint8)


def write_folder(
    root: Path, train: int = 40, test: int = 10, size: tuple[int, int] = (48, 64)
) -> Path:
    """`train/<class>/*.png` and `test/<class>/*.png`, so many images per class."""
    for split, count, first in (("train", train, 0), ("test", test, 10_000)):
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(picture(label, first + number, *size))
                image.save(folder / f"{number:03}.png")
    return root


def arrays(train: int = 40, test: int = 10, size: tuple[int, int] = (48, 64)) -> dict:
    """The same as arrays."""
    found = {}
    for split, count, first in (("train", train, 0), ("test", test, 10_000)):
        labels = np.repeat(np.arange(len(CLASSES)), count)
        images = [
            picture(label, first + number, *size)
            for label in range(len(CLASSES))
            for number in range(count)
        ]
        found |= {f"{split}_images": np.stack(images), f"{split}_labels": labels}
    return found
