"""Laplacian heads in timm's own models, against `I - P` written out and against hooks on the stock modules."""

import copy

import pytest
import timm
import torch
from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import EvaAttention

import lapcli
from lapcli.heads.laplacianize import attention_layers, head_plan_of

TINY = {"img_size": 32, "depth": 2, "num_classes": 5}
MODELS = {
    "plain": ("deit3_small_patch16_224", {**TINY, "embed_dim": 48, "num_heads": 4, "patch_size": 8}),
    "rope": ("vit_small_patch16_rope_224", {**TINY, "embed_dim": 48, "num_heads": 4}),
    "eva": ("eva02_tiny_patch14_224", {"img_size": 28, "depth": 2, "num_classes": 5, "embed_dim": 48, "num_heads": 4}),
    "dinov3": ("vit_small_patch16_dinov3", {**TINY, "embed_dim": 48, "num_heads": 4}),
}


def build(kind):
    name, options = MODELS[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, **options).double().eval()
    with torch.no_grad():  # every weight is drawn, LayerScale too: else a tiny model hides what its heads do
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    size = options["img_size"]
    return model, torch.randn(2, 3, size, size, dtype=torch.float64)


def dense_tokens(module, x, laplacian_heads):
    """The layer with explicit matrices `P` and `I`, computed from the module's weights alone."""
    B, T, _ = x.shape
    H = module.num_heads
    if module.qkv is not None:
        weights = module.qkv.weight.chunk(3)
        if getattr(module, "q_bias", None) is not None:
            biases = [module.q_bias, module.k_bias, module.v_bias]
        else:
            biases = module.qkv.bias.chunk(3) if module.qkv.bias is not None else [0, 0, 0]
    else:
        parts = [module.q_proj, module.k_proj, module.v_proj]
        weights = [part.weight for part in parts]
        biases = [0 if part.bias is None else part.bias for part in parts]
    q, k, v = ((x @ w.T + b).view(B, T, H, -1).permute(0, 2, 1, 3) for w, b in zip(weights, biases, strict=True))
    q, k = module.q_norm(q), module.k_norm(k)
    P = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
    operator = P.clone()
    for head in range(H - laplacian_heads, H):
        operator[:, head] = torch.eye(T, dtype=x.dtype) - P[:, head]
    y = (operator @ v).permute(0, 2, 1, 3).reshape(B, T, -1)
    return module.proj(module.norm(y))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(
    "module",
    [
        Attention(24, num_heads=4, qkv_bias=True, qk_norm=True, norm_layer=torch.nn.LayerNorm),
        AttentionRope(24, num_heads=4, qkv_fused=False),
        AttentionRope(24, num_heads=4, scale_norm=True, norm_layer=torch.nn.LayerNorm),
        EvaAttention(24, num_heads=4, norm_layer=torch.nn.LayerNorm),
        EvaAttention(24, num_heads=4, qkv_fused=False, scale_norm=False),
    ],
    ids=["plain", "rope split", "rope fused", "eva fused", "eva split"],
)
def test_a_layer_matches_the_dense_operator(module, heads):
    module = copy.deepcopy(module).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    lapcli.laplacianize(module, heads)
    torch.testing.assert_close(module(x), dense_tokens(module, x, heads), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_plain_and_laplacian_heads_sum_to_the_values(kind):
    """P v + (I - P) v = v, layer by layer in a complete model, with rotated positions but unrotated prefix tokens."""
    stock, x = build(kind)
    seen = {}
    layer = stock.blocks[1].attn
    layer.register_forward_hook(
        lambda module, inputs, options, output: seen.update(x=inputs[0], options=options, out=output), with_kwargs=True
    )
    stock(x)
    turned = lapcli.laplacianize(copy.deepcopy(layer), layer.num_heads)
    identity = copy.deepcopy(layer)  # attention of each token to itself alone: the values themselves
    T = seen["x"].shape[1]
    options = {**seen["options"], "attn_mask": torch.eye(T, dtype=torch.bool)}
    if not isinstance(getattr(layer, "norm", torch.nn.Identity()), torch.nn.Identity):
        turned.norm = identity.norm = torch.nn.Identity()  # a norm between is not linear
        stock_out = copy.deepcopy(layer)
        stock_out.norm = torch.nn.Identity()
        seen["out"] = stock_out(seen["x"], **seen["options"])
    total = seen["out"] + turned(seen["x"], **seen["options"]) - layer.proj.bias
    torch.testing.assert_close(total, identity(seen["x"], **options), atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_conversion_keeps_names_and_weights_and_is_reversible(kind):
    stock, x = build(kind)
    before = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    expected = stock(x)
    model = lapcli.laplacianize(stock, [1, 4])
    assert model is stock
    assert head_plan_of(model).per_layer == (1, 4)
    assert not torch.allclose(model(x), expected)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    lapcli.laplacianize(model, 0)
    assert torch.equal(model(x), expected)
    assert {type(module) for module in attention_layers(model)} <= {Attention, AttentionRope, EvaAttention}


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("swin_tiny_patch4_window7_224", "timm.models.swin_transformer.WindowAttention"),
        ("beit_base_patch16_224", "timm.models.beit.Attention"),
    ],
)
def test_unknown_attention_is_refused_with_the_classes_found(name, seen):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=r"expected timm\.layers\.attention\.Attention") as error:
        lapcli.laplacianize(model, 1)
    assert f"saw {seen}" in str(error.value)


def test_attention_dropout_is_refused():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, attn_drop_rate=0.1)
    with pytest.raises(ValueError, match="attn_drop_rate"):
        lapcli.laplacianize(model, 1)
