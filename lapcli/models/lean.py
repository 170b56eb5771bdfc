"""RMSNorm and relu^2 that keep only their outputs for the backward, which the matrix product after them keeps anyway.

Composed from torch's operations they would keep their inputs as well, a fourth of a block's activations, and their
backward would walk over them several times more. Compiled code does as well by itself, and so do the GPU's kernels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor) -> Tensor:
    """y = x r with r = 1 / sqrt(mean(x^2) + eps) over the channels; no gain."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return F.rms_norm(x, (x.shape[-1],))
    y: Tensor = _RMSNorm.apply(x)
    return y


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2, in place of `x`."""
    if torch.compiler.is_compiling():
        return F.relu(x).square()
    y: Tensor = _ReLUSquared.apply(x)
    return y


class _RMSNorm(torch.autograd.Function):
    """dx = r (dy - y mean(dy y))"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mean_of_squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        r = mean_of_squares.add_(torch.finfo(x.dtype).eps).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        y, r = ctx.saved_tensors
        dx = dy * y
        return torch.addcmul(dy, y, dx.mean(-1, keepdim=True), value=-1, out=dx).mul_(r)


class _ReLUSquared(torch.autograd.Function):
    """dx = 2 relu(x) dy = 2 sqrt(y) dy"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        y = x.relu_().square_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        # The root as y / sqrt(y): torch's sqrt is ten times slower than its rsqrt on a CPU.
        root = y.clamp_min(torch.finfo(y.dtype).tiny).rsqrt_().mul_(y)
        return torch.addcmul(root.new_zeros(()), root, dy, value=2, out=root)
