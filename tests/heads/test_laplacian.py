"""Laplacian attention against the definition: `I - P` written out in float64, head by head and token by token."""

import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lapcli.heads.laplacian import laplacian_attention
from lapcli.models.gpt import Attention, GPTConfig

torch.set_num_threads(2)
peak_bytes = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "measure.py"))["peak_bytes"]


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    laplacian_heads: int,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    current_v: Tensor | None = None,
) -> Tensor:
    """One head of one example at a time, with its T x S operator in float64."""
    q, k, v = q.double(), k.double(), v.double()
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    future = torch.tensor([[causal and s > S - T + t for s in range(S)] for t in range(T)])
    I = torch.tensor([[float(s == S - T + t) for s in range(S)] for t in range(T)], dtype=torch.float64)  # noqa: E741
    outputs = []
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            logits = q[b, h] @ k[b, g].T * (1 / math.sqrt(D) if scale is None else scale)
            logits = logits.masked_fill(future, -torch.inf)
            if mask is not None:
                here = mask.expand(B, H, T, S)[b, h]
                logits = logits.masked_fill(~here, -torch.inf) if here.dtype == torch.bool else logits + here
            P = logits.exp() / logits.exp().sum(1, keepdim=True)
            if h < H - laplacian_heads:
                outputs.append(P @ v[b, g])
            elif current_v is not None:
                outputs.append(current_v[b, g].double() - P @ v[b, g])
            else:
                outputs.append((I - P) @ v[b, g])
    return torch.stack(outputs).view(B, H, T, v.shape[-1])


def draw(B: int, H: int, G: int, T: int, S: int, D: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(B + 10 * H + 100 * T + 1000 * S)
    q = torch.randn(B, H, T, D, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(B, G, S, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v))


def gradients(y: Tensor, inputs: tuple[Tensor, ...], retain_graph: bool = False) -> list[Tensor]:
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad(y, inputs, direction.to(y.dtype), retain_graph=retain_graph))


def assert_matches_oracle(q: Tensor, k: Tensor, v: Tensor, heads: int, tolerance: float, **options) -> None:
    y, expected = laplacian_attention(q, k, v, heads, **options), oracle(q, k, v, heads, **options)
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)
    for ours, theirs in zip(gradients(y, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), atol=tolerance, rtol=tolerance)


@settings(deadline=None, max_examples=30)
@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    tokens=st.integers(1, 6),
    cached=st.integers(0, 4),
    size=st.integers(1, 8),
    data=st.data(),
    causal=st.booleans(),
)
def test_any_shape_grouping_and_head_count(batch, groups, share, tokens, cached, size, data, causal) -> None:
    heads = groups * share
    laplacian_heads = data.draw(st.integers(0, heads))
    inputs = draw(batch, heads, groups, tokens, tokens + cached, size)
    assert_matches_oracle(*inputs, laplacian_heads, tolerance=1e-12, causal=causal)


@pytest.mark.parametrize("laplacian_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["boolean", "additive", "per head"])
def test_mask_and_scale(laplacian_heads: int, kind: str) -> None:
    q, k, v = draw(2, 4, 2, 5, 7, 6)
    generator = torch.Generator().manual_seed(3)
    allowed = torch.rand(2, 4 if kind == "per head" else 1, 5, 7, generator=generator) < 0.6
    allowed[..., 0] = True  # no token may be left with nothing to look at
    mask = torch.randn(5, 7, generator=generator, dtype=torch.float64) if kind == "additive" else allowed
    assert_matches_oracle(q, k, v, laplacian_heads, 1e-12, mask=mask)
    assert_matches_oracle(q, k, v, laplacian_heads, 1e-12, mask=mask, scale=0.3)
    assert_matches_oracle(q, k, v, laplacian_heads, 1e-12, causal=True, scale=1.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("G", "T", "S"), [(4, 6, 6), (2, 1, 6), (2, 3, 6)])
def test_without_laplacian_heads_attention_is_bitwise_plain(dtype: torch.dtype, G: int, T: int, S: int) -> None:
    q, k, v = draw(2, 4, G, T, S, 8, dtype)
    y = laplacian_attention(q, k, v, 0)
    assert torch.equal(y, F.scaled_dot_product_attention(q, k, v, enable_gqa=G != 4))
    causal = laplacian_attention(q, k, v, 0, causal=True)
    prefix = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    how = {"is_causal": True} if T == S else {"attn_mask": None if T == 1 else prefix}
    plain = F.scaled_dot_product_attention(q, k, v, enable_gqa=G != 4, **how)
    assert torch.equal(causal, plain)
    for ours, theirs in zip(gradients(causal, (q, k, v)), gradients(plain, (q, k, v)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("G", "T", "S"), [(4, 6, 6), (2, 3, 6)])
def test_components_constant_over_tokens_vanish(G: int, T: int, S: int) -> None:
    q, k, v = draw(2, 4, G, T, S, 8)
    bias = torch.randn(G, 1, 8, dtype=torch.float64, requires_grad=True)
    y = laplacian_attention(q, k, v + bias, 4, causal=True)
    without = laplacian_attention(q, k, v, 4, causal=True)
    assert (y - without).abs().max() < 1e-12
    (gradient,) = gradients(y, (bias,))
    assert gradient.abs().max() < 1e-12
    (plain,) = gradients(laplacian_attention(q, k, v + bias, 0, causal=True), (bias,))
    assert plain.abs().max() > 0.1


class TestInFloat32:
    """The CPU training case: float32 or bf16, equal numbers of query and key heads, no mask."""

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("laplacian_heads", [1, 4])
    def test_forward_and_gradients(self, laplacian_heads: int, causal: bool) -> None:
        assert_matches_oracle(*draw(2, 4, 4, 40, 40, 8, torch.float32), laplacian_heads, 2e-6, causal=causal)

    def test_bf16_is_close(self) -> None:
        q, k, v = draw(2, 4, 4, 33, 33, 16, torch.bfloat16)
        y = laplacian_attention(q, k, v, 2, causal=True)
        assert y.dtype == torch.bfloat16
        expected = oracle(q, k, v, 2, causal=True)
        torch.testing.assert_close(y.double(), expected, atol=0.04, rtol=0.02)
        for ours, theirs in zip(gradients(y, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
            assert (ours.double() - theirs.double()).norm() < 0.02 * theirs.double().norm()

    def test_half_laplacian_heads_add_at_most_a_tenth_to_peak_memory(self) -> None:
        """Peak memory of a GPT attention layer's forward and backward."""
        peaks = []
        for laplacian_heads in (0, 2):
            layer = Attention(GPTConfig(layers=1, heads=4, width=64, vocab=1, laplacian_heads=laplacian_heads), 0)
            nn.init.normal_(layer.out.weight)
            x_BTC, angles = torch.randn(2, 256, 64, requires_grad=True), torch.rand(256, 1, 8)
            rotary = angles.cos(), angles.sin()
            peaks.append(peak_bytes(lambda layer=layer, x=x_BTC, rotary=rotary: layer(x, rotary).sum().backward()))
        assert peaks[0] < peaks[1] <= 1.1 * peaks[0]
