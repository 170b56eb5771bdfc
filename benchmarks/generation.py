"""Generation on the quickstart model: 10 samples of 64 tokens from a prompt of 256.

One call for ten samples against one sample, and against ten calls of the same engine. The weights are random and
there is no end token, so that every sample has 64 tokens.
"""

import torch
from measure import alternate

from lapcli.generation.engine import Engine, Sampling
from lapcli.models.gpt import GPT, GPTConfig

SAMPLES, TOKENS, PROMPT = 10, 64, 256
TARGETS = {"one sample": 4.0, "ten calls": 0.5}


def main() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, width=192, heads=4, vocab=3072, context=256, laplacian_heads=2))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.05)
    prompt = torch.randint(3072, (PROMPT,)).tolist()
    engine = Engine(model)
    settings = Sampling(TOKENS, temperature=0.8, top_k=50)

    def ten_calls() -> None:
        for seed in range(SAMPLES):
            engine.complete([prompt], Sampling(TOKENS, temperature=0.8, top_k=50, seed=seed))

    seconds = alternate(
        {
            "ten samples": lambda: engine.complete([prompt], settings, samples=SAMPLES),
            "one sample": lambda: engine.complete([prompt], settings),
            "ten calls": ten_calls,
        },
        rounds=5,
    )
    ours = seconds["ten samples"]
    print(f"{SAMPLES} samples of {TOKENS} tokens from a prompt of {PROMPT}: {ours:.3f} s, "
          f"{SAMPLES * TOKENS / ours:,.0f} tokens/s, {torch.get_num_threads()} threads")  # fmt: skip
    for name, target in TARGETS.items():
        print(f"  times {name:<12}{ours / seconds[name]:>7.2f}   target <= {target}   ({seconds[name]:.3f} s)")


if __name__ == "__main__":
    main()
