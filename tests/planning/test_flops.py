"""FLOPs of a step: torch's counter on fake tensors against numbers worked out by hand."""

import pytest
import torch
from support import ROOT

from lapcli.objectives import objective_of
from lapcli.objectives.self_supervised import image_flops
from lapcli.planning import plan_training
from lapcli.planning.step_trace import trace_step
from lapcli.recipe import load_recipe
from lapcli.runtime.devices import ComputePolicy

pytestmark = pytest.mark.slow  # plans are seconds each


def test_vit_b_at_224_takes_105_gigaflop_an_image():
    width, tokens, patches, layers, classes = 768, 197, 196, 12, 1000
    linear = 2 * tokens * width * width * (3 + 1 + 4 + 4)  # qkv, projection, up, down
    attention = 2 * 2 * tokens * tokens * width  # q k and P v
    embedding = 2 * patches * width * 16 * 16 * 3
    head = 2 * width * classes
    # A backward takes two products for each of the forward's, but nobody asks for the gradient of the pixels.
    by_hand = 3 * (layers * (linear + attention) + head) + 2 * embedding
    plan = plan_training(load_recipe(ROOT / "recipes/vitb_imagenet_3L.yaml"), processes=4)
    assert plan.flops_per_unit == by_hand
    assert f"{by_hand / 1e9:.2f}" == "105.15"
    assert plan.flops_per_step == 2048 * by_hand
    assert plan.flops == 187_500 * 2048 * by_hand


def test_a_gpt_takes_6_a_weight_and_12_a_layer_channel_and_token():
    plan = plan_training(load_recipe(ROOT / "recipes/quickstart.yaml"))
    layers, width, context, vocab = 3, 256, 256, 1024
    matrices = layers * 12 * width * width + vocab * width
    assert plan.flops_per_unit == 6 * matrices + 12 * layers * width * context
    assert plan.flops_per_step == 8 * context * plan.flops_per_unit


def test_grouped_keys_and_values_cost_less():
    plan = plan_training(load_recipe(ROOT / "recipes/quickstart.yaml", ["model.kv_heads=2"]))
    layers, width, context, vocab = 3, 256, 256, 1024
    matrices = layers * (2 + 2 * 0.5 + 8) * width * width + vocab * width
    assert plan.flops_per_unit == 6 * matrices + 12 * layers * width * context


def test_self_supervised_against_the_formula():
    recipe = load_recipe(ROOT / "recipes/dino_quickstart.yaml")
    # The formula takes the mean number of masked patches, and gradients of the pixels that nobody asks for.
    assert plan_training(recipe).flops_per_unit == pytest.approx(image_flops(recipe), rel=0.03)


@pytest.mark.parametrize("name", ["quickstart", "vit_digits", "dino_quickstart"])
def test_one_layer_and_two_say_it_for_all(name):
    """Layers with none, some and all of their heads Laplacian: the same as when all layers are traced."""
    path = ROOT / f"recipes/{name}.yaml"
    layers = load_recipe(path).model.layers
    recipe = load_recipe(path, [f"model.laplacian_heads={[0, 1, 4, 2][:layers]}", "train.device=cpu"])
    objective = objective_of(recipe)(recipe)
    objective.build(torch.device("meta"), ComputePolicy("cpu"))
    whole = trace_step(objective, recipe.train.micro_batch, keeps_gradients=False)
    plan = plan_training(recipe)
    assert plan.flops_per_step == whole.flops
    beside = sum(plan.memory[part] for part in ("gradients", "activations", "temporary"))
    assert plan.memory_peak_in in ("forward", "backward")
    assert beside == pytest.approx(max(sum(whole.peak(phase).values()) for phase in ("forward", "backward")), rel=0.02)
