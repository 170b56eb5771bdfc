"""Cost of each head operator: a GPT attention layer, forward and backward, with the operator in half of its heads.

Single-thread CPU time against plain attention (compiled), peak memory (uncompiled), and parameter bytes.
"""

import argparse
import time
from functools import partial
from typing import Any

import torch
from measure import compare, mebibytes, peak_bytes

from lapcli.models.gpt import Attention, GPTConfig

TARGET = 1.05  # for those that are an epilogue of values and output alone
TARGETED = ("laplacian", "mix", "value-only", "exclusive")
HEADS, WIDTH = 8, 512
CASES: dict[str, dict[str, Any]] = {
    "attention": {},
    "laplacian": {"laplacian": 4},
    "mix": {"mix": {"heads": 4, "learn": ["alpha"]}},
    "value-only": {"value-only": 4},
    "centered": {"centered": 4},
    "attnscale": {"attnscale": 4},
    "shaped": {"shaped": 4},
    "exclusive": {"exclusive": 4},
    "gated exclusive": {"exclusive": {"heads": 4, "gate": "tanh"}},
    "headwise gate": {"gate": 4},
    "elementwise gate": {"gate": {"heads": 4, "form": "elementwise"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="cases with commas between them", default=",".join(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: CASES[name] for name in ("attention", *options.only.split(",")) if name in CASES}
    builders = {
        name: partial(forward_and_backward, operators, options.tokens, not options.no_compile)
        for name, operators in chosen.items()
    }
    times = compare(builders, builds=1, rounds=options.rounds, clock=time.process_time)
    print(f"attention layer, {options.tokens} tokens, width {WIDTH}, {HEADS} heads, half with the operator, one thread")
    print(f"{'':<20}{'time':>8}{'peak':>14}{'ratio':>8}{'parameters':>14}")
    base = peak_bytes(forward_and_backward({}, options.tokens, False))
    for name, operators in chosen.items():
        memory = peak_bytes(forward_and_backward(operators, options.tokens, False))
        layer = build(operators, options.tokens)
        size = sum(p.numel() * p.element_size() for p in layer.operators.parameters())
        mark = " *" if name in TARGETED else ""
        print(f"{name:<20}{times[name]:>8.3f}{mebibytes(memory):>14}{memory / base:>8.3f}{size:>12} B{mark}")
    print(f"* target: time at most {TARGET} compiled")


def build(operators: dict[str, Any], tokens: int) -> Any:
    """The attention of the second layer."""
    config = GPTConfig(layers=2, heads=HEADS, width=WIDTH, vocab=1, context=tokens, operators=operators)
    torch.manual_seed(0)
    layer: Any = Attention(config, 1)
    for name, p in layer.named_parameters():
        if "operators" not in name:
            torch.nn.init.normal_(p, std=0.02)
    return layer


def forward_and_backward(operators: dict[str, Any], tokens: int, compiles: bool):  # type: ignore[no-untyped-def]
    layer = build(operators, tokens)
    angles = torch.rand(tokens, 1, WIDTH // HEADS // 2)
    x_BTC = torch.randn(1, tokens, WIDTH, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer(x, (angles.cos(), angles.sin()), None).sum()

    function = torch.compile(forward, dynamic=False) if compiles else forward

    def run() -> None:
        function(x_BTC).backward()
        layer.zero_grad(set_to_none=True)
        x_BTC.grad = None

    return run


if __name__ == "__main__":
    main()
