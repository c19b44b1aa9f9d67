"""From one prediction per image to the numbers of evaluation.json. Only numpy, so they are equal
everywhere.
"""

from typing import Any

import numpy as np

CALIBRATION_BINS = 15


def summarise(
    labels: np.ndarray,
    predicted: np.ndarray,
    confidence: np.ndarray,
    loss: np.ndarray,
    classes: int,
) -> dict[str, Any]:
    """Metrics over n images, each counted once.

    Args:
        labels: true classes, int (n,).
        predicted: classes with the highest probability, int (n,).
        confidence: that probability, float (n,).
        loss: cross-entropy of each image, float (n,), in nats.
        classes: number of classes.

    Returns:
        n; loss (mean); accuracy; per_class_accuracy (classes,), null for a class without images;
        confusion_matrix (classes, classes), true class by row; expected_calibration_error with 15
        bins of equal width (Guo et al., "On Calibration of Modern Neural Networks", 2017).
    """
    confusion = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(confusion, (labels, predicted), 1)
    per_class = confusion.sum(axis=1)
    correct = labels == predicted
    return {
        "n": len(labels),
        "loss": float(loss.astype(np.float64).mean()),
        "accuracy": float(correct.mean()),
        "per_class_accuracy": [
            float(confusion[c, c] / per_class[c]) if per_class[c] else None for c in range(classes)
        ],
        "confusion_matrix": confusion.tolist(),
        "expected_calibration_error": calibration_error(correct, confidence.astype(float)),
    }  # fmt: skip


def calibration_error(correct: np.ndarray, confidence: np.ndarray) -> float:
    """Mean gap between accuracy and confidence over bins (left, right] of confidence, weighted by
    their number of images.
    """
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    gaps = np.bincount(bins, weights=correct, minlength=CALIBRATION_BINS) - np.bincount(
        bins, weights=confidence, minlength=CALIBRATION_BINS
    )
    return float(np.abs(gaps).sum() / len(correct))
