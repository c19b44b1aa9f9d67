"""Test-time augmentation: the views of a test image and their weights."""

import numpy as np
import pytest
import torch

from classifier.evaluation.metrics import Predicted, summarise
from classifier.evaluation.views import predict_with_views, ranked_ahead
from classifier.models.classifier import Classifier, build


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    torch.manual_seed(0)
    return build("airbench", (8, 8, 8), 10).eval()


def with_views(classifier: Classifier, images: torch.Tensor, views: str) -> torch.Tensor:
    return predict_with_views(classifier, images, views)[views]


@torch.no_grad()
def test_six_views_are_weighed_as_published(classifier) -> None:
    images = torch.randint(0, 256, (5, 32, 32, 3), dtype=torch.uint8)
    # Mirrored borders of a pixel, as numpy makes them.
    padded = torch.from_numpy(
        np.pad(images.numpy(), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    )
    shifted = [padded[:, :32, :32], padded[:, 2:, 2:]]
    logits = [
        (classifier(view.contiguous()) + classifier(view.flip(2))) / 2
        for view in (images, *shifted)
    ]
    torch.testing.assert_close(with_views(classifier, images, "flip"), logits[0])
    torch.testing.assert_close(
        with_views(classifier, images, "flip_shift"), (2 * logits[0] + logits[1] + logits[2]) / 4
    )
    for views in ("plain", "flip", "flip_shift"):
        assert torch.equal(
            predict_with_views(classifier, images, views)["plain"], classifier(images)
        )


@torch.no_grad()
@pytest.mark.parametrize("views", ["flip", "flip_shift"])
def test_a_mirrored_image_is_judged_by_the_same_views(classifier, views) -> None:
    # In a shift along the diagonal, mirrored images go the other way: only the plain mirror is the
    # same.
    images = torch.randint(0, 256, (5, 32, 32, 3), dtype=torch.uint8)
    one, other = (with_views(classifier, given, views) for given in (images, images.flip(2)))
    assert torch.allclose(one, other, atol=1e-5) == (views == "flip")


def test_of_equal_classes_the_first_ones_are_the_top_5() -> None:
    """A network that tells no class apart has the top 5 of guessing, not all images right."""
    labels = torch.arange(21)
    same = ranked_ahead(torch.zeros(21, 21), labels)
    assert int((same < 5).sum()) == 5
    coarse = torch.randint(0, 4, (500, 21), generator=torch.Generator().manual_seed(0)).double()
    labels = torch.arange(500) % 21
    # Sorted by descending logit, equal ones in their order.
    order = coarse.argsort(dim=1, descending=True, stable=True)
    places = (order == labels[:, None]).int().argmax(1)
    assert torch.equal(ranked_ahead(coarse, labels), places)
    assert torch.equal(places == 0, coarse.argmax(1) == labels)


def test_images_of_which_a_network_is_too_sure_are_ranked_all_the_same() -> None:
    """Both classes' probabilities are 1 to the last bit, for one image more clearly."""
    logits = torch.tensor([[0.0, 40.0], [0.0, 50.0], [45.0, 0.0], [60.0, 0.0]]).double()
    labels = np.array([0, 1, 1, 0])
    probabilities = logits.softmax(1).numpy()
    sure = probabilities.max(1)
    predicted = Predicted(probabilities.argmax(1), sure, np.zeros(4), sure, np.zeros(4),
                          probabilities)  # fmt: skip
    found = summarise(labels, predicted, 2)
    # By the odds: 50 (1), 40 (0), -45 (1), -60 (0).
    assert found["roc_auc"] == pytest.approx(3 / 4)
    assert found["average_precision"] == pytest.approx([(1 + 2 / 3) / 2, (1 + 2 / 3) / 2])
