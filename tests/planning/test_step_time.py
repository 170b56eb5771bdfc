"""Hours and cost of a plan: FLOPs over a stated fraction of the peak."""

from types import SimpleNamespace

import pytest
import torch
from support import ROOT
from torch.nn.attention import SDPBackend

from lapcli.planning import plan_training
from lapcli.planning.estimate import MFU, probe_plan
from lapcli.recipe import load_recipe
from lapcli.runtime.devices import GPUS, Device

pytestmark = pytest.mark.slow  # plans are seconds each


def test_hours_are_flops_over_a_fraction_of_the_peak():
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml")
    plan = plan_training(recipe, 4, GPUS["l40"], price=2.0)
    assert plan.mfu == MFU["language_model"]
    assert plan.hours == pytest.approx(plan.flops / (plan.mfu * 181e12 * 4) / 3600)
    assert plan.cost == pytest.approx(4 * 2.0 * plan.hours)
    half = plan_training(recipe, 4, GPUS["l40"], mfu=plan.mfu / 2)
    assert half.hours == pytest.approx(2 * plan.hours)
    assert plan_training(recipe, device=Device("unlisted", "cuda", None)).hours is None


def test_images_need_cores_to_decode_them():
    plan = plan_training(load_recipe(ROOT / "recipes" / "vitb_imagenet.yaml"), 4, GPUS["l40"])
    step = plan.flops_per_step / (plan.mfu * 181e12 * 4)
    needed = plan.facts.read_seconds * plan.batches.batch / step
    assert plan.reading_cores - 1 < needed <= plan.reading_cores
    assert f"{plan.reading_cores:,} cores" in plan.to_text()


def test_a_probe_measures_the_kernels_that_training_prefers(monkeypatch):
    """On a GPU of Hopper; the steps themselves would need one."""
    orders = []

    def measure(*arguments):
        orders.append(torch._C._get_sdp_priority_order())
        return {"steps": 1, "seconds_per_step": 1.0, "memory": 1.0}

    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml")
    plan = plan_training(recipe, device=GPUS["h100"])
    for name, value in {
        "pick_device": lambda device: "cuda",
        "compute_policy": lambda *arguments: None,
        "objective_of": lambda recipe: lambda recipe: SimpleNamespace(build=lambda *arguments: None),
        "measure_steps": measure,
    }.items():
        monkeypatch.setattr(f"lapcli.planning.estimate.{name}", value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    probe_plan(recipe, plan, 1)
    assert orders[0][0] == int(SDPBackend.CUDNN_ATTENTION)
