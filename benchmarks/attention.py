"""Cost of Laplacian heads: an attention layer, forward and backward, with half of its heads Laplacian.

1 sequence of 2048, width 1280, 10 heads, float32: projections, rotary, QK norm, attention, output projection.
"""

from functools import partial

import torch
from measure import compare, mebibytes, peak_bytes
from torch import Tensor

from lapcli.heads.laplacian import HeadOperators
from lapcli.models.gpt import Attention, GPTConfig

TARGET_TIME, TARGET_MEMORY = 1.03, 1.10
HEADS, TOKENS, WIDTH = 10, 2048, 1280


class DenseOperators(HeadOperators):
    """The same with an explicit `P`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **others: object) -> Tensor:  # type: ignore[override]
        T, D = q.shape[2:]
        future_TT = torch.ones(T, T, dtype=torch.bool).triu(1)
        P_BHTT = (q @ k.mT / D**0.5).masked_fill(future_TT, -torch.inf).softmax(-1)
        first = self.heads - self.laplacian_heads
        return torch.cat([P_BHTT[:, :first], torch.eye(T) - P_BHTT[:, first:]], dim=1) @ v


class DenseAttention(Attention):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.operators.__class__ = DenseOperators


def main() -> None:
    torch.set_num_threads(1)  # which waits for nobody
    builders = {
        "k = 0": partial(forward_and_backward, Attention, 0),
        "k = H/2": partial(forward_and_backward, Attention, HEADS // 2),
        "k = H": partial(forward_and_backward, Attention, HEADS),
        "k = H/2, dense": partial(forward_and_backward, DenseAttention, HEADS // 2),
    }
    times = compare({name: builder for name, builder in builders.items() if "dense" not in name}, builds=3, rounds=6)
    times |= compare({name: builders[name] for name in ("k = 0", "k = H/2, dense")}, builds=1, rounds=2)
    memory = {name: peak_bytes(builder()) for name, builder in builders.items()}
    print(f"attention layer, {TOKENS} tokens, width {WIDTH}, {HEADS} heads, one thread")
    print(f"{'':<16}{'time':>8}{'peak':>14}{'ratio':>8}")
    for name in builders:
        print(f"{name:<16}{times[name]:>8.3f}{mebibytes(memory[name]):>14}{memory[name] / memory['k = 0']:>8.3f}")
    print(f"target for k = H/2: time at most {TARGET_TIME}, peak memory at most {TARGET_MEMORY}")


def forward_and_backward(kind: type[Attention], laplacian_heads: int):  # type: ignore[no-untyped-def]
    config = GPTConfig(layers=1, heads=HEADS, width=WIDTH, vocab=1, context=TOKENS, laplacian_heads=laplacian_heads)
    torch.manual_seed(0)
    layer = kind(config, 0)
    angles = torch.rand(TOKENS, 1, config.head_size // 2)
    x_BTC = torch.randn(1, TOKENS, WIDTH, requires_grad=True)

    def run() -> None:
        layer(x_BTC, (angles.cos(), angles.sin())).sum().backward()
        layer.zero_grad(set_to_none=True)
        x_BTC.grad = None

    return run


if __name__ == "__main__":
    main()
