"""Predictions from one or several views of each image (test-time augmentation)."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from classifier.evaluation.metrics import MOST_CLASSES, Predicted
from classifier.models.classifier import Classifier
from classifier.pixels.batches import Examples, pad
from manynodes.ranks.process_group import Process


@torch.no_grad()
def predict(
    classifier: Classifier, tested: Examples, batch_size: int, views: str, process: Process
) -> dict[str, list[Tensor]]:
    """This process's share of the predictions, with one view and with the requested views.

    Returns:
        By views, tensors over its images, on the CPU: index among the test images, then the fields
        of `Predicted`.
    """
    classifier.eval()
    size = classifier.description.get("test_size", tested.images.shape[1:3])
    chunks = tested.passes(batch_size, size, process.rank, process.world_size)
    found: dict[str, list[tuple[Tensor, ...]]] = {"plain": [], views: []}
    for chunk, pixels in chunks:
        for name, logits in predict_with_views(classifier, pixels, views).items():
            logits, true = logits.double(), tested.labels[chunk].long()
            probabilities = logits.softmax(1)
            confidence, predicted = probabilities.max(1)
            loss = F.cross_entropy(logits, true, reduction="none")
            of_true = probabilities.gather(1, true[:, None])[:, 0]
            ahead = ranked_ahead(logits, true)
            every_class = probabilities[
                :, : logits.shape[1] if logits.shape[1] <= MOST_CLASSES else 0
            ]
            found[name].append((chunk, predicted, confidence, loss, of_true, ahead, every_class))
    return {
        name: [torch.cat(column).cpu() for column in zip(*parts, strict=True)]
        for name, parts in found.items()
    }


def ranked_ahead(logits: Tensor, true: Tensor) -> Tensor:
    """How many classes come before the true one, (n,); of equal ones the first does, as it is the
    predicted one. Otherwise every class of a network that tells none apart would be in the top 5.

    Args:
        logits: (n, classes).
        true: true classes, (n,).
    """
    own = logits.gather(1, true[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < true[:, None]
    return ((logits > own) | (logits == own) & earlier).sum(1)


def predict_with_views(
    classifier: Classifier | Callable[[Tensor], Tensor], images: Tensor, views: str
) -> dict[str, Tensor]:
    """Logits from one view of each image, as `plain`, and their mean over the views, in which the
    shifted ones count a half together.

    Args:
        images: (b, h, w, c).
        views: `plain`; `flip`, with the mirror image; `flip_shift`, with two shifts of both too.

    Returns:
        Logits (b, classes) by views.

    Source: K. Jordan, cifar10-airbench, 2024, where `flip_shift` is `tta_level` 2.
    """
    plain = classifier(images)
    if views == "plain":
        return {"plain": plain}
    flipped = (plain + classifier(images.flip(2))) / 2
    if views == "flip":
        return {"plain": plain, "flip": flipped}
    height, width = images.shape[1:3]
    padded = pad(images, 1)
    up, down = (
        (classifier(part) + classifier(part.flip(2))) / 2
        for part in (padded[:, :height, :width], padded[:, 2:, 2:])
    )
    return {"plain": plain, "flip_shift": flipped / 2 + (up + down) / 4}


def in_order(parts: Sequence[Sequence[Tensor]], n: int) -> Predicted:
    """The predictions of all processes in the order of the test set."""
    indices, *columns = (
        torch.cat(column).numpy() for column in zip(*(part for part in parts if part), strict=True)
    )
    order = np.argsort(indices)
    if not np.array_equal(indices[order], np.arange(n)):
        raise AssertionError(f"{len(indices)} predictions for {n} images")
    return Predicted(*(column[order] for column in columns))
