"""The GPT's tensors under the names that others give them: nanochat's checkpoints and transformers' `nanochat`."""

import re

#: Ours, nanochat's, transformers'; `N` is the layer.
_TABLE = (
    ("embed.weight", "transformer.wte.weight", "model.embed_tokens.weight"),
    ("head.weight", "lm_head.weight", "lm_head.weight"),
    ("blocks.N.attn.q.weight", "transformer.h.N.attn.c_q.weight", "model.layers.N.self_attn.q_proj.weight"),
    ("blocks.N.attn.k.weight", "transformer.h.N.attn.c_k.weight", "model.layers.N.self_attn.k_proj.weight"),
    ("blocks.N.attn.v.weight", "transformer.h.N.attn.c_v.weight", "model.layers.N.self_attn.v_proj.weight"),
    ("blocks.N.attn.out.weight", "transformer.h.N.attn.c_proj.weight", "model.layers.N.self_attn.o_proj.weight"),
    ("blocks.N.mlp.up.weight", "transformer.h.N.mlp.c_fc.weight", "model.layers.N.mlp.fc1.weight"),
    ("blocks.N.mlp.down.weight", "transformer.h.N.mlp.c_proj.weight", "model.layers.N.mlp.fc2.weight"),
)
_TO_TRANSFORMERS = {ours: theirs for ours, _, theirs in _TABLE}
_FROM_TRANSFORMERS = {theirs: ours for ours, _, theirs in _TABLE}
_FROM_NANOCHAT = {theirs: ours for ours, theirs, _ in _TABLE}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def to_transformers(name: str) -> str:
    renamed = _renamed(name, _TO_TRANSFORMERS)
    assert renamed is not None, name
    return renamed


def from_transformers(name: str) -> str | None:
    """Our name; none for a tensor that our GPT does not have."""
    return _renamed(name, _FROM_TRANSFORMERS)


def from_nanochat(name: str) -> str | None:
    """Our name; none for a tensor that our GPT does not have. `torch.compile` may have left its prefix."""
    return _renamed(name.removeprefix("_orig_mod."), _FROM_NANOCHAT)


def _renamed(name: str, table: dict[str, str]) -> str | None:
    layer = _LAYER.search(name)
    found = table.get(_LAYER.sub("N", name, count=1))
    return found if found is None or layer is None else found.replace(".N.", f".{layer[0]}.")
