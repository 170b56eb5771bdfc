"""A killed and resumed run of each objective ends bit for bit like an uninterrupted run."""

import json
import os
import resource
import signal

import pytest
import torch
from dino_support import dino_recipe
from image_support import image_recipe
from safetensors.torch import load_file
from support import (
    LOG,
    die_at,
    die_in_update,
    exit_code,
    run_main,
    staged,
    start_child,
    tiny_chat_recipe,
    tiny_recipe,
    train_here,
)

from lapcli.runtime.errors import Interrupted
from lapcli.training import metrics
from lapcli.training.metrics import read_metrics, without_times

STEPS = 10
# The points inside a save at which a kill could leave partial files.
FAULT_POINTS = [
    ("model written", 1),
    ("before rename", 2),
    ("after rename", 2),
    ("removing", 1),
]


def final_state(runs):
    """The last checkpoint's tensors, by file."""
    folder = max((runs / "run" / "checkpoints").iterdir())
    return {name: load_file(folder / f"{name}.safetensors") for name in ("model", "optimizer")}


def bits(tensor):
    return tensor.flatten().view(torch.uint8)


def assert_same_bits(a, b):
    for name in ("model", "optimizer"):
        assert a[name].keys() == b[name].keys()
        for key in a[name]:
            assert torch.equal(bits(a[name][key]), bits(b[name][key])), f"{name} {key}"


def numbers(runs):
    """Losses, learning rates and validations by step: all metrics that do not depend on the clock."""
    lines = read_metrics(runs / "run" / "metrics.jsonl")
    return [without_times(line) for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory, shared_cache):
    runs = tmp_path_factory.mktemp("uninterrupted")
    recipe = tiny_recipe(text)
    assert exit_code(start_child(recipe, runs, shared_cache)) == 0
    return recipe, runs


def with_checkpoints(recipe, **changes):
    return recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("point", "times", "asynchronous"),
    [
        *((point, times, False) for point, times in FAULT_POINTS),
        ("before rename", 2, True),
        *(pytest.param(*point, True, marks=pytest.mark.long) for point in FAULT_POINTS if point[0] != "before rename"),
    ],
)
def test_killed_inside_a_save(uninterrupted, tmp_path, shared_cache, point, times, asynchronous):
    recipe, reference = uninterrupted
    recipe = with_checkpoints(recipe, asynchronous=asynchronous)
    if point == "removing":  # happens once there are more checkpoints than are kept
        recipe = with_checkpoints(recipe, keep=1)
    assert exit_code(start_child(recipe, tmp_path, shared_cache, die_at, point, times)) == -signal.SIGKILL
    assert exit_code(start_child(recipe, tmp_path, shared_cache)) == 0
    assert_same_bits(final_state(tmp_path), final_state(reference))
    assert numbers(tmp_path) == numbers(reference)
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert all(name.startswith("step-") for name in left), left


@pytest.mark.parametrize("kind", ["language_model", "classification", "self_supervised", "midtrain", "sft"])
def test_killed_inside_updates_and_a_save(kind, text, base, tmp_path, shared_cache):
    """Augmentation, mixing, drop path, accumulation, frozen prototypes and prefetching workers are on."""
    if kind in ("midtrain", "sft"):
        recipe = staged(tiny_chat_recipe(tmp_path), kind, base)
    else:
        lamb = {"name": "lamb", "lr": 3e-3, "weight_decay": 0.02}
        images = {"workers": 1, "augmentation": {"repeats": 3}}
        recipe = {
            "language_model": lambda: tiny_recipe(text),
            "classification": lambda: image_recipe(optimizer=lamb, train={"loss": "binary_cross_entropy"}, data=images),
            "self_supervised": lambda: dino_recipe(data={"workers": 1}),
        }[kind]()
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert exit_code(start_child(recipe, whole, shared_cache)) == 0, (whole / LOG).read_text()
    for before, *arguments in ((die_in_update, 4), (die_at, "model written", 1), (die_in_update, 2)):
        assert exit_code(start_child(recipe, cut, shared_cache, before, *arguments)) == -signal.SIGKILL
    assert exit_code(start_child(recipe, cut, shared_cache)) == 0
    assert_same_bits(final_state(cut), final_state(whole))
    assert numbers(cut) == numbers(whole)
    if kind == "self_supervised":
        model = final_state(whole)["model"]
        moved = [name for name in model if name.startswith("teacher.") and name.endswith("weight")]
        assert any(not torch.equal(model[name], model[name.replace("teacher", "student")]) for name in moved)


def test_a_signal_saves_and_exits_with_75(uninterrupted, tmp_path, shared_cache):
    recipe, reference = uninterrupted
    child = start_child(recipe, tmp_path, shared_cache, _ask_to_stop_in_update, 5, signal.SIGUSR1)
    assert exit_code(child) == 75
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["status"], info["step"]) == ("interrupted", 5)
    assert exit_code(start_child(recipe, tmp_path, shared_cache)) == 0
    assert_same_bits(final_state(tmp_path), final_state(reference))
    assert numbers(tmp_path) == numbers(reference)


