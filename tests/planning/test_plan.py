"""Sizes, FLOPs, hours and cost of a plan against numbers worked out by hand."""

import pytest
from support import ROOT

from lapcli.planning import plan_training
from lapcli.planning.plan import MFU
from lapcli.recipe import load_recipe
from lapcli.runtime.devices import GPUS, Device
from lapcli.runtime.errors import UsageError

H100 = GPUS["h100"]
QUICKSTART = ROOT / "recipes/quickstart.yaml"


def test_vit_b_at_224_takes_105_gigaflops_per_image():
    width, tokens, patches, layers, classes = 768, 197, 196, 12, 1000
    linear = 2 * tokens * width * width * (3 + 1 + 4 + 4)  # qkv, projection, up, down
    attention = 2 * 2 * tokens * tokens * width  # q k and P v
    embedding = 2 * patches * width * 16 * 16 * 3
    head = 2 * width * classes
    # The backward has two matmuls per forward matmul, except that pixels need no gradient.
    by_hand = 3 * (layers * (linear + attention) + head) + 2 * embedding
    plan = plan_training(load_recipe(ROOT / "recipes/vitb_imagenet_3L.yaml"), 4, GPUS["l40"])
    assert plan.flops_per_unit == by_hand
    assert f"{by_hand / 1e9:.2f}" == "105.15"
    assert plan.flops == 187_500 * 2048 * by_hand
    # Images need cores to decode them.
    needed = plan.facts.read_seconds * 2048 / (plan.flops_per_step / (plan.mfu * 181e12 * 4))
    assert plan.reading_cores - 1 < needed <= plan.reading_cores


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gpt_flops_are_6_per_weight_and_12_per_layer_channel_and_token(kv_heads):
    plan = plan_training(load_recipe(QUICKSTART, [f"model.kv_heads={kv_heads}"]))
    layers, width, context, vocab = 3, 256, 256, 1024
    matrices = layers * (2 + 2 * kv_heads / 4 + 8) * width * width + vocab * width
    assert plan.flops_per_unit == 6 * matrices + 12 * layers * width * context
    assert plan.flops_per_step == 8 * context * plan.flops_per_unit


def test_plan_of_the_paper_gpt():
    overrides = ["train.precision=bf16"]
    plan = plan_training(load_recipe(ROOT / "recipes/gpt561m_3L.yaml", overrides), 8, H100)
    matrices, table = 393_216_000, 83_886_080
    assert plan.parameters == 560_988_160 == matrices + 2 * table
    assert plan.steps == 21_400
    assert plan.facts.values["tokens_per_step"] == 524_288
    assert plan.facts.values["tokens"] == plan.to_dict()["tokens"] == 11_219_763_200
    assert plan.flops_per_unit == 3_491_758_080
    assert plan.flops == pytest.approx(3.918e19, rel=1e-3)
    assert plan.heads.per_layer == (3,) * 20
    assert (plan.batches.micro_batch, plan.batches.accumulation) == (16, 2)
    assert plan.learning_rates == {
        "matrices": 0.02,
        "embedding": pytest.approx(0.154919, rel=1e-5),
        "head": pytest.approx(0.00309839, rel=1e-5),
    }
    for shown in ("560,988,160", "21,400", "524,288", "A A A A A A A L L L", "0.154919", "fineweb-edu-100b-shuffle"):
        assert shown in plan.to_text()
    one = plan_training(load_recipe(ROOT / "recipes/gpt561m_3L.yaml", overrides), 1, H100)
    assert (one.batches.micro_batch, one.batches.accumulation) == (16, 16)  # the global batch is kept
    assert one.flops == plan.flops
    # The embedding and its moments are bf16. Embedding and head have a step counter each.
    assert one.memory["weights"] == 4 * matrices + 2 * table + 4 * table
    assert one.memory["optimizer"] == 4 * matrices + 2 * 2 * table + 2 * 4 * table + 2 * 4
    assert one.memory["gradients"] >= one.memory["weights"]  # accumulated, beside the activations


@pytest.mark.long
def test_plans_of_the_paper_self_supervised_vits():
    recipe = load_recipe(ROOT / "recipes/dino_vits_3L.yaml")
    plan = plan_training(recipe, 4, H100)
    assert plan.heads.per_layer == (3,) * 12
    assert (plan.batches.batch, plan.batches.micro_batch, plan.batches.accumulation) == (896, 224, 1)
    assert plan.facts.values["tokens_per_image"] == 2 * 197 + 8 * 37
    assert (plan.steps, plan.facts.values["images"]) == (125_000, 125_000 * 896)
    assert "125,000, 100 epochs" in plan.to_text()
    assert plan.learning_rates["backbone block 11"] == pytest.approx(0.95 * 1.5e-3)
    with pytest.raises(UsageError):  # groups are not cut by processes
        plan_training(recipe, 8, H100)


def test_hours_are_flops_over_a_fraction_of_the_peak():
    recipe = load_recipe(QUICKSTART)
    plan = plan_training(recipe, 4, GPUS["l40"], price=2.0)
    assert plan.mfu == MFU["language_model"]
    assert plan.hours == pytest.approx(plan.flops / (plan.mfu * 181e12 * 4) / 3600)
    assert plan.cost == pytest.approx(4 * 2.0 * plan.hours)
    half = plan_training(recipe, 4, GPUS["l40"], mfu=plan.mfu / 2)
    assert half.hours == pytest.approx(2 * plan.hours)
    assert plan_training(recipe, device=Device("unlisted", "cuda", None)).hours is None
