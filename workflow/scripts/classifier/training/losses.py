"""The training losses by name: sums over the images of a share."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, float], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")


def squared_error(logits: Tensor, labels: Tensor, _smoothing: float) -> Tensor:
    """Against 1 for the label and 0 for the other classes.

    Source: L. Hui and M. Belkin, "Evaluation of Neural Architectures Trained with Square Loss vs
        Cross-Entropy in Classification Tasks", 2021.
    """
    wanted = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return F.mse_loss(logits, wanted, reduction="sum")


def focal(logits: Tensor, labels: Tensor, _smoothing: float) -> Tensor:
    """Cross-entropy weighted by (1 - p)^2 of the label.

    Source: T.-Y. Lin et al., "Focal Loss for Dense Object Detection", 2017, with gamma 2.
    """
    log_p = -F.cross_entropy(logits, labels, reduction="none")
    return -((1 - log_p.exp()) ** 2 * log_p).sum()


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "squared_error": squared_error,
    "focal": focal,
}
