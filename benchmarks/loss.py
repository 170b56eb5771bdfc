"""The chunked loss against the plain loss (full float32 logits, soft cap, cross entropy) at a vocabulary of 65,536."""

import torch
import torch.nn.functional as F
from measure import alternate, mebibytes, peak_bytes
from torch import Tensor

from lapcli.models.chunked_loss import softcapped_cross_entropy

TOKENS, VOCAB, WIDTH, SOFTCAP = 2048, 65_536, 256, 15.0
TARGET_TIME, TARGET_MEMORY = 1.0, 0.25


def plain_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: float) -> Tensor:
    logits_NV = F.linear(x_ND, weight_VD).float()
    return F.cross_entropy(softcap * torch.tanh(logits_NV / softcap), targets_N, ignore_index=-1)


def main() -> None:
    torch.manual_seed(0)
    x_ND = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight_VD = torch.randn(VOCAB, WIDTH).mul_(0.05).requires_grad_()
    targets_N = torch.randint(VOCAB, (TOKENS,))

    def forward_and_backward(loss):  # type: ignore[no-untyped-def]
        def run() -> None:
            loss(x_ND, weight_VD, targets_N, SOFTCAP).backward()
            x_ND.grad = weight_VD.grad = None

        return run

    candidates = {
        "plain": forward_and_backward(plain_loss),
        "chunked": forward_and_backward(softcapped_cross_entropy),
    }
    seconds = alternate(candidates, rounds=5)
    memory = {name: peak_bytes(run) for name, run in candidates.items()}
    print(
        f"loss and gradients, {TOKENS} tokens, vocabulary {VOCAB:,}, width {WIDTH}, {torch.get_num_threads()} threads"
    )
    print(f"{'':<10}{'ms':>9}{'ratio':>8}{'peak':>15}{'ratio':>8}")
    for name in candidates:
        time_ratio, memory_ratio = seconds[name] / seconds["plain"], memory[name] / memory["plain"]
        print(
            f"{name:<10}{seconds[name] * 1e3:>9.0f}{time_ratio:>8.3f}{mebibytes(memory[name]):>15}{memory_ratio:>8.3f}"
        )
    print(f"target for chunked: time at most {TARGET_TIME}, peak memory at most {TARGET_MEMORY}")


if __name__ == "__main__":
    main()