@pytest.mark.parametrize(
    ("where", "number"), [("Loop._resume", signal.SIGTERM), ("LanguageModel.finish", signal.SIGUSR1)]
)
def test_a_signal_before_the_first_step_or_after_the_last_exits_with_75(
    uninterrupted, tmp_path, shared_cache, where, number
):
    recipe, reference = uninterrupted
    assert exit_code(start_child(recipe, tmp_path, shared_cache, _ask_to_stop_in, where, number)) == 75
    assert f"stopped by {number.name}" in (tmp_path / LOG).read_text()
    if where == "LanguageModel.finish":
        info = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (info["status"], info["step"]) == ("interrupted", STEPS)
    else:
        assert not (tmp_path / "run").exists()
    assert exit_code(start_child(recipe, tmp_path, shared_cache)) == 0
    assert_same_bits(final_state(tmp_path), final_state(reference))
    assert numbers(tmp_path) == numbers(reference)


def _ask_to_stop_in(where, number):
    from lapcli.objectives.language_model import LanguageModel
    from lapcli.training.loop import Loop

    name, _, method = where.partition(".")
    patched = {"Loop": Loop, "LanguageModel": LanguageModel}[name]
    before = getattr(patched, method)

    def asked(self, *arguments):
        os.kill(os.getpid(), number)
        return before(self, *arguments)

    setattr(patched, method, asked)


def _ask_to_stop_in_update(step, number):
    from lapcli.training.optimizers import Optimizers

    before = Optimizers.step
    done = 0

    def update(self):
        nonlocal done
        done += 1
        if done == step:
            os.kill(os.getpid(), number)
        before(self)

    Optimizers.step = update


def _stop_after(step):
    """Kills the child right after the checkpoint of that step, before later ones exist."""
    die_at("after rename", step // 3)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", "cut"),
        ("state.json", "flipped"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_used(uninterrupted, tmp_path, shared_cache, file, damage):
    recipe, reference = uninterrupted
    assert exit_code(start_child(recipe, tmp_path, shared_cache, _stop_after, 6)) == -signal.SIGKILL
    path = tmp_path / "run" / "checkpoints" / "step-000006" / file
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
    assert exit_code(start_child(recipe, tmp_path, shared_cache)) == 0
    warnings = (tmp_path / LOG).read_text()
    assert str(path) in warnings
    assert "step-000003" in warnings  # where it went on
    assert_same_bits(final_state(tmp_path), final_state(reference))
    assert numbers(tmp_path) == numbers(reference)


def _no_room_from(step):
    """From that save on, files are limited to 20 kB: the kernel refuses the write, as on a full disk."""
    from lapcli import checkpoint

    save = checkpoint.save
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limited(**given):
        if given["step"] >= step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return save(**given)

    checkpoint.save = limited


def test_a_full_disk_is_a_clear_error_and_loses_nothing(uninterrupted, tmp_path, shared_cache):
    """A failed background save stops the run at the next save at the latest."""
    recipe, reference = uninterrupted
    recipe = with_checkpoints(recipe, asynchronous=True)
    assert exit_code(start_child(recipe, tmp_path, shared_cache, _no_room_from, 6)) == 1
    message = (tmp_path / LOG).read_text()
    assert "could not save step 6" in message
    assert "step-000003" in message
    assert "Traceback" not in message
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]
    taken = [line["step"] for line in numbers(tmp_path) if "loss" in line]
    assert taken[:6] == [1, 2, 3, 4, 5, 6]
    assert len(taken) <= 9
    assert exit_code(start_child(recipe, tmp_path, shared_cache)) == 0
    assert_same_bits(final_state(tmp_path), final_state(reference))
    assert numbers(tmp_path) == numbers(reference)


def _break_the_loss_at(step):
    from lapcli.objectives.language_model import LanguageModel

    batch, loss = LanguageModel.batch, LanguageModel.loss
    now = 0

    def remembered(self, at, micro_step):
        nonlocal now
        now = at
        return batch(self, at, micro_step)

    LanguageModel.batch = remembered
    LanguageModel.loss = lambda self, given: loss(self, given) * (float("nan") if now == step else 1.0)


def test_a_non_finite_loss_stops_the_run(uninterrupted, tmp_path, shared_cache):
    recipe, reference = uninterrupted
    assert exit_code(start_child(recipe, tmp_path, shared_cache, _break_the_loss_at, 4)) == 1
    message = (tmp_path / LOG).read_text()
    assert "nan at step 5" in message
    assert "sequences" in message  # the batch's identity
    assert "step-000003" in message
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "failed"
    assert exit_code(start_child(recipe, tmp_path, shared_cache)) == 0  # the fault is gone, and nothing was lost
    assert_same_bits(final_state(tmp_path), final_state(reference))


def test_parts_of_the_2026_nanochat_model_resume_and_are_refused_by_exports(text, tmp_path, monkeypatch, capsys):
    parts = dict.fromkeys(("residual_lambdas", "x0_lambdas", "value_embeddings"), True)
    recipe = tiny_recipe(text, model=parts, train={"steps": 6})
    whole = train_here(recipe, tmp_path, "whole")
    starts = load_file(whole.checkpoints / "step-000003" / "model.safetensors")
    ends = load_file(whole.checkpoints / "step-000006" / "model.safetensors")
    for name in ("residual_lambdas", "x0_lambdas", "value_embed.1.weight", "blocks.1.attn.value_gate.weight"):
        assert not torch.equal(starts[name], ends[name])

    def stop(file, line):
        if line["step"] == 4 and "loss" in line:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(metrics, "listeners", [stop])
    with pytest.raises(Interrupted):
        train_here(recipe, tmp_path, "stopped")
    assert train_here(recipe, tmp_path, "stopped").info["weights_sha256"] == whole.info["weights_sha256"]
    arguments = ["export", "whole", "--to", "hf", "--runs-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    code, _, err = run_main(capsys, *arguments)
    assert (code, all(f"model.{part}" in err for part in parts)) == (2, True)
