"""How many images a run trains and validates on, and of which size; free of torch."""

from collections.abc import Sequence
from typing import Any


def edges(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    """Height and width, from one or two numbers."""
    if size is None:
        return None
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def window(run: Any, height: int, width: int) -> tuple[int, int]:
    """Height and width of what the network sees in training, of images of this size."""
    return edges(run.crop_size) or (height, width)


def test_window(run: Any, height: int, width: int) -> tuple[int, int]:
    """The same in validation and test, where it is the middle of an image."""
    return edges(run.test_size) or window(run, height, width)


def test_fold(run: Any, train_images: int) -> int:
    """Number of training images that the run is tested on, of so many in the data set."""
    return len(range(run.fold, train_images, run.folds)) if run.folds else 0


def validation_images(run: Any, train_images: int) -> int:
    """Number of training images held out for validation, of so many in the data set."""
    return round(run.validation_fraction * (train_images - test_fold(run, train_images)))


def training_images(run: Any, train_images: int) -> int:
    """Number of images of an epoch, of so many in the data set."""
    rest = train_images - test_fold(run, train_images)
    return rest - validation_images(run, train_images)
