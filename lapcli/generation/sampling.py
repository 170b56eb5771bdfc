"""Drawing tokens. The noise of a draw is a function of (prompt, seed, sample, position) and of nothing else: not of
the batch, the other rows, the device or the order in which things are asked.

Shapes: B rows, V vocabulary, K likeliest tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token; `top_k` draws among so many of them."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0


def noise_key(prompt: Sequence[int], seed: int, sample: int) -> int:
    text = f"{seed} {sample} {' '.join(map(str, prompt))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def uniform(key: int, position: int) -> float:
    """In [0, 1): the position-th number of the splitmix64 generator that starts at `key`."""
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / 2**53


def draw(logits_BV: Tensor, sampling: Sampling, noise: Sequence[float]) -> list[int]:
    """One token a row: where its noise falls in the cumulated probabilities."""
    if sampling.temperature == 0:
        return [int(id_) for id_ in logits_BV.argmax(dim=-1).tolist()]
    ids_BK: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[1]:
        logits_BV, ids_BK = logits_BV.topk(sampling.top_k)
    if logits_BV.device.type == "mps":  # has no float64
        logits_BV = logits_BV.cpu()
    cumulated_BV = (logits_BV.double() / sampling.temperature).softmax(-1).cumsum(-1)
    u_B = torch.tensor(noise, dtype=torch.float64, device=logits_BV.device) * cumulated_BV[:, -1]
    drawn_B = torch.searchsorted(cumulated_BV, u_B[:, None], right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    if ids_BK is not None:
        drawn_B = ids_BK.gather(1, drawn_B[:, None].to(ids_BK.device))[:, 0]
    return [int(id_) for id_ in drawn_B.tolist()]
