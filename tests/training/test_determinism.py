"""`train.deterministic`: enabled only inside a step, set before CUDA could start, harmless on the CPU.

There is no GPU here. The tests cover the settings, their order, and that no step uses an operation that torch
refuses on CUDA in this mode.
"""

import os

import pytest
import torch
from support import tiny_recipe, train_here
from torch.utils._python_dispatch import TorchDispatchMode

from lapcli.objectives.language_model import LanguageModel
from lapcli.runtime.devices import CUBLAS, INDUCTOR

ON = {"train": {"steps": 2, "deterministic": True}}
OFF = {"train": {"steps": 2}}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Set by the code under test, and restored afterwards."""
    for name in (CUBLAS, INDUCTOR):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)


KINDS = ["language_model", "chat", "classification", "self_supervised"]


def settings():
    from torch._inductor import config

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        config.deterministic,
    )


@pytest.mark.parametrize("wanted", [True, False])
def test_enabled_inside_a_step_and_disabled_in_sampling_and_afterwards(text, tmp_path, monkeypatch, wanted):
    seen = {}

    def watched(name):
        method = getattr(LanguageModel, name)

        def call(self, *arguments):
            seen.setdefault(name, set()).add(settings())
            return method(self, *arguments)

        monkeypatch.setattr(LanguageModel, name, call)

    for name in ("loss", "after_step", "finish"):
        watched(name)
    before = settings()
    assert not before[0]
    assert not before[3]
    run = train_here(tiny_recipe(text, **(ON if wanted else OFF)), tmp_path)
    assert run.is_finished
    inside = (True, False, False, True, False, True) if wanted else before
    assert seen == {"loss": {inside}, "after_step": {inside}, "finish": {before}}
    assert settings() == before
    assert (os.environ.get(CUBLAS), os.environ.get(INDUCTOR)) == ((":4096:8", "1") if wanted else (None, None))


# Kernel names of the operations that raise on CUDA, according to `torch.use_deterministic_algorithms`.
REFUSED = (
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
    *("max_unpool2d", "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward"),
    *("upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward"),
    *("_upsample_bicubic2d_aa_backward", "reflection_pad1d_backward", "reflection_pad2d_backward"),
    *("reflection_pad3d_backward", "nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward"),
    *("_embedding_bag_backward", "put_", "put", "histc", "bincount", "median", "grid_sampler_2d_backward"),
    *("grid_sampler_3d_backward", "scatter_reduce", "scatter_reduce_"),
)


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        if name in REFUSED:
            raise AssertionError(f"{name} has no deterministic form on CUDA")
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_uses_an_operation_refused_on_cuda(kinds, tmp_path, kind):
    """Steps with optimizer updates, and validations."""
    with _Refusing():
        assert train_here(kinds[kind](**OFF), tmp_path).is_finished
