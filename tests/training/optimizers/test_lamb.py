"""LAMB through our optimizers: timm's own on all groups at once, with a state that survives a save."""

import torch
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
        optimizers.set_rates(0.5)
        for group in stock.param_groups:
            group["lr"] = 1.5e-3
        optimizers.step()
        stock.step()
    for name in named:
        assert torch.equal(named[name], other[name])
