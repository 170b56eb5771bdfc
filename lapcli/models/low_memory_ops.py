"""Operations that save one of their two large tensors for the backward, where torch's save both.

RMSNorm and relu^2 save their outputs, which the matrix product after them saves anyway; GELU before a linear layer
saves its input, and recomputes its output.

They reduce the memory of an uncompiled step on the CPU. With torch's own operations in their place the peak of
the step of `benchmarks/training_step.py` is higher by 27% (RMSNorm), 34% (relu^2) and 62% (both), that of
`benchmarks/self_supervised.py` by 14% (GELU); times are the same within the noise of the measurement. All
other devices use torch's RMSNorm and GELU, and so does the meta device, on which tests follow a GPU's code path.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor) -> Tensor:
    """Compute y = x r with r = 1 / sqrt(mean(x^2) + eps) over the channels; no gain."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return F.rms_norm(x, (x.shape[-1],))
    y: Tensor = _RMSNorm.apply(x)
    return y


def relu_squared(x: Tensor) -> Tensor:
    """Compute relu(x)^2. Not in place: selective activation checkpointing may have saved `x` for the backward."""
    if torch.compiler.is_compiling():
        return F.relu(x).square()
    y: Tensor = _ReLUSquared.apply(x)
    return y


def gelu_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Compute layer(gelu(x))."""
    is_plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not is_plain or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return layer(F.gelu(x))
    y: Tensor = _GELULinear.apply(x, layer.weight, layer.bias)
    return y


class _RMSNorm(torch.autograd.Function):
    """dx = r (dy - y mean(dy y))"""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # Not x.square().mean(), which would allocate another tensor of the size of x.
        mean_of_squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        # The eps of F.rms_norm, so that compiled and uncompiled steps agree.
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
        y = x.relu().square_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        # The root as y / sqrt(y): torch's sqrt is ten times slower than its rsqrt on a CPU.
        # Clamped, since the infinite rsqrt of 0 times 0 would be NaN.
        root = y.clamp_min(torch.finfo(y.dtype).tiny).rsqrt_().mul_(y)
        return torch.addcmul(root.new_zeros(()), root, dy, value=2, out=root)  # 2 root dy in one pass, over the root


class _GELULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NF: Tensor, weight_CF: Tensor, bias_C: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NF, weight_CF)
        return F.linear(F.gelu(x_NF), weight_CF, bias_C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x_NF, weight_CF = ctx.saved_tensors
        rows_NC = dy_NC.flatten(0, -2)
        dweight_CF = rows_NC.t() @ F.gelu(x_NF).flatten(0, -2)
        dx_NF = torch.ops.aten.gelu_backward(dy_NC @ weight_CF, x_NF)
        return dx_NF, dweight_CF, rows_NC.sum(0) if ctx.needs_input_grad[2] else None
