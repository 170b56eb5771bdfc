"""Attention to the first token and to itself against dense matrices; operator parameters against the weights."""

import pytest
import torch
from analysis_support import gpt, measured, on_a_device_without_float64

from lapcli.analysis.measurement import NotApplicable, Settings
from lapcli.analysis.measurements import heads
from lapcli.analysis.measurements.heads import OperatorMixing
from lapcli.measures.capture import anatomy_of

LEARNT = [{"mix": {"heads": 2, "learn": ["alpha"]}, "gate": 1}, {"exclusive": {"heads": 3, "gate": "tanh"}}]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_row_blocks_match_the_full_matrix(causal, rows, monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 5, dtype=torch.float64) for _ in range(3))
    monkeypatch.setattr(heads, "NUMBERS_AT_ONCE", rows * 2 * 3 * 7)
    first, own, cosine = heads.head_sinks(q, k, v, causal)
    for b in range(2):
        for h in range(3):
            weights = (q[b, h] @ k[b, h].T / 5**0.5).exp()
            weights = weights.tril() if causal else weights
            P = weights / weights.sum(1, keepdim=True)
            o = P @ v[b, h]
            cosines = (o * v[b, h]).sum(1) / o.norm(dim=1) / v[b, h].norm(dim=1)
            assert float(first[b, h]) == pytest.approx(float(P[:, 0].mean()))
            assert float(own[b, h]) == pytest.approx(float(P.diagonal().mean()))
            assert float(cosine[b, h]) == pytest.approx(float(cosines.mean()))


def test_learned_mixing_matches_the_weights():
    model, tokens = gpt(0, operators=LEARNT)
    inputs = []
    model.blocks[0].attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    first, second = measured(OperatorMixing, model, tokens)
    assert first.words["operators"] == ["attention", "gate", "mix", "mix"]
    assert first.series["mix_alpha"][2:].tolist() == pytest.approx(model.blocks[0].attn.operators.mix_alpha.tolist())
    gates = (torch.cat(inputs) @ model.blocks[0].attn.operators.gate_weight.mT).sigmoid()
    assert first.series["gate"][1] == pytest.approx(float(gates.detach().mean()), rel=1e-5)
    assert second.series["exclusive_gate"][1:].tolist() == pytest.approx(
        model.blocks[1].attn.operators.exclusive_gate.tanh().tolist()
    )
    assert first.values["mix_alpha"] == pytest.approx(float(model.blocks[0].attn.operators.mix_alpha.mean()))


@pytest.mark.parametrize("kind", [heads.Sinks, OperatorMixing])
def test_a_device_without_float64_gives_the_same_numbers(kind, monkeypatch):
    model, tokens = gpt(0, operators=LEARNT)
    expected = measured(kind, model, tokens)
    on_a_device_without_float64(model, monkeypatch)
    for found, on_the_cpu in zip(measured(kind, model, tokens), expected, strict=True):
        assert found.series.keys() == on_the_cpu.series.keys()
        for name, series in on_the_cpu.series.items():
            assert found.series[name].tolist() == pytest.approx(series.tolist(), rel=1e-12, nan_ok=True)


def test_a_model_without_learned_operators_has_no_mixing():
    class Opened:
        model, _ = gpt(2)
        anatomy = anatomy_of(model)
        plan = anatomy.plan

    with pytest.raises(NotApplicable, match="no head operator of this model learns anything"):
        OperatorMixing(Opened(), Settings())
