"""All groups are stepped together, and a state of named tensors continues the run identically."""

import torch
from safetensors.torch import save_file
from timm.optim.lamb import Lamb
from torch import Tensor

from lapcli.objectives.objective import ParameterGroup
from lapcli.training.optimizers import Optimizers

torch.set_num_threads(2)

ADAMW = {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters() -> dict[str, Tensor]:
    return {"a.weight": draw((6, 8), 1), "b.weight": draw((16, 8), 2), "embed.weight": draw((10, 8), 3)}


def optimizers_of(named: dict[str, Tensor]) -> Optimizers:
    matrices = {name: named[name] for name in ("a.weight", "b.weight")}
    embedding = {"embed.weight": named["embed.weight"]}
    return Optimizers(
        [
            ParameterGroup(
                "matrices",
                "muon",
                0.02,
                matrices,
                {"steps": 5, "momentum": 0.95},
                at_step=lambda step: {"momentum": 0.8 + 0.01 * step},
            ),
            ParameterGroup("embedding", "adamw", 0.1, embedding, dict(ADAMW)),
        ]
    )


def train(optimizers: Optimizers, named: dict[str, Tensor], steps: range) -> None:
    for step in steps:
        optimizers.set_rates(1 / (step + 1), step)
        for i, p in enumerate(named.values()):
            p.grad = draw(tuple(p.shape), 100 * step + i)
        optimizers.step()
        optimizers.zero_grad()


def test_a_loaded_state_continues_identically(tmp_path) -> None:
    whole = parameters()
    train(optimizers_of(whole), whole, range(6))

    halved = parameters()
    first = optimizers_of(halved)
    train(first, halved, range(3))
    state = {name: value.clone() for name, value in first.state().items()}
    assert set(state) == {
        "momentum/a.weight",
        "momentum/b.weight",
        "step/embed.weight",
        "exp_avg/embed.weight",
        "exp_avg_sq/embed.weight",
    }
    second = optimizers_of(halved)
    save_file(state, tmp_path / "state.safetensors")
    second.load_state(tmp_path / "state.safetensors")
    train(second, halved, range(3, 6))
    for name, p in whole.items():
        assert torch.equal(halved[name], p), name

    forgetful = parameters()
    train(optimizers_of(forgetful), forgetful, range(3))
    train(optimizers_of(forgetful), forgetful, range(3, 6))
    for name, p in whole.items():
        assert not torch.equal(forgetful[name], p), name


def test_adamw_by_hand() -> None:
    named = parameters()
    W, m, v = named["embed.weight"].double(), torch.zeros(10, 8), torch.zeros(10, 8)
    train(optimizers_of(named), named, range(3))
    for step in range(3):
        g = draw((10, 8), 100 * step + 2).double()
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        corrected = (m / (1 - 0.8 ** (step + 1))) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-10)
        W = W - 0.1 / (step + 1) * corrected
    torch.testing.assert_close(named["embed.weight"].double(), W, atol=1e-5, rtol=0)


LAMB = {"betas": (0.9, 0.999), "eps": 1e-8, "max_grad_norm": 1.0}


def test_lamb_matches_timm_with_one_norm_over_all_groups():
    named, other = parameters(), parameters()
    decay = {"a.weight": 0.02, "b.weight": 0.0}
    optimizers = Optimizers(
        [ParameterGroup(n, "lamb", 3e-3, {n: named[n]}, {**LAMB, "weight_decay": decay[n]}) for n in decay]
    )
    assert optimizers.clip_themselves
    groups = [{"params": [other[n]], "weight_decay": decay[n]} for n in decay]
    stock = Lamb(groups, lr=1.5e-3, betas=(0.9, 0.999), eps=1e-8, max_grad_norm=1.0)
    for step in range(4):
        for each in (named, other):
            for i, n in enumerate(decay):
                each[n].grad = 3 * draw(tuple(each[n].shape), 100 * step + i)
        optimizers.set_rates(0.5)
        optimizers.step()
        stock.step()
    for n in decay:
        assert torch.equal(named[n], other[n])
