"""The numerics of this device: attention, Muon and the chunked losses against plain float64 versions of them.

Inputs are rounded to the dtype under check before both sides see them, so that errors are the kernel's. An error
is the largest difference divided by the largest value of the truth.

Shapes: B batch, H heads, G key and value heads, T queries, S keys, D head size; N tokens, V vocabulary or prototypes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lapcli.doctor.checks import Check, Finding, fails, passes
from lapcli.heads.laplacian import laplacian_attention
from lapcli.models.chunked_loss import softcapped_cross_entropy
from lapcli.objectives.dino_losses import sinkhorn_targets, target_cross_entropy
from lapcli.runtime.devices import ComputePolicy, prefer_attention_kernels
from lapcli.training.optimizers import A, B, C, Muon

CPU = torch.device("cpu")
WRONG_KERNEL = "update torch and the driver; until then train with --set train.precision=float32 or train.device=cpu"
WRONG_MUON = "train with --set optimizer.newton_schulz_precision=float32, and report it with `lap doctor --json`"
#: The rounding of bf16 is 2^-8 of a value; sums of products and the stages of the backward add up several of these.
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class AttentionCase:
    name: str
    queries: int
    keys: int
    size: int
    heads: int = 2
    groups: int = 2
    batch: int = 1
    causal: bool = False
    masked: bool = False


CASES = (
    AttentionCase("2048 x 128 causal", 2048, 2048, 128, causal=True),  # the paper's GPT
    AttentionCase("197 x 64", 197, 197, 64, batch=2),  # a ViT: 14 x 14 patches and the class token
    AttentionCase("grouped", 256, 256, 64, heads=4, groups=2, causal=True),
    AttentionCase("cached with a mask", 8, 256, 64, heads=4, groups=2, batch=2, masked=True),
)
Attention = Callable[..., Tensor]


def check_attention(
    case: AttentionCase, dtype: torch.dtype, device: torch.device, attention: Attention = laplacian_attention
) -> Finding:
    """Compare the output and the gradients of q, k and v with dense attention in float64."""
    q, k, v, allowed_BTS, weights = _inputs(case, dtype)
    truth = _outputs(_dense_for(case, allowed_BTS), q.double(), k.double(), v.double(), weights.double())
    on_device = [x.to(device) for x in (q, k, v, weights)]
    mask = allowed_BTS[:, None].to(device) if case.masked else None

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, case.heads // 2, causal=case.causal, mask=mask)

    with KernelNames() as names:
        outputs = _outputs(kernel, *on_device)
    is_fused = names.names and not any("math" in name for name in names.names)
    if device.type == "cuda" and not case.masked and not is_fused:
        return fails(f"no fused kernel: {names.text()}", WRONG_KERNEL, kernels=names.names)
    return compared(outputs, truth, LIMITS[dtype], f"{names.text()}, output and gradients", WRONG_KERNEL)


def check_muon(dtype: torch.dtype, device: torch.device, muon: type[torch.optim.Optimizer] = Muon) -> Finding:
    """Compare two steps on a tall and a wide matrix of steep spectra with the iteration on singular values in float64.

    Newton-Schulz maps U S V^T to U p(p(...p(S))) V^T with p(s) = A s + B s^3 + C s^5, S first divided by its norm.
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in ((96, 256), (256, 96))]
    gradients = [[_steep(start.shape, generator) for start in starts] for _ in range(2)]
    parameters = [torch.nn.Parameter(start.clone().to(device)) for start in starts]
    optimizer: Any = muon(parameters, lr=0.02, momentum=0.95, steps=5, dtype=dtype)  # type: ignore[call-arg]
    truth, averages = [start.double() for start in starts], [torch.zeros_like(x).double() for x in starts]
    for step in gradients:
        for p, gradient in zip(parameters, step, strict=True):
            p.grad = gradient.clone().to(device)
        optimizer.step()
        for i, gradient in enumerate(x.double() for x in step):
            # Nesterov momentum as in nanochat's muon.py: the gradient moved towards the new average.
            averages[i] = 0.95 * averages[i] + 0.05 * gradient
            update = 0.05 * gradient + 0.95 * averages[i]
            truth[i] = truth[i] - 0.02 * max(1.0, truth[i].shape[0] / truth[i].shape[1]) ** 0.5 * _spectral(update)
    # The error of the updates: relative to the weights, a wrong step of 0.02 would hardly show.
    updates = [p.detach().cpu().double() - start for p, start in zip(parameters, starts, strict=True)]
    expected = [x - start.double() for x, start in zip(truth, starts, strict=True)]
    limit = 2e-1 if dtype == torch.bfloat16 else 2e-3  # torch.optim.Muon, which computes in bf16, has 1.1e-1
    return compared(updates, expected, limit, "two updates", WRONG_MUON)


