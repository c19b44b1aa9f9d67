"""The numbers of evaluation.json, against scikit-learn and against sums done by hand."""

import numpy as np
from sklearn import metrics as reference

from classifier.evaluation.metrics import summarise

LABELS = np.array([0, 0, 1, 1, 2, 2, 2, 2])
PREDICTED = np.array([0, 1, 1, 1, 2, 2, 0, 2])
CONFIDENCE = np.array([0.9, 0.6, 0.8, 1.0, 0.5, 0.95, 0.4, 0.7])
LOSS = np.arange(8) / 10


def test_against_scikit_learn() -> None:
    found = summarise(LABELS, PREDICTED, CONFIDENCE, LOSS, classes=3)
    assert found["n"] == 8
    assert found["accuracy"] == reference.accuracy_score(LABELS, PREDICTED) == 6 / 8
    assert found["confusion_matrix"] == reference.confusion_matrix(LABELS, PREDICTED).tolist()
    assert (
        found["per_class_accuracy"]
        == reference.recall_score(LABELS, PREDICTED, average=None).tolist()
    )
    assert np.isclose(found["loss"], 0.35)


def test_a_class_without_images_has_no_accuracy() -> None:
    assert (
        summarise(LABELS, PREDICTED, CONFIDENCE, LOSS, classes=4)["per_class_accuracy"][3] is None
    )


def test_calibration_error_by_hand() -> None:
    right, sure = np.ones(4, dtype=int), np.full(4, 0.7)
    found = summarise(np.array([1, 1, 1, 0]), right, sure, np.zeros(4), 2)[
        "expected_calibration_error"
    ]
    assert np.isclose(found, 0.75 - 0.7)
    # Two bins: two images, half of them right at 0.9, and two, all right at 0.6.
    found = summarise(
        np.array([1, 0, 1, 1]), right, np.array([0.9, 0.9, 0.6, 0.6]), np.zeros(4), 2
    )["expected_calibration_error"]
    assert np.isclose(found, (2 * 0.4 + 2 * 0.4) / 4)


def test_confidence_of_nought_and_one_fall_into_the_outer_bins() -> None:
    found = summarise(np.array([0, 1]), np.array([0, 0]), np.array([1.0, 0.0]), np.zeros(2), 2)
    assert found["expected_calibration_error"] == 0.0
