"""Time of a step from counted FLOPs and bytes: worked out by hand, against a published run, and in what plans print."""

import dataclasses
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from support import ROOT
from torch.nn.attention import SDPBackend

from lapcli.objectives.objective import plan_batches
from lapcli.planning import plan_training
from lapcli.planning.estimate import _Estimate, probe_plan
from lapcli.planning.step_time import Counted, Reading, estimate_time
from lapcli.planning.step_trace import AttentionFlops, StepTrace, UpdateTrace
from lapcli.recipe import load_recipe
from lapcli.runtime.devices import GPUS, Device, this_cpu

# 7 TFLOP of products and 0.7 of attention, half of it computed; 800 GB in layers and 100 around them.
MICRO = StepTrace(7_700 * 10**9, AttentionFlops(700 * 10**9, 350 * 10**9), 900 * 10**9, 800 * 10**9, 0, {}, 1)
COUNTED = Counted(
    MICRO,
    UpdateTrace(0, 1_400 * 10**9, 80 * 10**9),
    accumulation=2,
    processes=4,
    prepared=10 * 10**9,
    gradients=0,
    orthogonalised=28 * 10**9,
    objective="classification",
    compiles=False,
    bf16=True,
)
L40 = Device("L40", "cuda", None, 181e12, 90.5e12)  # 864 GB/s of memory, 32 GB/s of PCIe


def test_by_hand():
    """0.7 of the peak for products, 0.35 for attention, 0.8 of the memory's and 0.7 of the link's bandwidth."""
    found = estimate_time(COUNTED, L40, 100, None)
    expected = {
        "matrix products": 2 * 7e12 / (0.7 * 181e12),
        "attention": 2 * 0.35e12 / (0.35 * 181e12),
        "elementwise": 2 * 910e9 / (0.8 * 864e9),
        "optimizer": 1.4e12 / 4 / (0.7 * 181e12) + 80e9 / (0.8 * 864e9),
        "communication": 0.75 * 28e9 / (0.7 * 32e9),
    }
    assert found.parts == pytest.approx(expected)
    assert found.seconds == pytest.approx(sum(expected.values()))
    assert found.share_of_peak == pytest.approx(2 * 7.7e12 / found.seconds / 181e12)
    assert found.examples_per_second == pytest.approx(100 / found.seconds)


def test_compiled_code_moves_less():
    parts = estimate_time(dataclasses.replace(COUNTED, compiles=True, objective="language_model"), L40, 100, None).parts
    assert parts["elementwise"] == pytest.approx(2 * (0.34 * 800e9 + 0.04 * 100e9 + 10e9) / (0.8 * 864e9))


def test_gradients_are_summed_while_the_last_backward_runs():
    """A ring sends 1.5 of each byte among four; two thirds of a micro-batch hide as much of it."""
    micro = (7e12 / 0.7 + 0.35e12 / 0.35) / 181e12 + 910e9 / (0.8 * 864e9)
    without = estimate_time(COUNTED, L40, 100, None).parts["communication"]
    for seconds, seen in ((0.5 * micro, 0.0), (2 * micro, 2 * micro - 2 / 3 * micro)):
        gradients = int(seconds * 0.7 * 32e9 / 1.5)
        parts = estimate_time(dataclasses.replace(COUNTED, gradients=gradients), L40, 100, None).parts
        assert parts["communication"] - without == pytest.approx(seen, rel=1e-6, abs=1e-9)
    alone = dataclasses.replace(COUNTED, gradients=10**9, processes=1)
    assert estimate_time(alone, L40, 100, None).parts["communication"] == 0


def test_reading_is_the_limit_where_cores_are_few():
    """Each image takes 0.1 s of a core: 100 images in the time of a step."""
    free = estimate_time(COUNTED, L40, 100, None)
    wanted = int(0.1 * 100 / free.seconds) + 1
    unknown = estimate_time(COUNTED, L40, 100, Reading(0.1, None))
    assert (unknown.reading_cores, unknown.has_cores, unknown.seconds) == (wanted, None, free.seconds)
    enough, few = (estimate_time(COUNTED, L40, 100, Reading(0.1, cores)) for cores in (wanted, 1))
    assert (enough.has_cores, enough.seconds) == (True, free.seconds)
    assert (few.has_cores, few.reading_cores) == (False, wanted)
    assert few.seconds == pytest.approx(100 * 0.1)
    assert few.parts["waiting for images"] == pytest.approx(10 - free.seconds)