def check_language_loss(
    dtype: torch.dtype, device: torch.device, loss: Callable[..., Tensor] = softcapped_cross_entropy
) -> Finding:
    """Compare value and gradients of the soft-capped cross entropy; a fifth of the targets are ignored."""
    generator = torch.Generator().manual_seed(0)
    x_ND, weight_VD = (torch.randn(shape, generator=generator).to(dtype) for shape in ((512, 64), (4096, 64)))
    targets_N = torch.randint(4096, (512,), generator=generator)
    targets_N[::5] = -1
    x, weight = (y.double().requires_grad_() for y in (x_ND, weight_VD))
    logits = 15.0 * torch.tanh(x @ weight.T / 15.0)
    torch.nn.functional.cross_entropy(logits, targets_N, ignore_index=-1).backward()
    truth = [torch.nn.functional.cross_entropy(logits, targets_N, ignore_index=-1), x.grad, weight.grad]
    mine = [y.to(device).requires_grad_() for y in (x_ND, weight_VD)]
    policy = ComputePolicy(device.type, compiles=device.type == "cuda")  # as a run has it
    value = loss(*mine, targets_N.to(device), 15.0, compiled=policy.compiles, policy=policy)
    value.backward()
    computed = [value, mine[0].grad, mine[1].grad]
    return compared(computed, truth, LIMITS[dtype], "value and gradients", WRONG_KERNEL)


def check_targets_loss(
    dtype: torch.dtype,
    device: torch.device,
    balance: Callable[..., Tensor] = sinkhorn_targets,
    loss: Callable[..., Any] = target_cross_entropy,
) -> Finding:
    """Compare Sinkhorn-Knopp of teacher logits, and value and gradients of the student's cross entropy with them."""
    generator = torch.Generator().manual_seed(0)
    teacher_NV = torch.randn(256, 1024, generator=generator) * 0.3
    # Unit vectors, as normalised by the head: longer vectors would have logits that bf16 cannot represent.
    x_ND, prototypes_VD = (
        torch.nn.functional.normalize(torch.randn(shape, generator=generator), dim=-1).to(dtype)
        for shape in ((256, 32), (1024, 32))
    )
    Q = (teacher_NV.double() / 0.05).exp()
    for _ in range(3):
        # Prototypes first and samples last, so that the targets of a sample sum to 1.
        Q = Q / Q.sum(0)
        Q = Q / Q.sum(1, keepdim=True)
    x, prototypes = (y.double().requires_grad_() for y in (x_ND, prototypes_VD))
    value = -(Q * (x @ prototypes.T / 0.1).log_softmax(1)).sum(1).mean()
    value.backward()
    policy = ComputePolicy(device.type, compiles=device.type == "cuda")  # as a run has it
    # Must follow the computation of Q: on the CPU the targets overwrite these logits.
    targets = balance(teacher_NV.to(device), 0.05, 3, policy)
    mine = [y.to(device).requires_grad_() for y in (x_ND, prototypes_VD)]
    weights = torch.full((256,), 1 / 256, device=device)
    total, _ = loss(*mine, targets, weights, 0.1, policy=policy)
    total.backward()
    computed, truth = [targets, total, mine[0].grad, mine[1].grad], [Q, value, x.grad, prototypes.grad]
    return compared(computed, truth, LIMITS[dtype], "value and gradients", WRONG_KERNEL)


