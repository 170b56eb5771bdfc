"""The plan's memory against torch's own tracker on fake tensors, and against what processes really grow by."""

import ctypes
import json
import os
from pathlib import Path

import pytest
import support
import torch
from support import ROOT, exit_code, process, write_text
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from lapcli.models.gpt import GPT
from lapcli.models.vit import build_vit
from lapcli.objectives.classification import Classification, build_loss
from lapcli.objectives.language_model import gpt_config, parameter_groups
from lapcli.planning import plan_training
from lapcli.recipe import load_recipe, recipe_from_dict, recipe_to_dict
from lapcli.runtime.devices import GPUS, this_cpu
from lapcli.training.optimizers import Optimizers

pytestmark = pytest.mark.slow  # plans are seconds each

M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def tracked_peak(model, optimizers, loss):
    """Bytes of a second training step at its fullest, as torch counts them; the first one makes the states."""
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        for _ in range(2):
            loss().backward()
            optimizers.step()
            optimizers.zero_grad()
            tracker.reset_mod_stats()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.long
@pytest.mark.parametrize("sequences", [1, 2])
def test_the_561m_gpt_against_torchs_tracker(sequences):
    overrides = [f"train.micro_batch={sequences}", f"train.batch={sequences}"]
    recipe = load_recipe(ROOT / "recipes/gpt561m_5L.yaml", overrides)
    with torch.device("meta"):
        model = GPT(gpt_config(recipe))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens_BT = torch.zeros(sequences, 2048, dtype=torch.long)
        optimizers = Optimizers(parameter_groups(recipe, model))
        tracked = tracked_peak(model, optimizers, lambda: model.loss(tokens_BT, tokens_BT))
    assert plan_training(recipe, device=this_cpu()).memory_total == pytest.approx(tracked, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize("images", [8, pytest.param(64, marks=pytest.mark.long)])
def test_vit_b_against_torchs_tracker(images, precision):
    overrides = [f"train.micro_batch={images}", f"train.batch={images}", f"data.mixing.group={images}"]
    recipe = load_recipe(
        ROOT / "recipes/vitb_imagenet_3L.yaml", [*overrides, "optimizer.name=adamw", f"train.precision={precision}"]
    )
    with torch.device("meta"):
        model = build_vit(recipe.model).train()
    criterion = build_loss(recipe)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        images_BCHW, targets_BK = torch.zeros(images, 3, 224, 224), torch.zeros(images, 1000)

        def loss():
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits_BK = model(images_BCHW)
            return criterion(logits_BK.float(), targets_BK)

        objective = Classification(recipe)
        objective.model = model
        tracked = tracked_peak(model, Optimizers(objective.parameter_groups()), loss)
    assert plan_training(recipe, device=this_cpu()).memory_total == pytest.approx(tracked, rel=0.05)


GPT_RUN = {
    "objective": "language_model",
    "model": {"layers": 2, "width": 256, "heads": 4, "context": 256, "laplacian_heads": 2},
    "tokenizer": {"vocab": 300},
    "train": {"steps": 2, "batch": 72, "micro_batch": 72, "threads": 1},
    "validation": {"tokens": 128},
}
VIT_RUN = {
    "objective": "classification",
    "model": {"layers": 8, "width": 64, "heads": 4, "image": 32, "patch": 4, "classes": 10, "laplacian_heads": 2},
    "data": {"train": "builtin", "validation": 0.2},
    "train": {"steps": 2, "batch": 192, "micro_batch": 192, "threads": 1},
    "optimizer": {"lr": 1e-3},
    "validation": {"batch": 8},
}


@pytest.mark.parametrize(("given", "gives_back"), [(GPT_RUN, True), (VIT_RUN, False)], ids=["gpt", "vit"])
def test_what_a_run_on_the_cpu_grows_by(given, gives_back, tmp_path):
    """A process that has trained something tiny, and so has all code in memory, trains the recipe.

    With `gives_back` glibc returns every freed tensor at once, and the peak is what was alive. By itself it keeps what
    it cannot fit together: of the GPT's tensors a fifth to a third, by chance.
    """
    data = {"train": str(write_text(tmp_path / "text.txt")), "validation": 0.2}
    recipe = recipe_from_dict({**given, "data": given.get("data", data)})
    child = process(_grow, recipe_to_dict(recipe), gives_back, str(tmp_path))
    child.start()
    assert exit_code(child, 300) == 0
    grown = json.loads((tmp_path / "grown.json").read_text())
    assert grown > 500e6
    planned = plan_training(recipe, device=this_cpu()).memory_total
    assert planned == pytest.approx(grown, rel=0.05 if gives_back else 0.25)


def test_two_ranks_that_accumulate_have_one_copy_of_all_gradients(tmp_path):
    """A model that needs little besides weights, gradients and the states of AdamW."""
    sections = {**GPT_RUN, "model": {**GPT_RUN["model"], "width": 1024, "context": 32}}
    sections["train"] = {**GPT_RUN["train"], "batch": 8, "micro_batch": 1}
    sections["optimizer"] = {"name": "adamw", "lr": 1e-3}
    data = {"train": str(write_text(tmp_path / "text.txt")), "validation": 0.2}
    recipe = recipe_from_dict({**sections, "data": data})
    children = [process(_grow, recipe_to_dict(recipe), True, str(tmp_path), rank) for rank in support.ranks(2)]
    for child in children:
        child.start()
    assert [exit_code(child, 300) for child in children] == [0, 0]
    plan = plan_training(recipe, processes=2, device=this_cpu())
    grown = json.loads((tmp_path / "grown.json").read_text())
    assert plan.memory["gradients"] > 0.2 * plan.memory_total
    assert plan.memory_total == pytest.approx(grown, rel=0.1)  # the rest are buffers of gloo


def _grow(given: dict, gives_back: bool, folder: str, rank: dict[str, str] | None = None) -> None:
    if gives_back:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**18)
    os.environ["LAP_CACHE"] = f"{folder}/cache"
    from lapcli.planning.estimate import resident_memory
    from lapcli.runtime.devices import peak_memory

    tiny = json.loads(json.dumps(given))
    tiny["model"]["layers"], tiny["train"]["batch"], tiny["train"]["micro_batch"] = 2, 2, 2
    support.train_here(recipe_from_dict(tiny), Path(folder), f"tiny{rank['RANK'] if rank else ''}")
    os.environ.update(rank or {})
    before = resident_memory()
    support.train_here(recipe_from_dict(given), Path(folder), "large")
    (Path(folder) / "grown.json").write_text(json.dumps(peak_memory() - before))


