"""Shares of the variance against plain loops over classes, examples and tokens; the identity; invariances."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.analysis.measurements.anova import AnovaAccumulator

IMAGE_PARTS = ("between_class", "within_class", "within_sequence")


def of_images(x_BTD, labels_B, classes=4, min_count=1, batch=100):
    anova = AnovaAccumulator(classes, x_BTD.shape[2], by_token=False, min_count=min_count)
    for x, labels in zip(torch.from_numpy(x_BTD).split(batch), torch.from_numpy(labels_B).split(batch), strict=True):
        anova.update(x, labels)
    return anova.result()


def of_tokens(x_BTD, labels_BT, classes=6, min_count=2, batch=100):
    anova = AnovaAccumulator(classes, x_BTD.shape[2], by_token=True, min_count=min_count)
    for x, labels in zip(torch.from_numpy(x_BTD).split(batch), torch.from_numpy(labels_BT).split(batch), strict=True):
        anova.update(x, labels)
    return anova.result()


def images(seed, examples=11, tokens=5, width=3, classes=4):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, examples - classes)])
    return rng.normal(size=(examples, tokens, width)) + rng.normal(size=(classes, 1, width))[labels], labels


def by_loops(x_BTD, labels_B):
    """The paper's formulas, with averages written as they are nested."""
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


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_images_are_as_by_the_papers_formulas_and_parts_sum_to_the_total(seed, batch):
    x, labels = images(seed)
    found, expected = of_images(x, labels, batch=batch).values, by_loops(x, labels)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-10)
    assert sum(found[name] for name in IMAGE_PARTS) == pytest.approx(expected["total"], rel=1e-12)
    assert sum(found[f"{name}_share"] for name in IMAGE_PARTS) == pytest.approx(1)


def test_language_shares_by_class_and_by_token():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 20, 4))
    labels = rng.choice(6, size=(6, 20), p=[0.5, 0.2, 0.15, 0.1, 0.05, 0])
    labels[0, 0] = 5  # a next token that is seen once
    found = of_tokens(x, labels, batch=2).values
    flat, classes = x.reshape(-1, 4), labels.reshape(-1)
    kept = [c for c in range(6) if (classes == c).sum() >= 2]
    means = {c: flat[classes == c].mean(axis=0) for c in kept}
    within = {c: ((flat[classes == c] - means[c]) ** 2).sum(axis=1).mean() for c in kept}
    centre = np.mean(list(means.values()), axis=0)
    assert found["within_class"] == pytest.approx(np.mean(list(within.values())))
    assert found["between_class"] == pytest.approx(np.mean([((m - centre) ** 2).sum() for m in means.values()]))
    # Weighted by token it is the plain decomposition of the variance of all kept tokens.
    rows = flat[np.isin(classes, kept)]
    assert found["total_by_example"] == pytest.approx(((rows - rows.mean(axis=0)) ** 2).sum(axis=1).mean())
    share = sum((classes == c).sum() * within[c] for c in kept) / len(rows) / found["total_by_example"]
    assert found["within_class_share_by_example"] == pytest.approx(share)
    assert (found["classes"], found["classes_left_out"]) == (len(kept), 1)
    assert "within_sequence" not in found


def test_rotation_shift_scale_and_order_leave_the_shares():
    x, labels = images(3)
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    order = np.random.default_rng(2).permutation(len(x))
    one, other = of_images(x, labels), of_images((7 * x @ rotation + 2)[order], labels[order], batch=3)
    for name in IMAGE_PARTS:
        assert one.values[f"{name}_share"] == pytest.approx(other.values[f"{name}_share"])
        assert other.values[name] == pytest.approx(49 * one.values[name])


def test_a_mean_far_from_zero_does_not_drown_the_variance():
    x, labels = images(4)
    near, far = of_images(x, labels), of_images(x + 1e7, labels, batch=2)
    assert far.values["within_class"] == pytest.approx(near.values["within_class"], rel=1e-6)


def test_targets_that_are_no_class_are_left_out():
    x, labels = np.random.default_rng(0).normal(size=(2, 8, 3)), np.tile([0, 1], (2, 4))
    ignored = labels.copy()
    ignored[0] = -1
    assert of_tokens(x, ignored).values == of_tokens(x[1:], labels[1:]).values


def test_degenerate_input_has_an_answer():
    x, labels = images(5)
    one = of_images(x, np.zeros(len(x), dtype=np.int64))
    assert one.values["between_class"] == 0
    assert "one class" in one.notes[0]
    single = of_images(x[:4], labels[:4], min_count=2)  # one example each
    assert single.values["total"] is None
    assert single.values["between_class_share"] is None
    assert single.notes
    equal = of_images(np.full((4, 3, 2), 0.1), np.array([0, 0, 1, 1]))
    assert equal.values["within_sequence_share"] is None
    assert "all tokens are equal" in equal.notes[0]
    many = of_images(*images(6, examples=30, width=2, classes=12), classes=12)  # more classes than dimensions
    assert sum(many.values[f"{name}_share"] for name in IMAGE_PARTS) == pytest.approx(1)
