"""What the workflow asks the classifier before any job: can such a run be trained?"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
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
from classifier.training.sizes import training_images, validation_images, window
from classifier.training.splits import split_rows
from manynodes.base.optional import torchvision
from manynodes.data.datasets import DATASETS

# Widths up to which our own networks have at most 15 million parameters.
SMALL = 512


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
    if form := form_of(dataset):
        from classifier.training.data import refuse_unfit_network

        refuse_unfit_network(run, form)
    elif "classes" in dataset and is_user_model(run.model):
        from classifier.models.fitting import refuse_uncallable

        refuse_uncallable(run.model, run.model_args)


def refuse_unfit_weights(run: Any, dataset: Mapping[str, Any]) -> None:
    """Refuse weights to start from that are of another network. A training finds that out when it
    reads them, and for images that are not known yet it must; this is for the time before any job.

    Args:
        dataset: as of `check`.

    Raises:
        Refusal: naming the file.
    """
    if run.initial_weights and (form := form_of(dataset)):
        from classifier.models import weights
        from classifier.training.data import untrained

        path = Path(run.initial_weights)
        weights.refuse_unfit_weights(weights.shapes_in(path), path, untrained(run, form))


def parameters(run: Any, dataset: Mapping[str, Any]) -> int:
    """How many parameters the network of a run has; 0 for a small one, which is not counted, and
    for images that are not known yet.

    Args:
        dataset: as of `check`.

    Raises:
        Refusal: as `check`.
    """
    form = form_of(dataset)
    if not form or (run.model in BUILT_IN_MODELS and max(run.widths) <= SMALL):
        return 0
    from classifier.models.fitting import refuse_unfit_model

    height, width = window(run, form.height, form.width)
    seen = replace(form, height=height, width=width)
    return refuse_unfit_model(run, seen)


def form_of(dataset: Mapping[str, Any]) -> Form | None:
    """The form of a data set's images and logits; None if it is not known yet."""
    values = [dataset.get(key) for key in ("height", "width", "channels", "classes")]
    return Form(*map(int, filter(None, values))) if all(values) else None
