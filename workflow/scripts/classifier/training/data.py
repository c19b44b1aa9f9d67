"""What a run makes of its data: the augmentation, and what does not fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from classifier.models.classifier import Classifier
from classifier.models.fitting import depends_on_others, made, refuse_unfit_model
from classifier.models.names import Form, is_user_model
from classifier.pixels.batches import Augmentation
from classifier.pixels.trivial_augment import operations
from classifier.training.choosing import freeze, rates
from classifier.training.limits import (
    named_weights,
    refuse_bad_patterns,
    refuse_contradictions,
    refuse_unfit_pixels,
    refuse_unfit_sizes,
    refuse_unknown_classes,
)
from classifier.training.sizes import test_window, window
from manynodes.base.errors import Refusal
from manynodes.data.folder import DataFolder
from manynodes.experiment.config import Run

# Edge from which `crop: auto` resizes random boxes.
PHOTOGRAPH = 96
# What takes images out of the training, and what takes fewer.
FEWER = {"folds": "more folds", "validation_fraction": "a smaller validation_fraction"}


def how(run: Run, data: DataFolder) -> Augmentation:
    """The augmentation of a run's training images."""
    height, width, _ = data.image_shape
    resized = run.crop == "resized" or (run.crop == "auto" and min(height, width) >= PHOTOGRAPH)
    return Augmentation(
        size=(height, width),
        window=window(run, height, width),
        flip=run.flip,
        shift=0 if resized else run.shift,
        area=run.crop_area if resized else None,
        trivial_augment=run.trivial_augment,
        colour=run.colour,
        cutout=run.cutout,
        random_erasing=run.random_erasing,
        mixup=run.mixup,
        cutmix=run.cutmix,
    )


def class_weights(run: Run, labels: np.ndarray, data: DataFolder) -> Tensor | None:
    """The weights of the classes in a run's loss, float32 (classes,); None for none.

    Balanced ones are those of scikit-learn's `compute_class_weight`.

    Args:
        labels: of the training images.

    Raises:
        Refusal: a class is named that the data set has not, or twice.
    """
    if run.class_weights is None:
        return None
    names = data.class_names
    if run.class_weights == "balanced":
        counts = np.bincount(labels, minlength=len(names))
        return torch.from_numpy(len(labels) / (len(names) * counts)).float()
    refuse_unknown_classes(run, data.dataset, names)
    given = named_weights(run)
    return torch.tensor([given.get(name, 1) for name in names], dtype=torch.float32)


def refuse_empty_class(
    run: Run, labels: np.ndarray, data: DataFolder, tell: Callable[[str], None]
) -> None:
    """Refuse to balance classes of which one has no training image, and warn of one otherwise.

    Args:
        labels: of the training images.
        tell: gets the warning.

    Raises:
        Refusal: naming the class.
    """
    empty = np.setdiff1d(np.arange(data.classes), labels)
    if not len(empty):
        return
    held_out_by = [key for key in FEWER if getattr(run, key)]
    line = (
        f"all of {data.class_names[empty[0]]} are held out by {' and '.join(held_out_by)}; use "
        f"{' or '.join(FEWER[each] for each in held_out_by)}"
    )
    for key in ("class_weights", "sampling"):
        if getattr(run, key) == "balanced":
            raise Refusal(f"{key}: balanced needs training images of every class, but {line}")
    tell(f"warning: {len(empty)} of {data.classes} classes have no training images: {line}")


def refuse_unfit_data(run: Run, data: DataFolder) -> None:
    """Refuse a run that contradicts its data.

    Raises:
        Refusal: naming the key to change.
    """
    height, width, channels = data.image_shape
    refuse_bad_patterns(run)
    refuse_contradictions(run)
    refuse_unfit_sizes(run, data.dataset, height, width)
    if run.trivial_augment:
        refuse_unfit_pixels(data.dataset, data.manifest["dtype"], channels)
        operations()  # they need torchvision
    refuse_unfit_network(run, Form(height, width, channels, data.classes))


def refuse_unfit_network(run: Any, form: Form) -> None:
    """Refuse a network that does not take what training or evaluation shows it.

    Args:
        form: of the data set's images and of its classes.

    Raises:
        Refusal: naming the model and the problem.
    """
    for seen in {each(run, form.height, form.width) for each in (window, test_window)}:
        refuse_unfit_model(run, replace(form, height=seen[0], width=seen[1]))
    if run.freeze or run.rates:
        network = untrained(run, form).network
        freeze(run, network)
        rates(run, network)


def tell_dependent(run: Run, data: DataFolder, tell: Callable[[str], None]) -> None:
    """Warn of a network of the user's whose logits depend on the other images of a batch."""
    form = Form(*test_window(run, *data.image_shape[:2]), data.image_shape[2], data.classes)
    if is_user_model(run.model) and depends_on_others(run, form):
        tell(
            f"warning: model: in evaluation, {run.model} gives an image other logits alone than "
            "among others, as with track_running_stats=False: results depend on the batch size"
        )


def untrained(run: Any, form: Form) -> Classifier:
    """The network of a run, without its weights where possible."""
    height, width = window(run, form.height, form.width)
    # As in `refuse_unfit_model`: a user's network may compute with its weights.
    with torch.device("cpu" if is_user_model(run.model) else "meta"):
        return made(run, replace(form, height=height, width=width))
