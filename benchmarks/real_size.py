"""The paper's 561M GPT at full size: a forward and backward of a sequence of 256 tokens, half its heads Laplacian."""

import time

import torch
from measure import mebibytes, peak_rss

from lapcli.models.gpt import GPT, GPTConfig

TOKENS = 256


def main() -> None:
    before = peak_rss()
    model = GPT(GPTConfig(layers=20, heads=10, width=1280, vocab=65_536, laplacian_heads=5))
    count = sum(p.numel() for p in model.parameters())
    built = peak_rss()
    tokens_BT = torch.randint(65_536, (1, TOKENS))
    targets_BT = torch.randint(65_536, (1, TOKENS))
    seconds = []
    for _ in range(2):  # the first touches its memory for the first time
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = model.loss(tokens_BT, targets_BT)
        loss.backward()
        seconds.append(time.perf_counter() - start)
    print(f"{count:,} parameters, one sequence of {TOKENS}, float32, {torch.get_num_threads()} threads")
    print(f"loss {loss.item():.4f} (ln 65,536 = 11.0904)")
    print(f"forward and backward  {seconds[0]:.1f} s, again {seconds[1]:.1f} s")
    print(
        f"peak memory           {mebibytes(peak_rss())} ({mebibytes(before)} before, {mebibytes(built)} with the model)"
    )
    print(f"weights and gradients {mebibytes(8 * count)} of it")


if __name__ == "__main__":
    main()
