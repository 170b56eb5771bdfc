"""What a run compiles: graphs are counted over training, a validation whose last batch is short, and training again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from counting_support import Graphs
from objectives_support import OBJECTIVES, build
from torch._dynamo.utils import counters

from lapcli.measures.accuracy import measure_accuracy
from lapcli.models.compiling import compiled_once
from lapcli.runtime.ranks import World
from lapcli.training.optimizers import Optimizers

pytestmark = pytest.mark.slow  # compiled models are seconds each

torch.set_num_threads(1)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """Counts everything that is compiled from now on."""
    kept, compile_ = Graphs(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_(*args, **options, backend=kept))
    compiled_once.cache_clear()
    torch.compiler.reset()
    counters.clear()
    yield kept
    compiled_once.cache_clear()


def train(objective: Any, steps: range) -> list[float]:
    optimizers, losses = Optimizers(objective.parameter_groups()), []
    for step in steps:
        optimizers.set_rates(0.01)
        loss = objective.loss(objective.batch(step, 0))
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        objective.after_step(step)
        losses.append(loss.item())
    return losses


def outcome(objective: Any) -> tuple[list[float], dict[str, float]]:
    before = train(objective, range(2))
    validated = objective.validate(lambda: False)
    return before + train(objective, range(2, 4)), validated


#: A backend without machine code, which shows every graph.
QUICK = "classification"


@pytest.mark.parametrize(
    "kind", [kind if kind == QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in OBJECTIVES]
)
def test_a_run_has_few_graphs_of_fixed_shapes(kind: str, graphs: Graphs, tmp_path) -> None:
    """With a plan that varies by layer. Rows padded to the longest in their batch are the exception: their lengths
    differ from batch to batch, and one graph serves them all."""
    losses, validated = outcome(build(kind, tmp_path, compile=True))
    # Class tokens and patches have four more graphs each: three for Sinkhorn-Knopp, and the cross entropy.
    # DINO heads: two of the student and two of the teacher, and the teacher's blocks again in validation.
    assert 1 <= len(graphs) <= 4 + (13 if kind == "self_supervised" else 0)
    assert not counters["graph_break"]
    assert bool(graphs.symbolic) is (kind == "padded_chat")
    plain_losses, plain_validated = outcome(build(kind, tmp_path, compile=False))
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert validated == pytest.approx(plain_validated, rel=1e-3)
    assert len(set(losses)) == len(losses)


def test_padding_does_not_count(tmp_path) -> None:
    """Padding affects neither accuracy and loss nor the tokens of the neighbour search."""
    alone = World(0, 1, torch.device("cpu"))
    vit = build("classification", tmp_path)
    images = vit.data.validation
    assert len(images) % 100
    looks = vit.recipe.data, vit.recipe.model.image
    found = [measure_accuracy(vit.model, images, *looks, alone, 100, pads=pads) for pads in (False, True)]
    assert found[0].images == found[1].images == len(images)
    assert found[0].correct == found[1].correct
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-5)

    dino = build("self_supervised", tmp_path)
    images = dino.data.validation
    assert len(images) % 16
    tokens = []
    for pads in (False, True):
        dino.policy = replace(dino.policy, compiles=pads)
        with torch.no_grad():
            tokens.append(dino.class_tokens(images))
    torch.testing.assert_close(tokens[1], tokens[0])
