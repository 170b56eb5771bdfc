"""The value bias of heads whose rows sum to zero changes no output: it must not be trained on rounding noise."""

import io

import pytest
import torch
from objectives_support import build

from lapcli.runs import Run
from lapcli.runtime.progress import LogConsole
from lapcli.runtime.ranks import World
from lapcli.training.loop import Loop


@pytest.mark.parametrize("kind", ["classification", "self_supervised"])
def test_only_biases_that_matter_are_updated(kind: str, tmp_path) -> None:
    """Three layers whose last zero, one and two heads are Laplacian."""
    objective = build(kind, tmp_path, batch=16, micro_batch=8)
    run = Run(tmp_path / "run", objective.recipe, {})
    loop = Loop(objective, objective.recipe, run, World(0, 1, torch.device("cpu")), LogConsole(io.StringIO()))
    biases = [p for name, p in objective.model.named_parameters() if name.endswith("attn.qkv.bias") and p.requires_grad]
    before = [p.detach().clone() for p in biases]
    size = objective.recipe.model.width // objective.recipe.model.heads
    for step in range(3):
        loop._update(step)
    for heads, bias, start in zip((0, 1, 2), biases, before, strict=True):
        trained = len(bias) - heads * size
        assert torch.equal(bias[trained:], start[trained:])
        width = len(bias) // 3
        moved = bias[:trained] != start[:trained]
        assert moved[:width].all()  # queries; a key's bias shifts all logits of a query alike
        assert moved[2 * width :].all()
