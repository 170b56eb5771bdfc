"""Mean IoU on confusions worked by hand, and scikit-learn's matrix as the oracle of ours."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix as sklearns
from sklearn.metrics import jaccard_score

from lapcli.measures.mean_iou import confusion_matrix, interval_over_images, mean_iou, overlaps

IGNORED = 255


def test_by_hand():
    """Class 0: 3 hits, 1 missed, 2 wrong: 3/6. Class 1: 4 hits, 2 missed, 1 wrong: 4/7. Class 2 does not occur."""
    confusion = torch.tensor([[3, 1, 0], [2, 4, 0], [0, 0, 0]])
    intersection, union = overlaps(confusion).numpy()
    assert intersection.tolist() == [3, 4, 0]
    assert union.tolist() == [6, 7, 0]
    assert mean_iou(intersection, union) == pytest.approx((3 / 6 + 4 / 7) / 2)


def test_a_class_that_is_only_predicted_counts_as_missed():
    """Three pixels of class 0, one taken for class 1: IoU 2/3 and 0/1."""
    confusion = confusion_matrix(torch.tensor([0, 0, 0, 255]), torch.tensor([0, 0, 1, 2]), 3, IGNORED)
    assert confusion.tolist() == [[2, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert mean_iou(*overlaps(confusion).numpy()) == pytest.approx((2 / 3 + 0) / 2)


def test_nothing_labelled_is_no_number():
    confusion = confusion_matrix(torch.tensor([255, 255]), torch.tensor([0, 1]), 3, IGNORED)
    assert np.isnan(mean_iou(*overlaps(confusion).numpy()))


@pytest.mark.parametrize("seed", range(20))
def test_scikit_learn_agrees(seed):
    """From a few pixels, of which some classes are absent, to many."""
    generator = np.random.default_rng(seed)
    count = 2 + 3 * seed
    labels = torch.from_numpy(generator.choice([0, 1, 2, 3, IGNORED], size=count))
    labels[0] = seed % 4
    predictions = torch.from_numpy(generator.integers(4, size=count))
    kept = labels != IGNORED
    truth, guess = labels[kept].numpy(), predictions[kept].numpy()
    confusion = confusion_matrix(labels, predictions, 4, IGNORED)
    assert (confusion.numpy() == sklearns(truth, guess, labels=range(4))).all()
    there = sorted(set(truth) | set(guess))
    expected = jaccard_score(truth, guess, labels=there, average="macro", zero_division=0)
    assert mean_iou(*overlaps(confusion).numpy()) == pytest.approx(expected)


def test_the_interval_narrows_with_images_and_holds_the_value():
    generator = np.random.default_rng(0)
    union = generator.integers(50, 100, size=(400, 1, 5))
    both = np.concatenate([(union * generator.uniform(0.2, 0.6, size=union.shape)).astype(int), union], axis=1)
    few, many = interval_over_images(both[:25]), interval_over_images(both)
    assert few[1] - few[0] > 2 * (many[1] - many[0]) > 0
    assert many[0] < mean_iou(*both.sum(axis=0)) < many[1]
