"""NC1 to NC4: an exact simplex, hand-worked cases, plain loops, and degenerate input."""

import numpy as np
import pytest
import torch

from lapcli.analysis.measurements.collapse import CollapseOfLayer


def simplex(classes, width, seed=0):
    """An equiangular tight frame: C unit corners with cosines -1/(C-1), rotated into `width` dimensions."""
    frame = np.linalg.qr(np.random.default_rng(seed).normal(size=(width, classes)))[0].T
    return np.sqrt(classes / (classes - 1)) * (frame - frame.mean(axis=0))


def measured(h_BTD, labels, classifier, logits=None, batch=100):
    parts = torch.from_numpy(h_BTD).split(batch)

    def second_pass():
        for x, part in zip(parts, torch.from_numpy(logits).split(batch), strict=True):
            collapse.compare(x, None)
            collapse.compare_logits(part, None)

    collapse = CollapseOfLayer(classifier, (lambda: None) if logits is None else second_pass)
    for x, y in zip(parts, torch.from_numpy(labels).split(batch), strict=True):
        collapse.update(x, y)
    return collapse.result()


@pytest.mark.parametrize(("classes", "width"), [(3, 7), (10, 12)])
def test_an_exact_simplex_is_complete_collapse(classes, width):
    W = simplex(classes, width)
    labels = np.repeat(np.arange(classes), 3)
    offset = np.random.default_rng(1).normal(size=width)  # the means are centred first
    h = np.repeat((2.5 * W + offset)[labels][:, None], 4, axis=1)
    found = measured(h, labels, W, logits=(h.mean(axis=1) - offset) @ W.T).values
    for name in ("nc1", "nc2_equinorm_centred", "nc2_equiangular_centred", "nc3", "nc4"):
        assert found[name] == pytest.approx(0, abs=1e-10), name
    assert found["nc2_equiangular_classifier"] == pytest.approx(0, abs=1e-10)
    assert found["nc2_equiangular_as_printed"] > 1e-3  # with the offset the printed form is no simplex


def test_random_features_match_plain_loops():
    rng = np.random.default_rng(0)
    C, D, N, T = 4, 6, 23, 3
    W, labels = rng.normal(size=(C, D)), np.concatenate([np.arange(C), rng.integers(0, C, N - C)])
    tokens = rng.normal(size=(N, T, D)) + 2 * rng.normal(size=(C, D))[labels][:, None]
    logits = rng.normal(size=(N, C))
    found = measured(tokens, labels, W, logits, batch=4).values
    h = tokens.mean(axis=1)
    M = np.stack([h[labels == c].mean(axis=0) for c in range(C)])
    centred = M - M.mean(axis=0)
    S_W = sum(np.outer(x - M[c], x - M[c]) for x, c in zip(h, labels, strict=True)) / N
    assert found["nc1"] == pytest.approx(np.trace(S_W @ np.linalg.pinv(centred.T @ centred / C)), rel=1e-8)
    for name, v in (("centred", centred), ("as_printed", M), ("classifier", W)):
        lengths = np.linalg.norm(v, axis=1)
        assert found[f"nc2_equinorm_{name}"] == pytest.approx(np.std(lengths, ddof=1) / np.mean(lengths))
        pairs = [abs(v[i] @ v[j] / lengths[i] / lengths[j] + 1 / (C - 1)) for i in range(C) for j in range(C) if i != j]
        assert found[f"nc2_equiangular_{name}"] == pytest.approx(np.mean(pairs))
    expected = np.linalg.norm(W.T / np.linalg.norm(W) - centred.T / np.linalg.norm(centred)) ** 2
    assert found["nc3"] == pytest.approx(expected)
    nearest = [np.argmin([np.linalg.norm(x - m) for m in M]) for x in h]
    assert found["nc4"] == pytest.approx(np.mean(np.array(nearest) != logits.argmax(axis=1)))
