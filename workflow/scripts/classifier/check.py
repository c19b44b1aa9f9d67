"""What the workflow asks the classifier before any job: can such a run be trained?"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from classifier.models.names import BUILT_IN_MODELS, Form, is_user_model, refuse_unknown_model
from classifier.training.limits import (
    refuse_bad_patterns,
    refuse_contradictions,
    refuse_unfit_counts,
    refuse_unfit_pixels,
    refuse_unfit_sizes,
    refuse_unknown_classes,
)
from classifier.training.sizes import training_images, validation_images
from classifier.training.splits import split_rows
from manynodes.base.optional import torchvision
from manynodes.data.datasets import DATASETS


def check(
    parameters: Mapping[str, Any], geometry: Mapping[str, Any], dataset: Mapping[str, Any]
) -> None:
    """Refuse a run that cannot be trained. This runs the code of the user's own network.

    Args:
        dataset: its name, and what is known of it, see `experiment.config.facts_of`.

    Raises:
        Refusal: naming the key to change.
    """
    run = SimpleNamespace(**parameters, **geometry)
    refuse_bad_patterns(run)
    refuse_unusable_model(run, dataset)
    refuse_contradictions(run)
    if run.trivial_augment:
        torchvision()
        if dataset.get("channels"):
            refuse_unfit_pixels(dataset["name"], "uint8", dataset["channels"])
    if dataset.get("class_names"):
        refuse_unknown_classes(run, dataset["name"], dataset["class_names"])
    if dataset.get("train_images"):
        n, groups = dataset["train_images"], dataset.get("train_groups")
        counts = training_images(run, n), validation_images(run, n)
        if groups is not None:
            training, held_out = split_rows(run, dataset["train_labels"], groups)
            counts = len(training), len(held_out)
        refuse_unfit_counts(run, dataset["name"], n, counts, groups is not None)
        refuse_unfit_sizes(run, dataset["name"], dataset["height"], dataset["width"])


def refuse_unusable_model(run: Any, dataset: Mapping[str, Any]) -> None:
    """Refuse a network that nobody has, or that does not take what it will be shown."""
    refuse_unknown_model(run.model)
    named = run.freeze or run.rates
    if dataset["name"] in DATASETS and run.model in BUILT_IN_MODELS and not named:
        return
    # Imported here, because torch takes seconds.
    height, width, channels, classes = (
        dataset.get(key) for key in ("height", "width", "channels", "classes")
    )
    if height and width and channels and classes:
        from classifier.training.data import refuse_unfit_network

        refuse_unfit_network(run, Form(height, width, channels, classes))
    elif "classes" in dataset and is_user_model(run.model):
        from classifier.models.fitting import refuse_uncallable

        refuse_uncallable(run.model, run.model_args)