def compared(
    computed: Sequence[Tensor | None], truth: Sequence[Tensor | None], limit: float, what: str, next_step: str
) -> Finding:
    """Pass if the largest of the errors is at most the limit; NaN fails, and so does a missing gradient."""
    error = 0.0
    for x, y in zip(computed, truth, strict=True):
        if x is None or y is None:
            return fails(f"{what}: a gradient is missing", next_step)
        exact = y.detach().cpu().double()
        one = float((x.detach().cpu().double() - exact).abs().max() / exact.abs().max())
        error = one if one != one else max(error, one)  # `max` keeps a NaN that comes first
    text, numbers = f"{what}: error {error:.1e}, at most {limit:.0e} expected", {"error": error, "limit": limit}
    return passes(text, **numbers) if error <= limit else fails(text, next_step, **numbers)


def _inputs(case: AttentionCase, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield q, k, v, the mask of keys that a query attends to (B, T, S), and weights for the sum of the outputs."""
    generator = torch.Generator().manual_seed(0)
    for heads, length in ((case.heads, case.queries), (case.groups, case.keys), (case.groups, case.keys)):
        yield torch.randn(case.batch, heads, length, case.size, generator=generator).to(dtype)
    allowed_BTS = torch.ones(case.batch, case.queries, case.keys, dtype=torch.bool)
    if case.causal or case.masked:
        allowed_BTS = allowed_BTS.tril(case.keys - case.queries)
    if case.masked:
        allowed_BTS[-1, :, : case.keys // 3] = False  # a shorter row, padded on the left
    yield allowed_BTS
    yield torch.randn(case.batch, case.heads, case.queries, case.size, generator=generator).to(dtype)


def _outputs(attention: Attention, q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> list[Tensor | None]:
    # New leaves: gradients of earlier calls must not accumulate.
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    y = attention(*inputs)
    (y * weights).sum().backward()
    return [y.detach(), *(x.grad for x in inputs)]


def _dense_for(case: AttentionCase, allowed_BTS: Tensor) -> Attention:
    """Return dense attention with P as a matrix, and (I - P) v in the last half of the heads."""

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(case.heads // case.groups, dim=1) for x in (k, v))
        logits = (q @ k.mT / case.size**0.5).masked_fill(~allowed_BTS[:, None], float("-inf"))
        mean = logits.softmax(-1) @ v
        current_v = v[:, :, case.keys - case.queries :]  # the values of the queries' own tokens, which come last
        plain = case.heads - case.heads // 2
        return torch.cat([mean[:, :plain], current_v[:, plain:] - mean[:, plain:]], dim=1)

    return dense


def _steep(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return a matrix like a gradient: its singular values span four orders of magnitude."""
    U, _, Vh = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    return U @ torch.diag(torch.logspace(0, -4, U.shape[1])) @ Vh


def _spectral(matrix: Tensor) -> Tensor:
    """Apply the Newton-Schulz iteration to the singular values of a matrix."""
    U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    return U @ torch.diag(s) @ Vh


class KernelNames(TorchDispatchMode):
    """Records which of torch's attention kernels run, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if "scaled_dot_product" in name and name not in self.names:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def text(self) -> str:
        short = [name.removeprefix("_scaled_dot_product_").replace("_attention", "") for name in self.names]
        return " and ".join(short) if short else "unfused"


def kernel_checks(device: torch.device) -> list[Check]:
    """Return all kernel checks, on the kernels that training prefers; bf16 where runs compute in it."""
    named: dict[str, Callable[[], Finding]] = {}
    for name, dtype in DTYPES.items() if device.type == "cuda" else [("float32", torch.float32)]:
        named |= {f"{case.name}, {name}": partial(check_attention, case, dtype, device) for case in CASES}
        named |= {
            f"Muon, {name}": partial(check_muon, dtype, device),
            f"GPT loss, {name}": partial(check_language_loss, dtype, device),
            f"DINO loss, {name}": partial(check_targets_loss, dtype, device),
        }
    return [Check("kernels", name, partial(_with_preference, device, run), True) for name, run in named.items()]


def _with_preference(device: torch.device, run: Callable[[], Finding]) -> Finding:
    with prefer_attention_kernels(device):
        return run()
