"""Head updates: their sum is the attention module's update, and a hand-worked case of the paper's figure."""

import pytest
import torch
from analysis_support import dino, gpt, vit

from lapcli.analysis.measurements.updates import add_updates, head_update, result_of
from lapcli.heads.laplacian import HeadOperators
from lapcli.heads.plan import head_plan
from lapcli.measures.capture import Batch, Capture, HeadInputs, anatomy_of
from lapcli.measures.tokens import StreamingMoments

MODELS = {
    "gpt 2": lambda: gpt(2),
    "gpt grouped": lambda: gpt([1, 3], kv_heads=2),
    "vit 2": lambda: vit(2),
    "eva rope": lambda: vit(3, "vit_small_patch16_dinov3", init_values=0.5),
    "self-supervised": lambda: dino(1),
    "gpt operators": lambda: gpt(0, operators=OPERATORS),
    "vit operators": lambda: vit({"exclusive": 1, "mix": {"heads": 2, "alpha": 0.5}}),
    "self-supervised operators": lambda: dino(0, operators=OPERATORS),
}
OPERATORS = [{"centered": 2, "gate": 1}, {"value-only": 1, "mix": {"heads": 1, "learn": ["alpha"]}, "exclusive": 1}]


@pytest.mark.parametrize("name", MODELS)
def test_head_updates_sum_to_the_layer_update(name):
    model, inputs = MODELS[name]()
    anatomy = anatomy_of(model)
    summed, added = {}, {}

    def listener(layer):
        def listen(heads: HeadInputs, batch: Batch) -> None:
            y_BHTD = heads.outputs()
            summed[layer] = sum(head_update(heads, h, y_BHTD) for h in range(heads.q_BHTD.shape[1]))
            if heads.scale_C is not None:
                added[f"scale {layer}"] = heads.scale_C

        return listen

    capture = Capture(anatomy)
    for layer, block in enumerate(anatomy.blocks):
        capture.on_heads(layer, listener(layer))
        block.attn.register_forward_hook(lambda _, __, out, layer=layer: added.__setitem__(layer, out.detach()))
    capture.run([Batch(inputs, None, 0)])
    for layer, block in enumerate(anatomy.blocks):
        bias = getattr(getattr(block.attn, "proj", None), "bias", None)
        theirs = anatomy.sequences(added[layer], 2) - (0 if bias is None else bias)
        theirs = theirs * added.get(f"scale {layer}", 1)
        torch.testing.assert_close(summed[layer].float(), theirs, rtol=1e-4, atol=1e-4)
    assert any(key.startswith("scale") for key in map(str, added)) == (not name.startswith("gpt"))


def one_head(laplacian, out, causal=False):
    """Zero queries attend to all tokens equally; values are the tokens themselves."""
    x_BTC = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    zeros, values = torch.zeros(3, 1, 6, 4, dtype=torch.float64), x_BTC[:, None]
    moments = [StreamingMoments()]
    operators = HeadOperators(head_plan(int(laplacian), 1, 1), 0, 4, 4)
    add_updates(moments, HeadInputs(x_BTC, zeros, zeros, values, out, None, causal, operators, x_BTC))
    return result_of(moments, ["laplacian" if laplacian else "attention"])


def test_an_attention_head_moves_tokens_along_the_mean():
    """Each token gets the mean: parallel to it, and a shift of all tokens preserves the variance."""
    found = one_head(False, torch.eye(4, dtype=torch.float64))
    assert found.values["attention_cosine_with_mean"] == pytest.approx(1)
    assert found.values["attention_variance_change"] == pytest.approx(0, abs=1e-12)
    assert found.values["laplacian_cosine_with_mean"] is None


def test_a_laplacian_head_moves_tokens_towards_the_mean():
    """With the output -I each token is moved onto the mean: all variance is gone. Halfway, a quarter remains."""
    found = one_head(True, -torch.eye(4, dtype=torch.float64))
    assert found.values["laplacian_cosine_towards_mean"] == pytest.approx(1)
    assert found.values["laplacian_variance_change"] == pytest.approx(-1)
    half = one_head(True, -0.5 * torch.eye(4, dtype=torch.float64))
    assert half.values["laplacian_variance_change"] == pytest.approx(-0.75)
    away = one_head(True, torch.eye(4, dtype=torch.float64))
    assert away.values["laplacian_cosine_towards_mean"] == pytest.approx(-1)
    assert away.values["laplacian_variance_change"] == pytest.approx(3)
