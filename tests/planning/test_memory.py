"""The plan's memory against torch's own tracker on fake tensors, and against the measured growth of processes."""

import ctypes
import json
import os
import resource
from pathlib import Path

import pytest
import support
import torch
from support import ROOT, exit_code, process, write_text
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from lapcli.objectives.language_model import LanguageModel
from lapcli.planning import plan_training
from lapcli.recipe import load_recipe, recipe_from_dict, recipe_to_dict
from lapcli.runtime.devices import GPUS, Device, this_cpu
from lapcli.training.optimizers import Optimizers

M_MMAP_THRESHOLD = -3  # of glibc's mallopt


@pytest.mark.long
def test_the_561m_gpt_against_the_torch_tracker():
    recipe = load_recipe(ROOT / "recipes/gpt561m_5L.yaml", ["train.micro_batch=1", "train.batch=1"])
    objective = LanguageModel(recipe)
    objective.build(torch.device("meta"))
    model = objective.model
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tokens_BT = torch.zeros(1, 2048, dtype=torch.long)
        optimizers = Optimizers(objective.parameter_groups())
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            for _ in range(2):  # the first step makes the states
                model.loss(tokens_BT, tokens_BT).backward()
                optimizers.step()
                optimizers.zero_grad()
                tracker.reset_mod_stats()
    tracked = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
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
#: Mostly weights, gradients and AdamW states, with accumulation.
WIDE_RUN = {
    **GPT_RUN,
    "model": {**GPT_RUN["model"], "width": 1024, "context": 32},
    "train": {**GPT_RUN["train"], "batch": 8, "micro_batch": 1},
    "optimizer": {"name": "adamw", "lr": 1e-3},
}


@pytest.mark.parametrize(
    ("given", "ranks", "gives_back", "within"),
    [
        (GPT_RUN, 1, True, 0.05),
        pytest.param(VIT_RUN, 1, False, 0.25, marks=pytest.mark.long),
        pytest.param(WIDE_RUN, 2, True, 0.1, marks=pytest.mark.long),  # the rest are buffers of gloo
    ],
    ids=["gpt", "vit", "two ranks"],
)
def test_memory_growth_of_a_cpu_run(given, ranks, gives_back, within, tmp_path):
    """A process trains the recipe after a tiny warm-up run, so that all code is already in memory.

    With `gives_back` glibc returns freed tensors at once: the peak counts only live tensors. Otherwise fragmentation
    adds a fifth to a third of the GPT's tensors, by chance.
    """
    data = {"train": str(write_text(tmp_path / "text.txt")), "validation": 0.2}
    recipe = recipe_from_dict({**given, "data": given.get("data", data)})
    environments = support.ranks(ranks) if ranks > 1 else [{}]
    children = [process(_grow, recipe_to_dict(recipe), gives_back, str(tmp_path), env) for env in environments]
    for child in children:
        child.start()
    assert [exit_code(child, 300) for child in children] == [0] * ranks
    grown = json.loads((tmp_path / "grown.json").read_text())
    plan = plan_training(recipe, processes=ranks, device=this_cpu())
    assert plan.memory_total == pytest.approx(grown, rel=within)


def _grow(given: dict, gives_back: bool, folder: str, rank: dict[str, str]) -> None:
    if gives_back:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**18)
    os.environ["LAP_CACHE"] = f"{folder}/cache"
    tiny = json.loads(json.dumps(given))
    tiny["model"]["layers"], tiny["train"]["batch"], tiny["train"]["micro_batch"] = 2, 2, 2
    support.train_here(recipe_from_dict(tiny), Path(folder), f"tiny{rank.get('RANK', '')}")
    os.environ.update(rank)
    # The second number counts resident pages, the first virtual ones.
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    support.train_here(recipe_from_dict(given), Path(folder), "large")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (Path(folder) / "grown.json").write_text(json.dumps(peak - before))


VITS = dict.fromkeys(("vitb_cifar10", "vitb_cifar100", "vitb_imagenet"), (0, 3, 6, 9, 11, 12))
COUNTS = {"gpt561m": (0, 1, 3, 5, 7, 9, 10), **VITS, "dino_vits": (0, 1, 3, 5, 6)}
PAPER = [f"{name}_{heads}L" for name, counts in COUNTS.items() for heads in counts]
ENDS = ["gpt561m_10L", "vitb_imagenet_6L"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ENDS else pytest.mark.long) for name in PAPER])
def test_the_paper_recipes_fit_their_machine(name):
    plan = plan_training(load_recipe(ROOT / f"recipes/{name}.yaml"), processes=4, device=GPUS["l40"])
    assert plan.fits
    assert plan.memory_total < 46_068 * 2**20
    assert "L40" in plan.to_text()


def test_a_plan_that_does_not_fit_names_the_largest_that_does():
    recipe = ROOT / "recipes/quickstart.yaml"
    small = Device("small", "cuda", 10**9 + 150 * 10**6, 181e12, 90.5e12)
    plan = plan_training(load_recipe(recipe, ["train.batch=64", "train.micro_batch=64"]), device=small)
    assert plan.fits is False
    assert f"train.micro_batch={plan.largest_micro_batch} does" in plan.to_text()
    for size, fits in ((plan.largest_micro_batch, True), (2 * plan.largest_micro_batch, False)):
        again = load_recipe(recipe, ["train.batch=64", f"train.micro_batch={size}"])
        assert plan_training(again, device=small).fits is fits
    nothing = Device("tiny", "cuda", 10**9 + 10**6, 1e12, 1e12)
    plan = plan_training(load_recipe(recipe), device=nothing)
    assert (plan.fits, plan.largest_micro_batch) == (False, 0)
