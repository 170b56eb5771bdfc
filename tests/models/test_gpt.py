"""The GPT against its description: counts, names, initial values, and an independent forward pass."""

import math

import pytest
import torch
from torch import Tensor

from lapcli.models.gpt import GPT, GPTConfig, KVCache

torch.set_num_threads(2)

SMALL = {"layers": 2, "heads": 4, "width": 32, "vocab": 40, "context": 16}
PLANS = [0, 4, [3, 0]]


def randomised(seed: int = 0, **changes) -> GPT:
    """No weight is zero: at initialisation Laplacian heads change nothing."""
    model = GPT(GPTConfig(**{**SMALL, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (1.0 if p is model.embed.weight else 0.3))
    return model


def tokens_and_targets(B: int = 2, T: int = 16, vocab: int = 40) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocab, (B, T + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def assert_heads_matter(**changes) -> None:
    tokens, _ = tokens_and_targets()
    plain, laplacian = (randomised(**{**changes, "laplacian_heads": k})(tokens) for k in (0, SMALL["heads"]))
    assert (plain - laplacian).abs().max() > 0.1


class TestSize:
    @pytest.mark.parametrize("laplacian_heads", [0, 10])
    def test_parameter_counts_of_the_paper_for_every_number_of_laplacian_heads(self, laplacian_heads: int) -> None:
        config = GPTConfig(layers=20, heads=10, width=1280, vocab=65_536, laplacian_heads=laplacian_heads)
        with torch.device("meta"):
            model = GPT(config)
        assert sum(p.numel() for p in model.parameters()) == 560_988_160
        assert len(list(model.parameters())) == len(model.state_dict()) == 122
        assert model.cos_PD.shape == (20_480, 64)

    def test_parameter_names_follow_the_design(self) -> None:
        state = GPT(GPTConfig(**{**SMALL, "layers": 1}, kv_heads=2)).state_dict()
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
            "embed.weight": (40, 32),
            "blocks.0.attn.q.weight": (32, 32),
            "blocks.0.attn.k.weight": (16, 32),
            "blocks.0.attn.v.weight": (16, 32),
            "blocks.0.attn.out.weight": (32, 32),
            "blocks.0.mlp.up.weight": (128, 32),
            "blocks.0.mlp.down.weight": (32, 128),
            "head.weight": (40, 32),
        }


class TestStart:
    def test_first_loss_is_the_logarithm_of_the_vocabulary(self) -> None:
        loss = GPT(GPTConfig(**SMALL, laplacian_heads=2)).loss(*tokens_and_targets())
        assert loss.item() == pytest.approx(math.log(40), rel=1e-6)

    def test_only_the_head_gets_a_gradient(self) -> None:
        model = GPT(GPTConfig(**SMALL, laplacian_heads=2))
        model.loss(*tokens_and_targets()).backward()
        moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        assert moved == {"head.weight"}


class TestForward:
    def test_loss_is_the_cross_entropy_of_the_logits(self) -> None:
        model = randomised(laplacian_heads=2).double()
        tokens, targets = tokens_and_targets()
        targets[0, :5] = -1
        log_p = model(tokens).log_softmax(-1)
        each = torch.tensor(
            [[0.0 if t < 0 else -log_p[b, i, t].item() for i, t in enumerate(row)] for b, row in enumerate(targets)],
            dtype=torch.float64,
        )
        torch.testing.assert_close(model.loss(tokens, targets, reduction="none"), each, atol=1e-12, rtol=0)
        assert model.loss(tokens, targets).item() == pytest.approx(each.sum().item() / 27, rel=1e-12)
        assert model.loss(tokens, targets, reduction="sum").item() == pytest.approx(each.sum().item(), rel=1e-12)


class TestCache:
    @pytest.mark.parametrize("kv_heads", [None, 2])
    @pytest.mark.parametrize("plan", PLANS)
    def test_decoding_in_pieces_matches_the_full_forward(self, plan, kv_heads) -> None:
        assert_heads_matter(kv_heads=kv_heads)
        model = randomised(laplacian_heads=plan, kv_heads=kv_heads)
        tokens, _ = tokens_and_targets()
        whole = model(tokens)
        for pieces in ([1] * 16, [7, 1, 1, 4, 3], [16]):
            cache = KVCache(model.config, 2, 16, torch.float32, "cpu")
            with torch.no_grad():
                parts = [model(piece, cache) for piece in tokens.split(pieces, dim=1)]
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
            assert cache.position == 16


class TestBf16:
    def test_the_residual_stream_is_bf16_and_other_weights_are_not(self) -> None:
        model = randomised(laplacian_heads=2)
        model.embed.to(torch.bfloat16)
        assert {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16} == {"embed.weight"}
        seen: dict[str, torch.dtype] = {}
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(lambda m, i, output, name=name: seen.update({name: output.dtype}))
        tokens, targets = tokens_and_targets()
        assert model.hidden(tokens).dtype == torch.bfloat16
        assert set(seen) >= {"embed", "blocks.0", "blocks.1.attn.q", "blocks.1.mlp.down"}
        assert set(seen.values()) == {torch.bfloat16}
        loss = model.loss(tokens, targets)
        assert loss.dtype == torch.float32
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert p.grad.dtype == p.dtype, name
            assert p.grad.isfinite().all(), name


PARTS = ("residual_lambdas", "x0_lambdas", "value_embeddings")


@pytest.mark.parametrize("has_parts", [False, True])
def test_the_model_with_and_without_the_2026_parts_matches_the_formula(has_parts):
    """A plain float64 reimplementation, layer by layer; and with a cache token by token."""
    torch.manual_seed(0)
    shape = {"layers": 3, "heads": 4, "kv_heads": 2, "width": 32, "vocab": 40, "context": 16}
    model = GPT(GPTConfig(**shape, laplacian_heads=1, **dict.fromkeys(PARTS, has_parts))).double()
    if has_parts:
        assert model.residual_lambdas.tolist() == pytest.approx([1.15, 1.10, 1.05])
        assert model.x0_lambdas.tolist() == pytest.approx([0.2, 0.125, 0.05])
    assert set(model.value_embed) == ({"0", "2"} if has_parts else set())  # every other layer, the last one included
    gates = [block.attn.value_gate.weight for block in model.blocks if hasattr(block.attn, "value_gate")]
    assert all(gate.min() >= 0 and gate.max() <= 0.02 for gate in gates)
    angles = torch.arange(160, dtype=torch.float64)[:, None] / 10_000 ** (torch.arange(4, dtype=torch.float64) / 4)
    model.cos_PD, model.sin_PD = angles.cos(), angles.sin()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    tokens = torch.randint(40, (2, 7))

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    def turned(x):  # B, T, heads, D
        a, b = x[..., :4], x[..., 4:]
        cos, sin = angles.cos()[:7, None], angles.sin()[:7, None]
        return norm(torch.cat([a * cos + b * sin, b * cos - a * sin], -1))

    x = x0 = norm(model.embed.weight[tokens])
    for i, block in enumerate(model.blocks):
        if has_parts:
            x = model.residual_lambdas[i] * x + model.x0_lambdas[i] * x0
        y = norm(x)
        q, k, v = (y @ getattr(block.attn, name).weight.T for name in "qkv")
        v = v.view(2, 7, 2, 8)
        if has_parts and i != 1:
            gate = 3 / (1 + torch.exp(-y[..., :12] @ block.attn.value_gate.weight.T))
            v = v + gate[..., None] * model.value_embed[str(i)].weight[tokens].view(2, 7, 2, 8)
        q, k = turned(q.view(2, 7, 4, 8)), turned(k.view(2, 7, 2, 8)).repeat_interleave(2, 2)
        v = v.repeat_interleave(2, 2)
        logits = torch.einsum("bthd,bshd->bhts", q, k) / 8**0.5
        seen = torch.ones(7, 7, dtype=torch.bool).tril()
        out = torch.einsum("bhts,bshd->bthd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)
        out[:, :, 3] = v[:, :, 3] - out[:, :, 3]
        x = x + out.reshape(2, 7, 32) @ block.attn.out.weight.T
        x = x + torch.relu(norm(x) @ block.mlp.up.weight.T).square() @ block.mlp.down.weight.T
    expected = 15 * torch.tanh(norm(x) @ model.head.weight.T / 15)
    torch.testing.assert_close(model(tokens), expected)
    cache = KVCache(model.config, 2, 7, torch.float64, "cpu")
    steps = torch.cat([model(tokens[:, t : t + 1], cache) for t in range(7)], 1)
    torch.testing.assert_close(steps, expected)
