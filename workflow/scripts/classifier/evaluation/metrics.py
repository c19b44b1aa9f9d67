"""From one prediction per image to the numbers of evaluation.json. Only numpy, so they are equal
everywhere.
"""

from typing import Any, NamedTuple

import numpy as np

CALIBRATION_BINS = 15
# Up to so many, the probability of every class is kept; with more, the top 5 are counted.
MOST_CLASSES = 20


class Predicted(NamedTuple):
    """Predictions of n images.

    Attributes:
        classes: those with the highest probability, int (n,).
        confidence: that probability, float (n,).
        loss: cross-entropy, float (n,), in nats.
        of_true: the probability of the true class, float (n,).
        ahead: how many classes come before the true one, int (n,): the more probable ones, and of
            equal ones the first.
        probabilities: of every class, float (n, classes); (n, 0) of more than MOST_CLASSES.
    """

    classes: np.ndarray
    confidence: np.ndarray
    loss: np.ndarray
    of_true: np.ndarray
    ahead: np.ndarray
    probabilities: np.ndarray


def summarise(labels: np.ndarray, predicted: Predicted, classes: int) -> dict[str, Any]:
    """Metrics over n images, each counted once.

    Args:
        labels: true classes, int (n,).
        classes: number of classes.

    Returns:
        n; loss (mean); accuracy; per_class_accuracy (classes,), null for a class without images;
        confusion_matrix (classes, classes), true class by row; expected_calibration_error with 15
        bins of equal width (Guo et al., "On Calibration of Modern Neural Networks", 2017). With
        more than MOST_CLASSES, top5_accuracy; of two classes, roc_auc and average_precision
        (classes,), of each by its own odds.
    """
    confusion = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(confusion, (labels, predicted.classes), 1)
    per_class = confusion.sum(axis=1)
    correct, confidence = labels == predicted.classes, predicted.confidence.astype(float)
    more: dict[str, Any] = {}
    if classes > MOST_CLASSES:
        more["top5_accuracy"] = float((predicted.ahead < 5).mean())
    if classes == 2 and per_class.all():
        score = log_odds(predicted.probabilities)
        ranked = [ranking(labels == 0, -score), ranking(labels == 1, score)]
        # The area is the same for both classes, the average precision is not.
        more |= {"roc_auc": ranked[1][0], "average_precision": [each[1] for each in ranked]}
    return {
        "n": len(labels),
        "loss": float(predicted.loss.astype(np.float64).mean()),
        "accuracy": float(correct.mean()),
        "per_class_accuracy": [
            float(confusion[c, c] / per_class[c]) if per_class[c] else None for c in range(classes)
        ],
        "confusion_matrix": confusion.tolist(),
        "expected_calibration_error": calibration_error(correct, confidence),
    } | more  # fmt: skip


def log_odds(probabilities: np.ndarray) -> np.ndarray:
    """The logarithm of the second class' odds, float (n,), from the probabilities of two. It tells
    apart what is 1 for both: of those the other one is still a number.
    """
    with np.errstate(divide="ignore"):
        first, second = np.log(probabilities.astype(np.float64)).T
    return second - first


def ranking(positive: np.ndarray, score: np.ndarray) -> tuple[float, float]:
    """How well a score ranks the images of one class before those of the other.

    Args:
        positive: whether an image is of that class, bool (n,); both occur.
        score: float (n,).

    Returns:
        The area under the ROC curve; images of equal score count half (Hanley and McNeil, "The
        Meaning and Use of the Area under a ROC Curve", 1982). The average precision: the precision
        at each score, weighted by the recall that it adds.
    """
    scores, place = np.unique(-score, return_inverse=True)
    true, false = (
        np.bincount(place[which], minlength=len(scores)) for which in (positive, ~positive)
    )
    found, wrong = true.cumsum(), false.cumsum()
    pairs = (false * (2 * found - true)).sum()
    precision = found / (found + wrong)
    area = pairs / (2 * found[-1] * wrong[-1])
    return float(area), float((true * precision).sum() / found[-1])


def calibration_error(correct: np.ndarray, confidence: np.ndarray) -> float:
    """Mean gap between accuracy and confidence over bins (left, right] of confidence, weighted by
    their number of images.
    """
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, weights=correct, minlength=CALIBRATION_BINS) - np.bincount(
        bins, weights=confidence, minlength=CALIBRATION_BINS
    )
    return float(np.abs(gaps).sum() / len(correct))
