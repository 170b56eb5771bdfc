"""Our complete training step, plain and compiled, against a plain reference step.

Layers 4, width 256, heads 4, vocabulary 16,384, 8 sequences of 512, float32. The reference is nanochat's step of
late 2025, reimplemented here: all logits at once, cross entropy of torch, five bf16
Newton-Schulz iterations matrix by matrix, fused AdamW, clipping; nothing compiled. A processor without bf16 arithmetic
spends most of the reference step in those iterations, so the same step with float32 iterations is also measured.

The candidates take turns in one process. Memory is the growth of a separate process over its imports.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import alternate, mebibytes, peak_rss
from torch import Tensor, nn

from lapcli.models.gpt import GPT, GPTConfig
from lapcli.objectives.objective import ParameterGroup
from lapcli.training.optimizers import Optimizers

LAYERS, WIDTH, HEADS, VOCAB = 4, 256, 4, 16_384
SEQUENCES, TOKENS = 8, 512
ADAMW = {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
MUON_RATE, EMBEDDING_RATE, HEAD_RATE = 0.02, 0.2 * (WIDTH / 768) ** -0.5, 0.004 * (WIDTH / 768) ** -0.5
CLIP, MOMENTUM = 1.0, 0.95
TARGETS = {"ours": (1.5, 0.55), "ours, compiled": (1.8, None)}

Step = Callable[[], object]


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def our_step(compiled: bool) -> Step:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(layers=LAYERS, width=WIDTH, heads=HEADS, vocab=VOCAB, context=TOKENS, laplacian_heads=HEADS // 2)
    )
    if compiled:
        model.use_compile()
    named = dict(model.named_parameters())
    embedding, head = ({name: named.pop(name)} for name in ("embed.weight", "head.weight"))
    optimizers = Optimizers(
        [
            ParameterGroup("matrices", "muon", MUON_RATE, named, {"momentum": MOMENTUM}),
            ParameterGroup("embedding", "adamw", EMBEDDING_RATE, embedding, dict(ADAMW)),
            ParameterGroup("head", "adamw", HEAD_RATE, head, dict(ADAMW)),
        ]
    )
    tokens_BT, targets_BT = batch()

    def step() -> float:
        loss = model.loss(tokens_BT, targets_BT)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if norm > CLIP:
            nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizers.step()
        optimizers.zero_grad()
        return loss.item()

    return step


class ReferenceGPT(nn.Module):
    """The plain transformer, written out without optimisations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            square = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("q", "k", "v", "out")}
            up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
            self.layers.append(nn.ModuleDict({**square, "up": up, "down": down}))
        half = WIDTH // HEADS // 2
        angles = torch.arange(TOKENS)[:, None] / 10_000 ** (torch.arange(half) / half)
        self.cos, self.sin = angles.cos().bfloat16()[:, None], angles.sin().bfloat16()[:, None]

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = _norm(self.embed(tokens))
        for layer in self.layers:
            z = _norm(x)
            q, k, v = (layer[name](z).view(SEQUENCES, TOKENS, HEADS, -1) for name in ("q", "k", "v"))
            q, k = _norm(self.rotate(q)), _norm(self.rotate(k))
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](y.transpose(1, 2).contiguous().view(SEQUENCES, TOKENS, WIDTH))
            x = x + layer["down"](F.relu(layer["up"](_norm(x))).square())
        logits = self.head(_norm(x)).float()
        logits = 15 * torch.tanh(logits / 15)
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos + b * self.sin, b * self.cos - a * self.sin], dim=-1).to(x.dtype)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def reference_step(newton_schulz: torch.dtype) -> Step:
    torch.manual_seed(0)
    model = ReferenceGPT()
    matrices = list(model.layers.parameters())
    averages = [torch.zeros_like(p) for p in matrices]
    groups = [
        {"params": [model.embed.weight], "lr": EMBEDDING_RATE},
        {"params": [model.head.weight], "lr": HEAD_RATE},
    ]
    adamw = torch.optim.AdamW(groups, fused=True, **ADAMW)  # type: ignore[arg-type]
    tokens, targets = batch()

    def step() -> float:
        loss = model.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        with torch.no_grad():
            for p, average in zip(matrices, averages, strict=True):
                average.lerp_(p.grad, 1 - MOMENTUM)
                factor = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                update = p.grad.lerp_(average, MOMENTUM).to(newton_schulz)
                p.sub_(_newton_schulz(update), alpha=MUON_RATE * factor)
        model.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _newton_schulz(X: Tensor) -> Tensor:
    tall = X.shape[0] > X.shape[1]
    X = X.T if tall else X
    X = X / (X.norm() + 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if tall else X


VARIANTS: dict[str, Callable[[], Step]] = {
    "reference": lambda: reference_step(torch.bfloat16),
    "  float32 N.-S.": lambda: reference_step(torch.float32),
    "ours": lambda: our_step(compiled=False),
    "ours, compiled": lambda: our_step(compiled=True),
}


def growth(variant: str) -> int:
    """Growth of a fresh process in bytes over four steps."""
    command = [sys.executable, str(Path(__file__)), variant]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_growth(variant: str) -> None:
    before = peak_rss()
    step = VARIANTS[variant]()
    for _ in range(4):
        step()
    print(peak_rss() - before)


def main() -> None:
    memory = {name: growth(name) for name in VARIANTS}
    seconds = alternate({name: build() for name, build in VARIANTS.items()}, rounds=5, warmup=2)
    units = SEQUENCES * TOKENS
    print(f"training step, {units} tokens, {torch.get_num_threads()} threads")
    print(f"{'':<16}{'tokens/s':>10}{'ratio':>7}{'target':>8}{'grows by':>14}{'ratio':>7}{'target':>8}")
    for name in VARIANTS:
        speed_target, memory_target = TARGETS.get(name, (None, None))
        print(
            f"{name:<16}{units / seconds[name]:>10,.0f}{seconds['reference'] / seconds[name]:>7.2f}"
            f"{f'>= {speed_target}' if speed_target else '':>8}{mebibytes(memory[name]):>14}"
            f"{memory[name] / memory['reference']:>7.2f}{f'<= {memory_target}' if memory_target else '':>8}"
        )


if __name__ == "__main__":
    print_growth(sys.argv[1]) if len(sys.argv) > 1 else main()
