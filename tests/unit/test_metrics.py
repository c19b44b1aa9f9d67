"""The numbers of evaluation.json, against scikit-learn and against sums done by hand."""

import numpy as np
import pytest
from sklearn import metrics as reference

from classifier.evaluation.metrics import Predicted, summarise
from manynodes.reporting import numbers, page

LABELS = np.array([0, 0, 1, 1, 2, 2, 2, 2])
PREDICTED = np.array([0, 1, 1, 1, 2, 2, 0, 2])
CONFIDENCE = np.array([0.9, 0.6, 0.8, 1.0, 0.5, 0.95, 0.4, 0.7])
LOSS = np.arange(8) / 10


def of(predicted: np.ndarray, confidence: np.ndarray, loss: np.ndarray) -> Predicted:
    """Predictions of which only these are known."""
    none = np.zeros(len(predicted))
    return Predicted(predicted, confidence, loss, none, none, np.zeros((len(predicted), 2)))


def from_probabilities(labels: np.ndarray, probabilities: np.ndarray) -> Predicted:
    of_true = probabilities[np.arange(len(labels)), labels]
    return Predicted(
        probabilities.argmax(1),
        probabilities.max(1),
        -np.log(of_true),
        of_true,
        (probabilities > of_true[:, None]).sum(1),
        probabilities,
    )


def test_against_scikit_learn() -> None:
    found = summarise(LABELS, of(PREDICTED, CONFIDENCE, LOSS), classes=3)
    assert found["n"] == 8
    assert found["accuracy"] == reference.accuracy_score(LABELS, PREDICTED) == 6 / 8
    assert found["confusion_matrix"] == reference.confusion_matrix(LABELS, PREDICTED).tolist()
    assert (
        found["per_class_accuracy"]
        == reference.recall_score(LABELS, PREDICTED, average=None).tolist()
    )
    assert np.isclose(found["loss"], 0.35)
    assert not {"top5_accuracy", "roc_auc", "average_precision"} & found.keys()


def test_the_top_5_of_many_classes_against_scikit_learn() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 21, 500)
    probabilities = random.dirichlet(np.ones(21), 500)
    found = summarise(labels, from_probabilities(labels, probabilities), classes=21)
    wanted = reference.top_k_accuracy_score(labels, probabilities, k=5, labels=range(21))
    assert found["top5_accuracy"] == wanted != found["accuracy"]


@pytest.mark.parametrize("digits", [1, 16])
def test_the_ranking_of_two_classes_against_scikit_learn(digits: int) -> None:
    """Also where many images have the same score."""
    random = np.random.default_rng(0)
    labels = (random.uniform(size=500) < 0.2).astype(int)
    second = np.clip(random.normal(0.4 + 0.2 * labels, 0.2), 0.01, 0.99).round(digits)
    predicted = from_probabilities(labels, np.stack((1 - second, second), axis=1))
    found = summarise(labels, predicted, classes=2)
    assert np.isclose(found["roc_auc"], reference.roc_auc_score(labels, second), rtol=1e-12)
    wanted = [
        reference.average_precision_score(labels == label, score)
        for label, score in ((0, 1 - second), (1, second))
    ]
    assert np.allclose(found["average_precision"], wanted, rtol=1e-12)
    assert wanted[0] - wanted[1] > 0.1
    assert "roc_auc" not in summarise(np.zeros_like(labels), predicted, classes=2)


def test_the_average_precision_is_shown_with_the_class_that_it_is_of() -> None:
    plain = {"n": 5, "views": "plain", "accuracy": 0.8, "loss": 0.5,
             "confusion_matrix": [[2, 1], [0, 2]]}  # fmt: skip
    two = {"class_names": ["crack_a", "none"], "average_precision": [0.7, 0.9], "roc_auc": 0.8}
    found = numbers.evaluated(plain | two | {"plain": plain})
    columns = ["average_precision (crack_a)", "average_precision (none)"]
    assert [found[column] for column in columns] == [0.7, 0.9]
    titles = [page.title_of(column, True) for column in ("roc_auc", *columns)]
    assert titles == ["ROC AUC", "average precision (crack_a)", "average precision (none)"]
    many = {"class_names": list("abc"), "plain": plain}
    assert not any("precision" in column for column in numbers.evaluated(plain | many))


def test_a_class_without_images_has_no_accuracy() -> None:
    found = summarise(LABELS, of(PREDICTED, CONFIDENCE, LOSS), classes=4)
    assert found["per_class_accuracy"][3] is None


def test_calibration_error_by_hand() -> None:
    right, sure = np.ones(4, dtype=int), np.full(4, 0.7)
    found = summarise(np.array([1, 1, 1, 0]), of(right, sure, np.zeros(4)), 2)
    assert np.isclose(found["expected_calibration_error"], 0.75 - 0.7)
    # Two bins: two images, half of them right at 0.9, and two, all right at 0.6.
    sure = np.array([0.9, 0.9, 0.6, 0.6])
    found = summarise(np.array([1, 0, 1, 1]), of(right, sure, np.zeros(4)), 2)
    assert np.isclose(found["expected_calibration_error"], (2 * 0.4 + 2 * 0.4) / 4)


def test_confidence_of_nought_and_one_fall_into_the_outer_bins() -> None:
    predicted = of(np.array([0, 0]), np.array([1.0, 0.0]), np.zeros(2))
    assert summarise(np.array([0, 1]), predicted, 2)["expected_calibration_error"] == 0.0
