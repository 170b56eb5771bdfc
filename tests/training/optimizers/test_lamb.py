"""LAMB through our optimizers: timm's own on all groups at once, with a state that survives a save."""

import copy

import torch
from safetensors.torch import save_file
from timm.optim.lamb import Lamb

from lapcli.objectives.objective import ParameterGroup
from lapcli.training.optimizers import Optimizers

OPTIONS = {"betas": (0.9, 0.999), "eps": 1e-8, "max_grad_norm": 1.0}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.nn.Parameter(torch.randn(6, 4, generator=generator)),
        "bias": torch.nn.Parameter(torch.randn(4, generator=generator)),
    }


def ours(named):
    decay = {"weight": 0.02, "bias": 0.0}
    return Optimizers(
        [
            ParameterGroup(name, "lamb", 3e-3, {name: p}, {**OPTIONS, "weight_decay": decay[name]})
            for name, p in named.items()
        ]
    )


def set_gradients(named, step):
    generator = torch.Generator().manual_seed(step)
    for p in named.values():
        p.grad = 3 * torch.randn(p.shape, generator=generator)


def test_it_is_timms_lamb_with_one_norm_over_all_groups():
    named, other = parameters(), parameters()
    optimizers = ours(named)
    assert optimizers.clip_themselves
    stock = Lamb(
        [{"params": [other["weight"]], "weight_decay": 0.02}, {"params": [other["bias"]], "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        max_grad_norm=1.0,
    )
    for step in range(4):
        set_gradients(named, step)
        set_gradients(other, step)
        optimizers.set_learning_rates(0.5)
        for group in stock.param_groups:
            group["lr"] = 1.5e-3
        optimizers.step()
        stock.step()
    for name in named:
        assert torch.equal(named[name], other[name])


def test_the_state_survives_a_save(tmp_path):
    named = parameters()
    optimizers = ours(named)
    for step in range(3):
        set_gradients(named, step)
        optimizers.step()
    state = copy.deepcopy(optimizers.state())
    assert state["step/weight"].item() == 3
    resumed = {name: torch.nn.Parameter(p.detach().clone()) for name, p in named.items()}
    again = ours(resumed)
    save_file(state, tmp_path / "state.safetensors")
    again.load_state(tmp_path / "state.safetensors")
    for step in range(3, 6):
        for side, who in ((named, optimizers), (resumed, again)):
            set_gradients(side, step)
            who.step()
    for name in named:
        assert torch.equal(named[name], resumed[name])
    assert all(torch.equal(a, b) for a, b in zip(optimizers.state().values(), again.state().values(), strict=True))
