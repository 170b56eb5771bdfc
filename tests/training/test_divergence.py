"""Non-finite values stop a run before the update: weights and optimizer states are unchanged."""

import io
from typing import Any

import pytest
import torch
from objectives_support import build

from lapcli.runs import Run
from lapcli.runtime.errors import Diverged
from lapcli.runtime.progress import LogConsole
from lapcli.runtime.ranks import World
from lapcli.training.loop import Loop


class Overflow(torch.autograd.Function):
    """A finite value with a non-finite gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf


@pytest.mark.parametrize(
    ("broken", "message"),
    [(lambda loss: loss * torch.nan, "the loss is nan"), (Overflow.apply, "norm of the gradient is (inf|nan)")],
)
def test_non_finite_values_stop_before_the_update(broken: Any, message: str, tmp_path) -> None:
    objective = build("language_model", tmp_path, batch=16, micro_batch=8)
    run = Run(tmp_path / "run", objective.recipe, {})
    loop = Loop(objective, objective.recipe, run, World(0, 1, torch.device("cpu")), LogConsole(io.StringIO()))
    loop._update(0)

    def state() -> list[torch.Tensor]:
        return [x.clone() for x in (*objective.model.state_dict().values(), *loop.optimizers.state().values())]

    before = state()
    hook = loop.module.register_forward_hook(lambda module, given, loss: broken(loss))
    with pytest.raises(Diverged, match=f"{message} at step 2.*nothing was updated"):
        loop._update(1)
    assert all(map(torch.equal, before, state()))
    hook.remove()
    loop.optimizers.zero_grad()
    loop._update(1)
    assert not all(map(torch.equal, before, state()))
