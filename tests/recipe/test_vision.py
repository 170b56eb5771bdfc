"""The image recipes agree with the paper's table `tab:training_recipe`."""

from pathlib import Path

import pytest

from lapcli.planning import plan_training
from lapcli.recipe import RecipeError, load_recipe, recipe_to_dict

RECIPES = Path(__file__).parent.parent.parent / "recipes"
# Rows of the table: CIFAR-10, CIFAR-100, ImageNet.
TABLE = {
    "train.loss": ("cross_entropy", "cross_entropy", "binary_cross_entropy"),
    "optimizer.name": ("adamw", "adamw", "lamb"),
    "optimizer.betas": ([0.9, 0.99], [0.9, 0.99], [0.9, 0.999]),
    "schedule.start_lr": (3e-6, 3e-6, 1e-3),
    "optimizer.lr": (3e-4, 3e-4, 3e-3),
    "schedule.final_lr": (0.0, 0.0, 1e-6),
    "optimizer.weight_decay": (0.05, 0.05, 0.02),
    "model.drop_path": (0.1, 0.1, 0.3),
    "train.batch": (512, 512, 2048),
    "optimizer.clip": (1.0, 1.0, 1.0),
    "schedule.warmup_epochs": (5, 5, 5),
    "data.augmentation.policy": ("rand-m9-mstd0.5-inc1", "rand-m9-mstd0.5-inc1", "3a"),
    "data.mixing.mixup": (0.8, 0.8, 0.8),
    "data.mixing.probability": (1.0, 1.0, 1.0),
    "model.image": (32, 32, 224),
    "model.patch": (4, 4, 16),
    "train.precision": ("float32", "float32", "auto"),
    "train.epochs": (300, 300, 300),
    "model.classes": (10, 100, 1000),
    "model.layers": (12, 12, 12),
    "model.heads": (12, 12, 12),
    "model.width": (768, 768, 768),
}


def value(recipe, key):
    found = recipe_to_dict(recipe)
    for part in key.split("."):
        found = found[part]
    return found


@pytest.mark.parametrize(("column", "name"), [(0, "cifar10"), (1, "cifar100"), (2, "imagenet")])
def test_recipes_match_table_4(column, name):
    recipe = load_recipe(RECIPES / f"vitb_{name}.yaml")
    assert {key: value(recipe, key) for key in TABLE} == {key: row[column] for key, row in TABLE.items()}
    assert recipe.data.mixing.group == recipe.train.batch // 4  # the share of one of the paper's 4 GPUs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "steps"),
    [
        ("vitb_imagenet_12L", 86_585_320, 187_500),
        pytest.param("vitb_cifar10_3L", 85_169_674, 29_100, marks=pytest.mark.long),
    ],
)
def test_plans(name, parameters, steps):
    plan = plan_training(load_recipe(RECIPES / f"{name}.yaml"), processes=4)
    assert (plan.parameters, plan.steps) == (parameters, steps)
    batches = plan.batches
    assert batches.micro_batch * batches.accumulation * batches.processes == batches.batch
    assert f"{parameters:,}" in plan.to_text()


def refused(path, *overrides):
    with pytest.raises(RecipeError) as error:
        load_recipe(path, overrides)
    return [f"{problem.where}  {problem.key}: {problem.message}" for problem in error.value.problems]


def test_a_warmup_longer_than_the_epochs_is_refused_with_its_line(tmp_path):
    (tmp_path / "x.yaml").write_text(
        f"extends: {RECIPES}/vit_digits.yaml\ntrain:\n  epochs: 4\nschedule:\n  warmup_epochs: 5\n"
    )
    path = tmp_path / "x.yaml"
    expected = "schedule.warmup_epochs: 5 do not fit into a run of 4 epochs; lower it"
    assert refused(path) == [f"{path}:5  {expected}"]
    assert refused(path, "train.epochs=5") == [f"{path}:5  {expected.replace('4', '5')}"]
    assert load_recipe(path, ["train.epochs=5.1"]).train.epochs == 5.1
    assert load_recipe(path, ["train.steps=3"]).train.steps == 3  # in epochs of data that nobody has counted yet
    assert load_recipe(path, is_kept=True).train.epochs == 4  # runs stay readable


def test_self_supervised_schedules_must_fit_into_the_steps():
    path = RECIPES / "dino_quickstart.yaml"
    found = refused(path, "train.steps=12")
    assert [line.split("  ")[1].split(":")[0] for line in found] == [
        "schedule.warmup_epochs",
        "schedule.teacher_warmup_epochs",
        "schedule.frozen_epochs",
    ]
    assert "1 epochs of 30 steps do not fit into a run of 12 steps: the learning rate would never" in found[0]
    assert load_recipe(path, ["train.steps=90"]).steps == 90  # the temperature's 3 epochs are all of it
    assert len(refused(path, "train.steps=89")) == 1
    assert load_recipe(path, ["train.steps=12"], is_kept=True).steps == 12
