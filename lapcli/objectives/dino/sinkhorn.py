"""Sinkhorn-Knopp: teacher logits become targets that use all prototypes alike.

    Q = exp(z / T)
    three times:  divide each prototype by its sum over the samples of all processes,
                  then each sample by its sum over the prototypes

Dividing by constants (the sum of Q, the numbers of samples and prototypes) changes nothing, because rows end with a sum
of 1. After a prototype is divided, Q is exp(z / T + s) with one number s for each prototype, and dividing the samples
makes it softmax(z / T + s). So the iterations only move s, row by row in chunks, and the targets take the place of the
logits: one N x K matrix in all. Each prototype's largest logit (of all processes) is subtracted first; that is a part
of s, and keeps exp from overflowing where z / T goes beyond 88.

Shapes: N samples of this process, K prototypes, R samples of a chunk.
"""

import torch
import torch.distributed as dist
from torch import Tensor

#: Elements of a chunk: a CPU's cache holds a few, a GPU wants large kernels.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


@torch.no_grad()
def sinkhorn_targets(logits_NK: Tensor, temperature: float, iterations: int = 3) -> Tensor:
    """Turns logits into targets, in their place; rows sum to 1. Processes take part together, each with its samples."""
    scaled_NK = logits_NK.div_(temperature)
    chunks = row_chunks(len(scaled_NK), scaled_NK.shape[1], scaled_NK.device)
    buffer = torch.empty_like(scaled_NK[: len(chunks[0])]) if chunks else scaled_NK
    s_K = -_log_sums(scaled_NK, chunks, buffer)
    for _ in range(iterations - 1):
        mass_K = scaled_NK.new_zeros(scaled_NK.shape[1])
        for rows in chunks:
            mass_K += _softmax(scaled_NK[rows.start : rows.stop], s_K, buffer[: len(rows)]).sum(0)
        s_K -= _reduced(mass_K, dist.ReduceOp.SUM).log_()
    for rows in chunks:
        part_RK = scaled_NK[rows.start : rows.stop]
        _softmax(part_RK, s_K, part_RK)
    return scaled_NK


def row_chunks(count: int, width: int, device: torch.device, fewest: int = 1) -> list[range]:
    """Rows that are worked on together."""
    size = max(fewest, CHUNK_ELEMENTS.get(device.type, 2**24) // width)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _log_sums(scaled_NK: Tensor, chunks: list[range], buffer: Tensor) -> Tensor:
    """log sum exp over the samples of all processes, for each prototype."""
    nothing = scaled_NK.new_full((scaled_NK.shape[1],), float("-inf"))
    most_K = _reduced(scaled_NK.amax(0) if chunks else nothing, dist.ReduceOp.MAX)
    sums_K = torch.zeros_like(most_K)
    for rows in chunks:
        sums_K += torch.sub(scaled_NK[rows.start : rows.stop], most_K, out=buffer[: len(rows)]).exp_().sum(0)
    return _reduced(sums_K, dist.ReduceOp.SUM).log_().add_(most_K)


def _softmax(scaled_RK: Tensor, s_K: Tensor, out_RK: Tensor) -> Tensor:
    torch.add(scaled_RK, s_K, out=out_RK)
    out_RK.sub_(out_RK.amax(1, keepdim=True)).exp_()
    return out_RK.div_(out_RK.sum(1, keepdim=True))


def _reduced(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x, operation)
    return x
