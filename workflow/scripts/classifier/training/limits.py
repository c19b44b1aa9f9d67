"""What a run cannot ask of its data and processes; free of torch, because every dry run looks."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from classifier.models.names import AIRBENCH, BUILT_IN_MODELS, LEAST_EDGE
from classifier.training.sizes import edges, test_window, window
from manynodes.base.errors import Refusal, one_line, shown


def refuse_contradictions(run: Any) -> None:
    """Refuse keys that contradict each other.

    Raises:
        Refusal: naming the key to change.
    """
    if run.global_batch_size % run.world_size:
        raise Refusal(
            f"global_batch_size: {run.global_batch_size} does not divide among "
            f"{run.world_size} processes "
            f"({run.nodes} nodes x {run.nproc_per_node}); "
            f"use {max(1, round(run.global_batch_size / run.world_size)) * run.world_size}"
        )
    if run.model_args and run.model in BUILT_IN_MODELS:
        raise Refusal(
            f"model_args: {run.model} takes none; they are for your own model, timm's or "
            "torchvision's"
        )
    if run.sampling == "balanced" and run.class_weights == "balanced":
        raise Refusal(
            "sampling: balanced and class_weights: balanced weight rare classes twice; keep one of "
            "them"
        )
    if run.sampling == "balanced" and run.order == "blocks":
        raise Refusal(
            "sampling: balanced draws images from anywhere, and order: blocks reads neighbours; "
            "keep one of them"
        )
    if run.optimizer == "muon" and run.model not in AIRBENCH:
        raise Refusal(
            f"optimizer: muon knows the filters of {' and '.join(AIRBENCH)}, not those "
            f"of {run.model}; use sgd or adamw"
        )
    if run.fold is not None and not run.folds:
        raise Refusal(f"fold: {run.fold} is one of folds; give their number too, such as folds: 5")
    if run.folds and run.fold not in range(run.folds):
        raise Refusal(f"fold: {run.fold} is not one of {run.folds} folds, 0 to {run.folds - 1}")
    if run.best and not run.validation_fraction:
        raise Refusal(f"best: {run.best} needs validation images; give a validation_fraction")
    if run.patience and not run.best:
        raise Refusal("patience: it waits for a better validation result; give best too")
    if run.compile == "cuda_graphs" and run.world_size > 1:
        raise Refusal(
            "compile: cuda_graphs is for one process: with several, torch has open defects; use "
            "compile: default"
        )
    if run.compile == "cuda_graphs" and run.micro_batches > 1:
        raise Refusal(
            "micro_batches: torch does not sum gradients with compile: cuda_graphs; use compile: "
            "default"
        )
    if run.optimizer == "muon" and run.precision == "fp16":
        raise Refusal(
            "precision: muon cannot skip the steps that the gradient scaler of fp16 "
            "rejects; use bf16, or sgd or adamw"
        )


def refuse_bad_patterns(run: Any) -> None:
    """Refuse what is no regular expression.

    Raises:
        Refusal: naming the key to change.
    """
    for key in ("freeze", "rates"):
        given = getattr(run, key)
        for pattern in [given] if isinstance(given, str) else given or []:
            try:
                re.compile(pattern)
            except re.error as error:
                raise Refusal(f"{key}: {pattern} is no regular expression: {error}") from None


def refuse_unknown_classes(run: Any, dataset: str, names: Sequence[str]) -> None:
    """Refuse weights of classes that a data set has not.

    Args:
        names: of its classes.

    Raises:
        Refusal: naming one.
    """
    if unknown := [name for name in named_weights(run) if name not in names]:
        raise Refusal(
            f"class_weights: {dataset} has no class {unknown[0]}; its classes are "
            f"{one_line(', '.join(names), 100)}"
        )


def named_weights(run: Any) -> dict[str, float]:
    """The weights that a run gives to classes by name, in the form of Unicode that data sets have.

    Raises:
        Refusal: a class has two.
    """
    given = run.class_weights if isinstance(run.class_weights, dict) else {}
    found: dict[str, float] = {}
    for name, weight in given.items():
        composed = unicodedata.normalize("NFC", name)
        if composed in found:
            raise Refusal(
                f"class_weights: {shown(name)} is there in two forms of Unicode; keep one"
            )
        found[composed] = weight
    return found


def refuse_unfit_sizes(run: Any, dataset: str, height: int, width: int) -> None:
    """Refuse a run for which the images of its data set, or what it takes of them, are too small.

    Raises:
        Refusal: naming the key to change.
    """
    for key in ("crop_size", "test_size"):
        size = edges(getattr(run, key)) or (1, 1)
        if size[0] > height or size[1] > width:
            raise Refusal(
                f"{key}: {size[0]} x {size[1]} is larger than the {height} x {width} images of "
                f"{dataset}; use at most that"
            )
    seen = window(run, height, width)
    least = LEAST_EDGE.get(run.model, 1)
    for size in (seen, test_window(run, height, width)):
        if min(size) < least:
            raise Refusal(
                f"model: {run.model} takes images of {least} x {least} pixels or more, not "
                f"{size[0]} x {size[1]}; use a larger crop_size or test_size, or another model"
            )
    if run.cutout > min(seen):
        raise Refusal(
            f"cutout: {run.cutout} is more than the {seen[0]} x {seen[1]} pixels of an "
            "image; use less"
        )


def refuse_unfit_pixels(dataset: str, dtype: str, channels: int) -> None:
    """Refuse images that TrivialAugment does not know.

    Raises:
        Refusal: naming the key to change.
    """
    if dtype != "uint8" or channels not in (1, 3):
        raise Refusal(
            f"trivial_augment: {dataset} has {dtype} images of {channels} channels; it is for "
            "uint8 images of 1 or 3; use trivial_augment: false"
        )


def enough_images(training: int, world_size: int) -> str:
    """A batch of which each process has two images in every step, or what to do without one."""
    if training >= 4 * world_size:
        return f"{4 * world_size} or more"
    # In two steps of fewer images, one has less than two for a process.
    alone = training >= 2 * world_size and training % world_size == 0
    return str(training) if alone else "fewer processes, or more images"


def refuse_unfit_counts(
    run: Any, dataset: str, train_images: int, counts: tuple[int, int], grouped: bool
) -> None:
    """Refuse a run that needs more images than the train split of its data set has.

    Args:
        train_images: of that split.
        counts: of them, those that the run trains on, and those that it validates on.
        grouped: whether these are whole groups.

    Raises:
        Refusal: naming the key to change.
    """
    training, held_out = counts
    if training < 1 or (run.validation_fraction and not held_out):
        raise Refusal(
            f"validation_fraction: {run.validation_fraction} of the {train_images:,} images "
            f"of {dataset}{' in whole groups' * grouped} leaves {held_out} for validation and "
            f"{training} for training; both need one"
        )
    if run.global_batch_size > training:
        raise Refusal(
            f"global_batch_size: {run.global_batch_size} is more than the {training:,} "
            f"training images of {dataset}; use at most that"
        )
    # The smallest share of an epoch's smallest batch, see `batches.batch_sizes`.
    share = training // -(-training // run.global_batch_size) // run.world_size
    if share < 2:
        raise Refusal(
            f"global_batch_size: {run.global_batch_size} on {run.world_size} processes "
            f"leaves a process {share} images in some steps, too few for BatchNorm; use "
            + enough_images(training, run.world_size)
        )
    if share // run.micro_batches < 2:
        raise Refusal(
            f"micro_batches: {run.micro_batches} parts of the {share} images that a process has in "
            f"some steps are too small for BatchNorm; use at most {share // 2}"
        )
