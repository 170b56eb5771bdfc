"""RMSNorm, relu^2 and GELU with a linear layer: against torch's, by differences, and what they hold."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lapcli.models.gpt import GPT, GPTConfig
from lapcli.models.low_memory_ops import gelu_linear, relu_squared, rms_norm

torch.set_num_threads(2)

SHAPES = [(3, 8), (2, 5, 16), (2, 3, 4, 6), (1, 1), (0, 4)]


def torch_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def torch_relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


PAIRS = [(rms_norm, torch_norm), (relu_squared, torch_relu_squared)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_as_torch(ours, theirs, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    results = []
    for function in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        assert y.dtype == dtype
        results.append((y, *torch.autograd.grad(y, leaf, dy)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("function", [rms_norm, relu_squared])
def test_gradients_by_differences(function) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert torch.autograd.gradcheck(function, (x,))


def test_zeros_give_zeros() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    for function in (rms_norm, relu_squared):
        y = function(x)
        (gradient,) = torch.autograd.grad(y, x, torch.zeros(2, 4))
        assert not y.any()
        assert not gradient.any()


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("function", [rms_norm, relu_squared])
def test_the_gradient_that_comes_in_is_not_changed(function, expanded: bool) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    dy = torch.ones(1, 1).expand(3, 4) if expanded else torch.ones(3, 4)
    y = function(x)
    before = y.detach().clone()
    first = torch.autograd.grad(y, x, dy, retain_graph=True)[0].clone()
    (second,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(first, second)
    assert torch.equal(y, before)
    assert (dy == 1).all()


@pytest.mark.parametrize("function", [rms_norm, relu_squared])
def test_only_the_output_is_kept(function) -> None:
    """Of what is as large as the output, autograd holds nothing but the output."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(torch.randn(8, 16, requires_grad=True))
    large = [tensor for tensor in kept if tensor.numel() == y.numel()]
    assert [tensor.data_ptr() for tensor in large] == [y.data_ptr()]


def test_gradients_under_selective_checkpointing_that_saves_products() -> None:
    """A GPT's block is computed again from its saved matrix products, which nothing may have overwritten."""
    config = GPTConfig(layers=1, width=32, heads=4, context=16, laplacian_heads=2, vocab=16)
    block = GPT(config).double().blocks[0]
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.3)
    rotary = torch.ones(16, 1, 4).double(), torch.zeros(16, 1, 4).double()

    def run(x: Tensor) -> Tensor:
        return block(x, rotary).square().sum()

    def policy(context, op, *arguments, **options):
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(2, 16, 32, dtype=torch.float64, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    losses = run(x), checkpoint(run, x, use_reentrant=False, context_fn=contexts)
    plain, checkpointed = (torch.autograd.grad(loss, [x, *block.parameters()]) for loss in losses)
    for a, b in zip(plain, checkpointed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (0, 8)])
def test_gelu_and_a_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(8, 5, bias=bias, dtype=torch.float64)
    dy = torch.randn(*shape[:-1], 5, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(y, wanted, dy) for y in (gelu_linear(x, layer), layer(F.gelu(x))))
    assert torch.equal(gelu_linear(x, layer), layer(F.gelu(x)))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_gelu_keeps_its_input_alone() -> None:
    layer = nn.Linear(64, 16)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.numel()) or x, lambda x: x):
        gelu_linear(torch.randn(100, 64, requires_grad=True), layer)
    assert sorted(held) == [16 * 64, 100 * 64]


def test_gelu_under_autocast_is_torchs() -> None:
    layer, x = nn.Linear(8, 5), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = gelu_linear(x, layer)
    assert y.dtype == torch.bfloat16
