"""Variance fractions against plain loops over classes, examples and tokens; the identity; invariances."""

import numpy as np
import pytest
import torch
from analysis_support import of_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.analysis.measurements.anova import Anova

IMAGE_PARTS = ("between_class", "within_class", "within_sequence")


def measured(x, labels, batch=100, by_token=False, classes=4):
    parts = zip(torch.from_numpy(x).split(batch), torch.from_numpy(labels).split(batch), strict=True)
    return of_tokens(Anova, [(*part, 0) for part in parts], by_token=by_token, classes=range(classes))


def images(seed, examples=13, tokens=5, width=3, classes=4):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), np.arange(classes), rng.integers(0, classes, examples - 2 * classes)])
    return rng.normal(size=(examples, tokens, width)) + rng.normal(size=(classes, 1, width))[labels], labels


def by_loops(x_BTD, labels_B):
    """The paper's formulas, with averages nested as printed."""
    by_class = [x_BTD[labels_B == c] for c in np.unique(labels_B)]
    class_means = [np.mean([sequence.mean(axis=0) for sequence in group], axis=0) for group in by_class]
    centre = np.mean(class_means, axis=0)

    def squares(difference):
        return float((difference**2).sum())

    within_sequence, within_class, total = [], [], []
    for group, mean in zip(by_class, class_means, strict=True):
        within_sequence.append(np.mean([np.mean([squares(t - s.mean(axis=0)) for t in s]) for s in group]))
        within_class.append(np.mean([squares(s.mean(axis=0) - mean) for s in group]))
        total.append(np.mean([np.mean([squares(t - centre) for t in s]) for s in group]))
    return {
        "between_class": np.mean([squares(mean - centre) for mean in class_means]),
        "within_class": np.mean(within_class),
        "within_sequence": np.mean(within_sequence),
        "total": np.mean(total),
    }


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_images_match_the_paper_formulas_and_parts_sum_to_the_total(seed, batch):
    x, labels = images(seed)
    found, expected = measured(x, labels, batch).values, by_loops(x, labels)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-10)
    assert sum(found[name] for name in IMAGE_PARTS) == pytest.approx(expected["total"], rel=1e-12)
    assert sum(found[f"{name}_share"] for name in IMAGE_PARTS) == pytest.approx(1)


def test_tokens_are_classified_by_next_token_and_rare_ones_are_skipped():
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(6, 20, 4)), rng.choice(5, size=(6, 20), p=[0.5, 0.2, 0.15, 0.1, 0.05])
    labels[0, 0] = 5  # a next token that is seen once
    found = measured(x, labels, 2, by_token=True, classes=6).values
    flat, classes = x.reshape(-1, 4), labels.reshape(-1)
    means = [flat[classes == c].mean(axis=0) for c in range(5)]
    within = [((flat[classes == c] - mean) ** 2).sum(axis=1).mean() for c, mean in enumerate(means)]
    assert found["within_class"] == pytest.approx(np.mean(within))
    assert found["between_class"] == pytest.approx(np.mean([((m - np.mean(means, 0)) ** 2).sum() for m in means]))
    assert (found["classes"], found["classes_left_out"]) == (5, 1)
    assert "within_sequence" not in found


def test_identical_tokens_have_no_variance_fractions():
    found = measured(np.full((4, 3, 2), 0.1), np.array([0, 0, 1, 1])).values
    assert (found["total"], found["within_sequence_share"]) == (0, None)
    assert measured(np.ones((2, 3, 2)), np.array([0, 1])).values["total"] is None  # one example of each
