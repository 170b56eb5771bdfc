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
    tokens: list[int] = []
    ahead = prompt
    while len(tokens) < max_tokens:
        x_C = model.hidden(torch.tensor([ahead], device=device), cache)[0, -1]  # only the last token's logits
        tokens.append(_pick(model.logits(x_C), temperature, top_k, generator))
        ahead = tokens[-1:]
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