VITS = dict.fromkeys(("vitb_cifar10", "vitb_cifar100", "vitb_imagenet"), (0, 3, 6, 9, 11, 12))
COUNTS = {"gpt561m": (0, 1, 3, 5, 7, 9, 10), **VITS, "dino_vits": (0, 1, 3, 5, 6)}
PAPER = [f"{name}_{heads}L" for name, counts in COUNTS.items() for heads in counts]
ENDS = ["gpt561m_0L", "gpt561m_10L", "vitb_cifar100_12L", "vitb_imagenet_0L", "vitb_imagenet_6L", "dino_vits_3L"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ENDS else pytest.mark.long) for name in PAPER])
def test_the_papers_recipes_fit_its_machine(name):
    plan = plan_training(load_recipe(ROOT / f"recipes/{name}.yaml"), processes=4, device=GPUS["l40"])
    assert plan.fits
    assert plan.memory_total < 46_068 * 2**20
    assert "L40" in plan.to_text()


@pytest.mark.long
def test_what_does_not_fit_comes_with_the_largest_that_does():
    overrides = ["train.micro_batch=64", "model.layers=6"]
    recipe = load_recipe(ROOT / "recipes/gpt561m_0L.yaml", overrides)
    small = GPUS["l40"].__class__("small", "cuda", 12 * 10**9, 181e12, 90.5e12)
    plan = plan_training(recipe, device=small)
    assert plan.fits is False
    assert f"train.micro_batch={plan.largest_micro_batch} does" in plan.to_text()
    for size, fits in ((plan.largest_micro_batch, True), (2 * plan.largest_micro_batch, False)):
        again = load_recipe(ROOT / "recipes/gpt561m_0L.yaml", [*overrides, f"train.micro_batch={size}"])
        assert plan_training(again, device=small).fits is fits


def test_nothing_fits_into_nothing():
    nothing = GPUS["l40"].__class__("tiny", "cuda", 10**9 + 10**6, 1e12, 1e12)
    plan = plan_training(load_recipe(ROOT / "recipes/quickstart.yaml"), device=nothing)
    assert (plan.fits, plan.largest_micro_batch) == (False, 0)


def test_gradients_stay_where_they_are_accumulated_or_shared():
    """With several micro-batches they are beside the activations; with one they come as activations go."""
    recipe = load_recipe(
        ROOT / "recipes/gpt561m_0L.yaml",
        ["train.batch=2", "train.micro_batch=1", "model.layers=4", "tokenizer.vocab=4096"],
    )
    plan = plan_training(recipe, device=this_cpu())
    assert plan.memory["gradients"] >= plan.memory["weights"]