def test_devices_without_a_peak_have_no_time():
    assert estimate_time(COUNTED, this_cpu(), 100, None) is None
    assert estimate_time(COUNTED, Device("unlisted", "cuda", None, 1e12), 100, None) is None
    assert all(device.bandwidths for device in GPUS.values())


@cache
def counted(name, *overrides):
    recipe = load_recipe(ROOT / f"recipes/{name}.yaml", list(overrides))
    batches = plan_batches(recipe.train.batch, recipe.train.micro_batch, 1)
    return recipe, _Estimate(recipe, GPUS["l40"]).counted(batches, 0.0).micro


@pytest.mark.slow
def test_attention_by_hand():
    """12 a layer, channel and pair of tokens, of which a causal kernel computes half."""
    recipe, micro = counted("quickstart", "model.layers=2")
    assert micro.attention.whole == 12 * 2 * 256 * 256 * 256 * recipe.train.micro_batch
    assert micro.attention.computed == micro.attention.whole // 2
    recipe, micro = counted("vit_digits")
    model = recipe.model
    tokens = (model.image // model.patch) ** 2 + 1
    assert micro.attention.whole == 12 * model.layers * model.width * tokens**2 * recipe.train.micro_batch
    assert micro.attention.computed == micro.attention.whole


@pytest.mark.slow
def test_layers_move_as_much_as_there_are_of_them():
    """Beside the layers something is moved, which more layers do not change."""
    _, two = counted("quickstart", "model.layers=2")
    _, six = counted("quickstart", "model.layers=6")
    assert six.traffic_of_layers == pytest.approx(3 * two.traffic_of_layers, rel=1e-3)
    assert six.traffic - six.traffic_of_layers == pytest.approx(two.traffic - two.traffic_of_layers, rel=1e-3)
    assert 0 < two.traffic_of_layers < two.traffic


@pytest.mark.slow
def test_the_561m_gpt_on_eight_h100_against_the_run_of_its_authors():
    """nanochat reports an MFU of 47 to 48%; arithmetic without a GPU is taken to be right within a fifth of that."""
    plan = plan_training(load_recipe(ROOT / "recipes/gpt561m_0L.yaml"), 8, GPUS["h100"])
    assert plan.share_of_peak == pytest.approx(0.475, rel=0.2)
    assert plan.hours == pytest.approx(plan.steps * plan.step_time.seconds / 3600)
    assert plan.flops_per_step == pytest.approx(8 * plan.share_of_peak * 989e12 * plan.step_time.seconds)
    text = plan.to_text()
    for shown in ("matrix products", "attention", "elementwise", "optimizer", "% of the peak (MFU)"):
        assert shown in text
    assert "reading" not in text  # tokens are read from memory maps


@pytest.mark.slow
def test_the_loader_is_said_to_be_the_limit():
    plan = plan_training(load_recipe(ROOT / "recipes/vit_digits.yaml", ["train.compile=false"]), 1, GPUS["l40"])
    cores, rate = plan.step_time.reading_cores, plan.step_time.examples_per_second
    assert f"{rate:,.0f} images a second need {cores:,} cores" in plan.to_text()
    assert cores == -(-rate * plan.facts.read_seconds // 1)
    few = dataclasses.replace(plan.step_time, reading_cores=40, has_cores=False)
    assert "the loader is the limit" in dataclasses.replace(plan, step_time=few).to_text()
    assert plan.to_dict()["step_time"]["seconds"] == plan.step_time.seconds


@pytest.mark.parametrize(("precision", "size"), [("bf16", 2), ("float32", 4)])
def test_muon_sends_its_matrices_once_in_its_own_precision(precision, size):
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", [f"train.precision={precision}"])
    model = recipe.model
    matrices = 12 * model.layers * model.width**2  # q, k, v, out and the MLP's two
    estimate = _Estimate(recipe, GPUS["l40"])
    assert estimate.counted(plan_batches(16, 16, 1), 0.0).orthogonalised == size * matrices


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
