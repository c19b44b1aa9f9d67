"""What a run makes of its data: the augmentation, and what does not fit."""

from ddp.data.batches import Augmentation
from ddp.data.folder import DataFolder
from ddp.experiment.config import Run, edges
from ddp.models.fitting import refuse_unfit_model
from ddp.models.names import Form

# Edge from which `crop: auto` resizes random boxes.
PHOTOGRAPH = 96


def how(run: Run, data: DataFolder) -> Augmentation:
    """The augmentation of a run's training images."""
    height, width, _ = data.image_shape
    window = edges(run.crop_size) or (height, width)
    resized = run.crop == "resized" or (run.crop == "auto" and min(height, width) >= PHOTOGRAPH)
    return Augmentation(
        size=(height, width),
        window=window,
        flip=run.flip,
        shift=0 if resized else run.shift,
        area=run.crop_area if resized else None,
        colour=run.colour,
        cutout=run.cutout,
    )


def refuse_unfit_data(run: Run, data: DataFolder) -> None:
    """Refuse a run that contradicts its data.

    Raises:
        Refusal: naming the key to change.
    """
    height, width, channels = data.image_shape
    train_images = data.manifest["images"]["train"]
    run.refuse_unfit_counts(train_images)
    run.refuse_unfit_sizes(height, width)
    refuse_unfit_network(run, how(run, data).window, channels, data.classes)


def refuse_unfit_network(run: Run, window: tuple[int, int], channels: int, classes: int) -> None:
    """Refuse a network that does not take what training or evaluation shows it.

    Args:
        window: height and width of what it sees in training.

    Raises:
        Refusal: naming the model and the problem.
    """
    for size in {window, edges(run.test_size) or window}:
        form = Form(*size, channels, classes)
        refuse_unfit_model(run.model, run.widths, run.model_args, form)
