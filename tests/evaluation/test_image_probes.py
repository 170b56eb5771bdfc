"""`linear` and `knn` on the digits: scikit-learn as oracle, choice of the rate, limits and stored results."""

import numpy as np
import pytest
from image_support import image_recipe
from probe_support import Pixels, alone
from sklearn.neighbors import KNeighborsClassifier

from lapcli.data.images.sources import open_images
from lapcli.evaluation.image_tasks import measure_knn, measure_linear
from lapcli.evaluation.tasks import KnnProtocol, LinearProtocol, read_settings
from lapcli.recipe.reading import RecipeError

QUICK = LinearProtocol(steps=40, batch=64, scale=None, flip=0.0, crop_ratio=1.0, rates=[1e-4, 0.5, 2.0])


@pytest.fixture(scope="module")
def digits():
    return open_images(image_recipe().data, None)


def pixels(images):
    rows = [np.asarray(images.image(index))[..., 0].reshape(-1) / 255 for index in range(len(images))]
    return np.stack(rows)


def test_knn_on_pixels_matches_scikit_learn(digits):
    scores = measure_knn(Pixels(), digits, KnnProtocol(crop_ratio=1.0), alone())
    assert [score.task for score in scores] == ["knn10", "knn20", "knn100", "knn200"]
    train, validation = pixels(digits.train), pixels(digits.validation)
    for score, k in zip(scores, (10, 20, 100, 200), strict=True):
        oracle = KNeighborsClassifier(
            k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.07)
        ).fit(train, digits.train.labels)
        assert score.value == pytest.approx(oracle.score(validation, digits.validation.labels), abs=1e-9)
        assert score.count == 359
        assert score.interval[0] < score.value < score.interval[1]


def test_linear_finds_the_best_rate_on_the_validation_images(digits):
    backbone = Pixels()
    score = measure_linear(backbone, digits, QUICK, alone())
    # Each training image of a step and each validation image is processed once, even for three rates.
    assert backbone.seen == 40 * 64 + 359
    by_rate = {row["rate"]: row["top1"] for row in score.details["rates"]}
    assert score.value == max(by_rate.values()) > 0.8 > by_rate[1e-4]
    assert by_rate[score.details["best_rate"]] == score.value
    assert (score.details["protocol"]["steps"], score.conditions["steps"]) == (40, 40)
    assert score.details["top5"] >= score.value


def test_all_invalid_settings_are_named_at_once():
    with pytest.raises(RecipeError) as error:
        read_settings(["linear.stepps=3", "knn.temperature=-1", "linear"], ["linear", "knn"])
    message = str(error.value)
    for words in ("linear.stepps", "steps", "knn.temperature", "expected key.path=value"):
        assert words in message
