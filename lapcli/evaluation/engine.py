"""Text from a GPT: prefill the prompt once, then one token at a time with a cache."""

import torch
from torch import Tensor

from lapcli.models.gpt import GPT, KVCache


@torch.inference_mode()
def generate(
    model: GPT, prompt: list[int], max_tokens: int, *, temperature: float = 0.0, top_k: int | None = None, seed: int = 0
) -> list[int]:
    """The tokens that follow the prompt; temperature 0 takes the likeliest."""
    device = model.embed.weight.device
    cache = KVCache(model.config, 1, len(prompt) + max_tokens, model.embed.weight.dtype, device)
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device draws the same
    logits_V = model(torch.tensor([prompt], device=device), cache)[0, -1]
    tokens = [_pick(logits_V, temperature, top_k, generator)]
    while len(tokens) < max_tokens:
        logits_V = model(torch.tensor([tokens[-1:]], device=device), cache)[0, -1]
        tokens.append(_pick(logits_V, temperature, top_k, generator))
    return tokens


def _pick(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.float().cpu()
    ids: Tensor | None = None
    if top_k is not None:
        logits_V, ids = logits_V.topk(min(top_k, len(logits_V)))
    drawn = int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator))
    return drawn if ids is None else int(ids[drawn])
