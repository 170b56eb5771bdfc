"""OV maps of heads against known spectra and the dense matrices of each architecture."""

import math
from types import SimpleNamespace

import pytest
import torch
from analysis_support import dino, gpt, vit

from lapcli.analysis.measurement import Settings
from lapcli.analysis.measurements.heads import Ov, head_ov, value_and_output
from lapcli.measures.capture import anatomy_of


def quantities(matrix):
    """Of a head as wide as the model, by eigenvalues and by definition."""
    found = {name: float(values) for name, values in head_ov(matrix, torch.eye(len(matrix)), 1).items()}
    assert found["mean_eigenvalue"] == pytest.approx(float(torch.linalg.eigvals(matrix).real.mean()), abs=1e-6)
    return tuple(found[name] for name in ("mean_eigenvalue", "symmetric", "diagonal"))


def test_ov_of_known_spectra():
    angle = 0.3
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    assert quantities(-0.7 * torch.eye(4)) == pytest.approx((-0.7, 1, 1))
    assert quantities(torch.tensor([[0.0, 1.0], [-1.0, 0.0]])) == pytest.approx((0, 0, 0))
    share = math.cos(angle) ** 2
    assert quantities(rotation) == pytest.approx((math.cos(angle), share, share))
    assert quantities(torch.tensor([[0.0, 2.0], [2.0, 0.0]])) == pytest.approx((0, 1, 0))  # eigenvalues 2 and -2


def whole(value_VC, output_CI, heads):
    """Of C x C matrices, head by head."""
    size, groups = output_CI.shape[1] // heads, len(value_VC) * heads // output_CI.shape[1]
    for head in range(heads):
        group = head * groups // heads
        M = output_CI[:, head * size : (head + 1) * size] @ value_VC[group * size : (group + 1) * size]
        S, norm = (M + M.T) / 2, M.square().sum()
        yield float(M.trace() / size), float(S.square().sum() / norm), float(M.diagonal().square().sum() / norm)


@pytest.mark.parametrize("build", [lambda: gpt(1), lambda: gpt(1, kv_heads=2), lambda: vit(2), lambda: dino(1)])
def test_heads_of_our_models_match_dense_matrices(build):
    model = build()[0]
    anatomy = anatomy_of(model)
    attention = anatomy.blocks[1].attn
    value, output = value_and_output(attention)
    found = Ov(SimpleNamespace(anatomy=anatomy, plan=anatomy.plan), Settings()).measure(None, 1)()
    names = ("mean_eigenvalue", "symmetric", "diagonal")
    heads = list(zip(*(found.series[name] for name in names), strict=True))
    expected = list(whole(value.double(), output.double(), len(heads)))
    assert [pytest.approx(each) for each in expected] == heads
    assert found.values["symmetric"] == pytest.approx(sum(each[1] for each in expected) / len(heads))
