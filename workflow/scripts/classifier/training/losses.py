"""The training losses by name: sums over the images of a share."""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Weights(NamedTuple):
    """The weights of some images in the loss; they are multiplied.

    Attributes:
        classes: of the classes, (classes,); None: all 1.
        images: of the images, (b,), or of mixed images, as their labels, (b, 2); None: all 1.
    """

    classes: Tensor | None = None
    images: Tensor | None = None

    def split(self, parts: int) -> "list[Weights]":
        """Those of equal parts of the images."""
        if self.images is None:
            return [self] * parts
        return [Weights(self.classes, images) for images in self.images.tensor_split(parts)]

    def total(self, losses: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of images, (b,), each times the weights of its label and image."""
        if self.classes is not None:
            losses = losses * self.classes[labels]
        return (losses if self.images is None else losses * self.images).sum()


UNWEIGHTED = Weights()

# Of logits, labels, smoothing and weights.
Loss = Callable[[Tensor, Tensor, float, Weights], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float, weights: Weights) -> Tensor:
    how = "sum" if weights.images is None else "none"
    losses = F.cross_entropy(
        logits, labels, weight=weights.classes, label_smoothing=smoothing, reduction=how
    )
    if weights.images is None:
        return losses
    # torch has weighted by the classes, and the smoothed part of a label by all of them.
    return weights._replace(classes=None).total(losses, labels)


def squared_error(logits: Tensor, labels: Tensor, _smoothing: float, weights: Weights) -> Tensor:
    """Against 1 for the label and 0 for the other classes.

    Source: L. Hui and M. Belkin, "Evaluation of Neural Architectures Trained with Square Loss vs
        Cross-Entropy in Classification Tasks", 2021.
    """
    wanted = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    if weights == UNWEIGHTED:
        return F.mse_loss(logits, wanted, reduction="sum")
    return weights.total(F.mse_loss(logits, wanted, reduction="none").sum(1), labels)


def focal(logits: Tensor, labels: Tensor, _smoothing: float, weights: Weights) -> Tensor:
    """Cross-entropy weighted by (1 - p)^2 of the label.

    Source: T.-Y. Lin et al., "Focal Loss for Dense Object Detection", 2017, with gamma 2.
    """
    log_p = -F.cross_entropy(logits, labels, reduction="none")
    return weights.total(-((1 - log_p.exp()) ** 2 * log_p), labels)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "squared_error": squared_error,
    "focal": focal,
}


def mixed_loss(
    name: str,
    logits: Tensor,
    labels: Tensor,
    smoothing: float,
    weights: Weights,
    kept: float,
) -> Tensor:
    """The sum of the losses of some images, for two labels each if they are mixed. For
    cross-entropy that is the loss for soft labels.

    Args:
        labels: (b,), or of mixed images (b, 2): the own one and the other one's.
        kept: share of the loss for the own label.
    """
    loss = LOSSES[name]
    if labels.ndim == 1:
        return loss(logits, labels, smoothing, weights)
    images = repeat(None) if weights.images is None else weights.images.unbind(1)
    own, other = (
        loss(logits, each, smoothing, weights._replace(images=of_images))
        for each, of_images in zip(labels.unbind(1), images, strict=False)
    )
    return kept * own + (1 - kept) * other


def batch_weights(
    weights: Weights, labels: Tensor, batches: Sequence[Tensor], parts: Sequence[Tensor]
) -> Iterator[Weights]:
    """For each global batch, the weights of this rank's part of it, divided by the mean over the
    whole batch: so the mean of its losses is the weighted mean, as in torch's `CrossEntropyLoss`.

    Args:
        weights: of the classes and of all training images.
        labels: of all training images, on the device of the weights.
        batches: the numbers of their images.
        parts: the numbers of this rank's images in each batch.
    """
    if weights == UNWEIGHTED or not batches:
        yield from repeat(weights, len(batches))
        return
    classes, images = weights

    def there(numbers: Sequence[Tensor]) -> Sequence[Tensor]:
        # Once per epoch: in a step, such a copy would wait until a GPU has computed all before.
        return torch.cat(list(numbers)).to(labels.device).split([len(each) for each in numbers])

    for numbers, part in zip(there(batches), there(parts), strict=True):
        if images is None:
            assert classes is not None
            yield Weights(classes / classes[labels[numbers]].mean())
        else:
            each = images[numbers]
            mean = (each if classes is None else each * classes[labels[numbers]]).mean()
            yield Weights(classes, images[part] / mean)
