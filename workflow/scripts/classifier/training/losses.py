"""The training losses by name: sums over the images of a share."""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional as F

# Of logits, labels, smoothing, and the weights of the classes, (classes,), or None.
Loss = Callable[[Tensor, Tensor, float, Tensor | None], Tensor]


def cross_entropy(
    logits: Tensor, labels: Tensor, smoothing: float, weights: Tensor | None
) -> Tensor:
    return F.cross_entropy(
        logits, labels, weight=weights, label_smoothing=smoothing, reduction="sum"
    )


def squared_error(
    logits: Tensor, labels: Tensor, _smoothing: float, weights: Tensor | None
) -> Tensor:
    """Against 1 for the label and 0 for the other classes.

    Source: L. Hui and M. Belkin, "Evaluation of Neural Architectures Trained with Square Loss vs
        Cross-Entropy in Classification Tasks", 2021.
    """
    wanted = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    if weights is None:
        return F.mse_loss(logits, wanted, reduction="sum")
    return (F.mse_loss(logits, wanted, reduction="none").sum(1) * weights[labels]).sum()


def focal(logits: Tensor, labels: Tensor, _smoothing: float, weights: Tensor | None) -> Tensor:
    """Cross-entropy weighted by (1 - p)^2 of the label.

    Source: T.-Y. Lin et al., "Focal Loss for Dense Object Detection", 2017, with gamma 2.
    """
    log_p = -F.cross_entropy(logits, labels, reduction="none")
    loss = -((1 - log_p.exp()) ** 2 * log_p)
    return (loss if weights is None else loss * weights[labels]).sum()


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
    weights: Tensor | None,
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
    own, other = (loss(logits, each, smoothing, weights) for each in labels.unbind(1))
    return kept * own + (1 - kept) * other


def batch_weights(
    weights: Tensor | None, labels: Tensor, batches: Sequence[Tensor]
) -> Iterator[Tensor | None]:
    """For each global batch, the weights of the classes, divided by their mean over its images: so
    the mean of its losses is the weighted mean, as in torch's `CrossEntropyLoss`.

    Args:
        weights: of the classes, (classes,); None: all 1.
        labels: of all training images, on the device of the weights.
        batches: the numbers of their images.
    """
    if weights is None:
        yield from repeat(None, len(batches))
    elif batches:
        in_order = labels[torch.cat(list(batches)).to(labels.device)]
        for batch in in_order.split([len(each) for each in batches]):
            yield weights / weights[batch].mean()
