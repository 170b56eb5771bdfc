"""A killed self-supervised run, started again, ends bit for bit where the uninterrupted one does, teacher included.

Drop path, accumulation, the frozen prototypes and crops read by a worker are on.
"""

import signal

import torch
from dino_support import dino_recipe
from safetensors.torch import load_file
from support import die_at, die_in_update, exit_code, start_child

from lapcli.training.metrics import read_metrics, without_times


def outcome(runs):
    folder = runs / "run" / "checkpoints" / "step-000006"
    lines = read_metrics(runs / "run" / "metrics.jsonl")
    return (
        {name: load_file(folder / f"{name}.safetensors") for name in ("model", "optimizer")},
        [without_times(line) for line in lines],
    )


def test_killed_and_resumed(tmp_path, shared_cache):
    recipe = dino_recipe(data={"workers": 1})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert exit_code(start_child(recipe, whole, shared_cache)) == 0, (whole / "child.log").read_text()
    # From step 0 into the fifth update, from the checkpoint of step 3 into the save of step 6, then to the end.
    assert exit_code(start_child(recipe, cut, shared_cache, die_in_update, 5)) == -signal.SIGKILL
    assert exit_code(start_child(recipe, cut, shared_cache, die_at, "model written", 1)) == -signal.SIGKILL
    assert exit_code(start_child(recipe, cut, shared_cache)) == 0
    (expected, lines), (found, other_lines) = outcome(whole), outcome(cut)
    for part in ("model", "optimizer"):
        assert found[part].keys() == expected[part].keys()
        for name, tensor in expected[part].items():
            assert torch.equal(found[part][name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    assert lines == other_lines
    names = expected["model"].keys()
    assert {name.partition(".")[0] for name in names} == {"student", "teacher"}
    moved = [n for n in names if n.startswith("teacher.") and n.endswith("weight")]
    assert any(not torch.equal(expected["model"][n], expected["model"][n.replace("teacher", "student")]) for n in moved)
    assert {"loss_local", "loss_koleo", "loss_ibot"} <= set(lines[1])
    assert [line["validation_knn"] for line in lines if "validation_knn" in line]
