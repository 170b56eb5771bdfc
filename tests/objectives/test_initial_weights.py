"""Runs that start from given weights. The reference outputs come from timm and from the source run."""

import io
import json
import pickle
import shutil

import pytest
import torch
from dino_support import dino_recipe
from export_support import dino_run, gpt_run, vit_run
from image_support import image_recipe
from safetensors.torch import load_file, save_file
from support import lap, tiny_recipe, train_here, write_text

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.models.vit import build_vit
from lapcli.objectives.weights import find_checkpoint, fit_weights, open_run, open_weights
from lapcli.recipe import recipe_hash
from lapcli.recipe.schema import InitFrom
from lapcli.runs import read_run
from lapcli.runtime.errors import DataError, UsageError

SMALL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 32, "laplacian_heads": 2}


def with_source(recipe, source, **keys):
    train = recipe.train.model_copy(update={"init_from": InitFrom(source=source, **keys)})
    return recipe.model_copy(update={"train": train})


@pytest.fixture
def source(tmp_path):
    """A finished GPT with one Laplacian head in each layer."""
    return gpt_run(tmp_path / "runs", chat=False, name="source", context=32)


def continuing(tmp_path, given, text=None, **train):
    base = tiny_recipe(
        text or write_text(tmp_path / "other.txt"),
        model=SMALL,
        tokenizer={"vocab": Tokenizer.from_file(tmp_path / "runs/source/tokenizer.json").vocab_size},
        train={"steps": 4, **train},
        checkpoint={"every": 2},
    )
    return with_source(base, given)


