"""An optimizer from another package trains lap's own kinds and other packages' kinds."""

import json

import pytest
import torch
from safetensors.torch import load_file

VIT = ["recipes/vit_digits.yaml", "--set", "train.steps=4", "--set", "schedule.warmup_epochs=0"]
LION = ["--set", "optimizer.name=lion", "--set", "optimizer.lr=1e-3"]


def test_a_vit_trained_with_it_keeps_its_state(extended):
    extended("train", *VIT, *LION, "--name", "lion")
    run = extended.runs / "lion"
    state = load_file(run / "checkpoints" / "step-000004" / "optimizer.safetensors")
    names = {name.partition("/")[0] for name in state}
    assert names == {"average"}
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


def test_its_plan_counts_one_number_for_a_weight(extended):
    plans = [json.loads(extended("plan", *VIT, *how, "--json").stdout) for how in ([], LION)]
    adamw, lion = (plan["memory"]["optimizer"] for plan in plans)
    assert lion == pytest.approx(adamw / 2, rel=0.01)
