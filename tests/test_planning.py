"""The dry run's numbers against ones worked out by hand."""

import json

import pytest
from support import ROOT

from lapcli.planning import plan_training
from lapcli.recipe import load_recipe
from lapcli.runtime.devices import GPUS
from lapcli.runtime.errors import UsageError

pytestmark = pytest.mark.slow  # plans are seconds each

H100 = GPUS["h100"]  # its large chunks of the loss are planned faster than those of a CPU


@pytest.mark.parametrize("heads", [0, 1, 3, 5, 7, 9, 10])
def test_the_papers_gpts(heads):
    plan = plan_training(load_recipe(ROOT / f"recipes/gpt561m_{heads}L.yaml"), 8, H100)
    assert plan.parameters == 560_988_160
    assert plan.steps == 21_400
    assert plan.facts.values["tokens_per_step"] == 524_288
    assert plan.facts.values["tokens"] == 11_219_763_200
    assert plan.flops_per_unit == 3_491_758_080
    assert plan.flops == pytest.approx(3.918e19, rel=1e-3)
    assert plan.heads.per_layer == (heads,) * 20
    assert (plan.batches.micro_batch, plan.batches.accumulation) == (16, 2)
    assert plan.learning_rates == {
        "matrices": 0.02,
        "embedding": pytest.approx(0.154919, rel=1e-5),
        "head": pytest.approx(0.00309839, rel=1e-5),
    }


def test_fewer_processes_accumulate_and_keep_the_global_batch():
    recipe = load_recipe(ROOT / "recipes/gpt561m.yaml")
    for processes, accumulation in ((1, 16), (16, 1)):
        plan = plan_training(recipe, processes, H100)
        assert plan.batches.accumulation == accumulation
        assert processes * plan.batches.micro_batch * plan.batches.accumulation == 256


def test_memory_of_the_weights_and_moments_by_hand():
    memory = plan_training(load_recipe(ROOT / "recipes/gpt561m.yaml", ["train.precision=bf16"]), device=H100).memory
    matrices, table = 393_216_000, 83_886_080
    assert memory["weights"] == 4 * matrices + 2 * table + 4 * table  # the embedding is bf16
    # The moments of the embedding are bf16 too. Embedding and head have a count of steps each.
    assert memory["optimizer"] == 4 * matrices + 2 * 2 * table + 2 * 4 * table + 2 * 4


def test_text_and_json_say_the_same():
    plan = plan_training(load_recipe(ROOT / "recipes/gpt561m_5L.yaml"), device=H100)
    text = plan.to_text()
    for shown in ("560,988,160", "21,400", "524,288", "11,219,763,200", "A A A A A L L L L L", "0.154919"):
        assert shown in text
    assert "karpathy/fineweb-edu-100b-shuffle" in text
    assert json.loads(plan.to_json())["tokens"] == 11_219_763_200


def test_epochs_leave_the_steps_to_the_data():
    overrides = ["train.steps=null", "train.epochs=2"]
    plan = plan_training(load_recipe(ROOT / "recipes/quickstart.yaml", overrides))
    assert (plan.steps, plan.facts.values["tokens"], plan.flops) == (None, None, None)
    assert "epochs" in plan.to_text()


@pytest.mark.parametrize("heads", [0, 1, 3, 5, 6])
def test_the_papers_self_supervised_vits(heads):
    plan = plan_training(load_recipe(ROOT / f"recipes/dino_vits_{heads}L.yaml"), 4, H100)
    assert plan.heads.per_layer == (heads,) * 12
    assert (plan.batches.batch, plan.batches.micro_batch, plan.batches.accumulation) == (896, 224, 1)
    assert plan.facts.values["tokens_per_image"] == 2 * 197 + 8 * 37
    assert (plan.steps, plan.facts.values["images"]) == (125_000, 125_000 * 896)
    text = plan.to_text()
    for shown in ("100 epochs of 1,250 steps", "87.42 passes over 1,281,167 images", "21,599,616 parameters"):
        assert shown in text
    assert plan.learning_rates["backbone block 11"] == pytest.approx(0.95 * 1.5e-3)


def test_self_supervised_groups_are_not_cut_by_processes():
    recipe = load_recipe(ROOT / "recipes/dino_vits.yaml")
    one = plan_training(recipe, 1, H100)
    assert (one.batches.micro_batch, one.batches.accumulation) == (224, 4)
    assert "Sinkhorn-Knopp balances each one separately" in one.to_text()
    with pytest.raises(UsageError, match="shared evenly"):
        plan_training(recipe, 8, H100)