def test_a_run_starts_from_another_run_and_lists_the_differences(tmp_path, source):
    recipe, log = continuing(tmp_path, "run:source"), io.StringIO()
    run = train_here(recipe, tmp_path / "runs", "new", log)
    said = log.getvalue()
    assert "starts from" in said
    assert "head plan: 2 Laplacian heads there, 4 here" in said
    # The first validation uses the source's weights: the source model on the new text, with the new head plan.
    kept = read_run(run.path)
    weights = open_weights(InitFrom(source="run:source"), tmp_path / "runs")
    untouched = open_run(kept, find_checkpoint(kept, "2"), torch.device("cpu")).module
    fit_weights(weights, untouched)
    expected = load_file(source.checkpoints / "step-000001/model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in untouched.state_dict().items())
    first = json.loads(run.metrics.read_text().splitlines()[0])
    assert first["step"] == 0
    assert Tokenizer.from_file(run.path / "tokenizer.json").sha256 == weights.tokenizer().sha256
    assert kept.recipe.train.init_from.sha256 == source.info["weights_sha256"]


def test_identity_is_the_hash_of_the_weights_not_their_path(tmp_path, source):
    plain = continuing(tmp_path, "run:source")
    drawn = plain.model_copy(update={"train": plain.train.model_copy(update={"init_from": None})})
    sha256 = source.info["weights_sha256"]
    here, there = (with_source(drawn, place, sha256=sha256) for place in ("run:source", "run:/elsewhere/copy"))
    assert recipe_hash(here) == recipe_hash(there) != recipe_hash(drawn)
    assert recipe_hash(here) != recipe_hash(with_source(drawn, "run:source", sha256="0" * 64))
    # The same weights at another path resume the run; other weights are refused.
    runs = tmp_path / "runs"
    train_here(plain, runs, "new")
    shutil.copytree(source.path, runs / "copy")
    train_here(continuing(tmp_path, "run:copy"), runs, "new")
    gpt_run(tmp_path / "runs", chat=False, name="other", context=32, kv_heads=4)
    with pytest.raises(UsageError, match=r"train\.init_from\.sha256"):
        train_here(continuing(tmp_path, "run:other"), runs, "new")


def test_a_resume_does_not_read_the_source_and_is_bitwise_exact(tmp_path, source):
    runs, recipe = tmp_path / "runs", continuing(tmp_path, "run:source")
    whole = train_here(recipe, runs, "whole")
    train_here(recipe, runs, "cut")
    # The state after a kill between the saves of steps 2 and 4.
    shutil.rmtree(runs / "cut/checkpoints/step-000004")
    read_run(runs / "cut").update(status="interrupted", step=2)
    shutil.rmtree(source.path)
    cut = train_here(recipe, runs, "cut")
    assert read_run(cut.path).info["weights_sha256"] == read_run(whole.path).info["weights_sha256"]
    assert read_run(cut.path).recipe == read_run(whole.path).recipe
    with pytest.raises(UsageError, match="there is no run source"):
        train_here(recipe, runs, "third")


def test_wrong_shapes_an_empty_intersection_and_another_vocabulary_are_refused(tmp_path, source):
    vit_run(tmp_path / "runs")
    with pytest.raises(DataError, match="no tensor name in"):
        train_here(with_source(image_recipe(), "run:source"), tmp_path / "runs", "x")
    wide = continuing(tmp_path, "run:source")
    wide = wide.model_copy(update={"model": wide.model.model_copy(update={"width": 64})})
    with pytest.raises(DataError, match=r"embed\.weight has shape .* change the recipe's model"):
        train_here(wide, tmp_path / "runs", "x")
    small = continuing(tmp_path, "run:source")
    small = small.model_copy(update={"tokenizer": small.tokenizer.model_copy(update={"vocab": 270})})
    with pytest.raises(UsageError, match=r"use --set tokenizer\.vocab="):
        train_here(small, tmp_path / "runs", "x")
    deep = continuing(tmp_path, "run:source")
    deep, log = deep.model_copy(update={"model": deep.model.model_copy(update={"layers": 3})}), io.StringIO()
    train_here(deep, tmp_path / "runs", "deep", log)
    assert "not in the source, newly initialised: blocks.2.attn.q.weight" in log.getvalue()


def stock_vit(path, **options):
    """A timm ViT with weights from a file in the hub's format."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    save_file(model.state_dict(), path)
    return model


def test_a_stock_timm_vit_computes_the_same_without_laplacian_heads(tmp_path):
    """Our model has no position for the class token, and may have LayerScale: both are exact."""
    theirs = stock_vit(tmp_path / "w.safetensors")
    given = InitFrom(source="timm:vit_tiny_patch16_224", weights=str(tmp_path / "w.safetensors"))
    images = torch.randn(2, 3, 224, 224)
    for layer_scale in (None, 1e-4):
        shape = {"layers": 12, "width": 192, "heads": 3, "image": 224, "patch": 16, "classes": 1000}
        section = image_recipe(model={**shape, "layer_scale": layer_scale, "drop_path": 0.0}).model
        ours = build_vit(section.model_copy(update={"laplacian_heads": 0}), 1).eval()
        fit = fit_weights(open_weights(given, tmp_path), ours)
        assert not any("initialised" in line or "not used" in line for line in fit)
        with torch.no_grad():
            assert torch.allclose(ours(images), theirs(images), atol=1e-4)


class Hostile:
    def __reduce__(self):
        return eval, ("open('touched', 'w')",)


def test_a_pickle_without_weights_is_refused_and_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in (b"hello", b"", pickle.dumps([1, 2]), pickle.dumps(Hostile())):
        (tmp_path / "w.pth").write_bytes(content)
        given = InitFrom(source="timm:vit_tiny_patch16_224", weights=str(tmp_path / "w.pth"))
        with pytest.raises(DataError, match=r"w\.pth is not a file of tensors that torch can read; give another file"):
            open_weights(given, tmp_path).read()
    torch.save({"weight": Hostile()}, tmp_path / "w.pth")
    with pytest.raises(DataError, match="is not a file of tensors"):
        open_weights(given, tmp_path).read()
    assert not (tmp_path / "touched").exists()
    # Weights of Laplacian heads would load into a stock ViT, but compute nonsense.
    save_file({"head.bias": torch.zeros(2)}, tmp_path / "w.safetensors", metadata={"laplacian_heads": "[0, 1]"})
    with pytest.raises(DataError, match=r"laplacian_heads \[0, 1\], a stock ViT has none.*--init-from"):
        open_weights(InitFrom(source=given.source, weights=str(tmp_path / "w.safetensors")), tmp_path).read()


def test_positions_and_classifier_are_resized(tmp_path):
    stock_vit(tmp_path / "w.safetensors")
    given = InitFrom(source="timm:vit_tiny_patch16_224", weights=str(tmp_path / "w.safetensors"))
    shape = {"layers": 12, "width": 192, "heads": 3, "image": 64, "patch": 16, "classes": 10, "layer_scale": None}
    model = build_vit(image_recipe(model={**shape, "laplacian_heads": 1}).model, 1)
    drawn = model.head.weight.clone()
    source = open_weights(given, tmp_path)
    fit = fit_weights(source, model)
    lines = "\n".join(fit)
    assert "pos_embed: resized from 14 x 14 patches to 4 x 4" in lines
    assert "head.weight, head.bias: newly initialised, 1,000 classes there, 10 here" in lines
    assert torch.equal(model.head.weight, drawn)
    # Interpolation keeps a constant and nearly keeps the mean position.
    before = source.read()["pos_embed"][:, 1:]
    assert torch.allclose(model.pos_embed.mean(1), before.mean(1), atol=0.02)
    # LayerScale weights without a counterpart in the model would be lost.
    save_file(
        {**load_file(tmp_path / "w.safetensors"), "blocks.0.ls1.gamma": torch.ones(192)}, tmp_path / "s.safetensors"
    )
    scaled = given.model_copy(update={"weights": str(tmp_path / "s.safetensors")})
    with pytest.raises(UsageError, match=r"model\.layer_scale is null"):
        fit_weights(open_weights(scaled, tmp_path), model)


def test_a_backbone_initialises_student_and_teacher_and_a_run_provides_its_teacher(tmp_path):
    from lapcli.models.dino_vit import StudentTeacher

    run = dino_run(tmp_path / "runs")
    kept = load_file(run.checkpoints / "step-000001/model.safetensors")
    model = StudentTeacher(dino_recipe().model, 1)
    fit = fit_weights(open_weights(InitFrom(source="run:dino"), tmp_path / "runs"), model)
    assert fit == []
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_best_and_last_checkpoints_are_kept_and_can_initialise_a_run(tmp_path):
    recipe = image_recipe(train={"steps": 4}, validation={"every": 1}, checkpoint={"every": None, "keep": 1})
    trained = train_here(recipe, tmp_path / "runs", "trained")
    lines = [json.loads(line) for line in trained.metrics.read_text().splitlines()]
    top1 = {line["step"]: line["validation_top1"] for line in lines if "validation_top1" in line and line["step"]}
    best = min(step for step, value in top1.items() if value == max(top1.values()))
    assert {path.name for path in trained.checkpoints.iterdir()} == {f"step-{best:06d}", "step-000004"}
    expected = load_file(trained.checkpoints / f"step-{best:06d}/model.safetensors")
    tensors = open_weights(InitFrom(source="run:trained@best"), tmp_path / "runs").read()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_the_recipe_for_fine_tuning_trains_a_stock_vit(tmp_path, shared_cache):
    stock_vit(tmp_path / "w.safetensors")
    file = f"train.init_from.weights={tmp_path / 'w.safetensors'}"
    arguments = ["--init-from", "timm:vit_tiny_patch16_224", "--set", file]
    cut = ["--set", "train.steps=1", "--set", "train.batch=8", "--set", "train.micro_batch=8"]
    cut += ["--set", "schedule.warmup_epochs=0", "--set", "validation.batch=64"]
    result = lap(
        "train", "recipes/vit_finetune.yaml", *arguments, *cut, "--runs-dir", str(tmp_path), cache=shared_cache
    )
    assert result.returncode == 0, result.stderr
    assert "head plan: 0 Laplacian heads there, 12 here" in result.stderr
    assert "pos_embed: resized from 14 x 14 patches to 4 x 4" in result.stderr
    result = lap("train", "recipes/vit_finetune.yaml", *cut, "--runs-dir", str(tmp_path), "--name", "hub")
    assert result.returncode == 2
    assert "HF_HUB_OFFLINE is set" in result.stderr
