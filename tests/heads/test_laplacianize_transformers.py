"""Laplacian heads in transformers models, against dense `I - P` in float64 and without a cache."""

import pytest
import torch

from lapcli import laplacianize
from lapcli.heads.laplacianize import load_laplacian

transformers = pytest.importorskip("transformers", reason="the dev extra has it")

ENDS = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **ENDS,
}
LANGUAGE = {
    "llama": (transformers.LlamaConfig, SHAPE),
    "qwen3": (transformers.Qwen3Config, {**SHAPE, "head_dim": 8}),
    "nanochat": (transformers.NanoChatConfig, SHAPE),
    "gpt2": (transformers.GPT2Config, {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4} | ENDS),
}
PLAN = [0, 3, 4]
OURS = "dense_laplacian_in_float64"


def built(name):
    torch.manual_seed(0)
    kind, options = LANGUAGE[name]
    model = transformers.AutoModelForCausalLM.from_config(kind(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2 + (1.0 if p.ndim == 1 else 0.0))
    return model


def dense(module, query, key, value, attention_mask, scaling=None, **_):
    """(I - P) v in the last heads of each layer; causal, without a cache."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.double() for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
    logits = q @ k.transpose(2, 3) * scaling
    if getattr(module, "is_causal", False):
        logits = logits.masked_fill(torch.ones_like(logits[0, 0]).triu(1).bool(), float("-inf"))
    p = logits.softmax(-1)
    laplacian = torch.arange(q.shape[1]) >= q.shape[1] - PLAN[module.layer_idx]
    matrix = torch.where(laplacian[:, None, None], torch.eye(p.shape[-1], dtype=p.dtype) - p, p)
    return (matrix @ v).transpose(1, 2).to(query.dtype), None


@pytest.fixture(scope="module", autouse=True)
def registered():
    transformers.AttentionInterface.register(OURS, dense)


@pytest.mark.parametrize("name", LANGUAGE)
@torch.inference_mode()
def test_logits_match_the_dense_matrix(name):
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    oracle = built(name)
    oracle.set_attn_implementation(OURS)
    expected = oracle(tokens, use_cache=False).logits
    plain = built(name)
    turned = laplacianize(built(name), PLAN)
    assert torch.allclose(turned(tokens).logits, expected, atol=2e-5)
    assert not torch.allclose(plain(tokens).logits, expected, atol=1e-2)
    turned.set_attn_implementation("eager")
    assert torch.allclose(turned(tokens).logits, expected, atol=2e-5)
    assert torch.equal(laplacianize(turned, 0)(tokens).logits, eager(plain)(tokens).logits)
    assert turned.state_dict().keys() == plain.state_dict().keys()


@torch.inference_mode()
def test_a_vit_matches_the_dense_matrix():
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=8, patch_size=2)).eval()
    for number, module in enumerate(m for m in model.modules() if type(m).__name__ == "ViTAttention"):
        module.layer_idx = number  # which `dense` reads
    plain = model(images).last_hidden_state
    model.set_attn_implementation(OURS)
    expected = model(images).last_hidden_state
    model.set_attn_implementation("sdpa")
    assert torch.allclose(laplacianize(model, PLAN)(images).last_hidden_state, expected, atol=2e-5)
    assert not torch.allclose(plain, expected, atol=1e-3)


def eager(model):
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", LANGUAGE)
@torch.inference_mode()
def test_generation_with_caches_and_left_padding(name):
    model = laplacianize(built(name), PLAN)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 97, (length,), generator=generator) for length in (9, 4)]
    padded = torch.stack([torch.nn.functional.pad(row, (9 - len(row), 0)) for row in prompts])
    mask = (padded != 0).long()
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = [model.generate(row[None], use_cache=False, **options)[0, len(row) :].tolist() for row in prompts]
    for way in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        rows = model.generate(padded, attention_mask=mask, **options, **way)
        assert rows[:, 9:].tolist() == expected


@torch.inference_mode()
def test_saving_keeps_the_plan_and_a_plain_load_fails(tmp_path):
    tokens = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    model = laplacianize(built("llama"), PLAN)
    model.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    again = load_laplacian(transformers.AutoModelForCausalLM, tmp_path).eval()
    assert again.config.laplacian_heads == PLAN
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    laplacianize(model, 0).save_pretrained(tmp_path / "plain")
    assert (tmp_path / "plain" / "model.safetensors").exists()


def test_unsupported_models_are_refused_with_the_classes_found():
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    with pytest.raises(ValueError, match="BertSelfAttention"):
        laplacianize(transformers.BertModel(config), 1)
    with pytest.raises(ValueError, match="0 to 4 can be Laplacian"):
        laplacianize(built("llama"), 5)
