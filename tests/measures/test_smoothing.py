"""`validation.smoothing`: what is logged at each validation, for every kind of model, and that it changes nothing."""

import json

import numpy as np
import pytest
import torch
from analysis_support import self_supervised_recipe, vit
from image_support import image_recipe
from safetensors.torch import load_file
from sklearn.metrics.pairwise import cosine_similarity as pairwise
from support import tiny_recipe, train_here, write_text

from lapcli.measures.smoothing import smoothing, without_padding
from lapcli.objectives.loading import find_checkpoint, open_run


def lines(run):
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [line for line in found if any(name.startswith("validation_") for name in line)]


def of(line):
    return {name: value for name, value in line.items() if name.startswith("smoothing_")}


def recipe(kind, text, smooth):
    validation = {"every": 2, "smoothing": smooth}
    if kind == "language":
        return tiny_recipe(write_text(text), train={"steps": 4}, validation=validation)
    if kind == "classification":
        return image_recipe(train={"steps": 4}, validation=validation)
    return self_supervised_recipe(train={"steps": 4}, validation=validation)


@pytest.mark.parametrize("kind", ["language", "classification", "self-supervised"])
def test_every_validation_has_it_and_training_is_the_same(kind, tmp_path):
    smooth, plain = (
        train_here(recipe(kind, tmp_path / "text.txt", value), tmp_path, name)
        for value, name in ((True, "smooth"), (False, "plain"))
    )
    one, other = (load_file(run.checkpoints / "step-000004" / "model.safetensors") for run in (smooth, plain))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [line["step"] for line in lines(smooth)] == [0, 2, 4]
    for line in lines(smooth):
        values = of(line)
        layers = smooth.recipe.model.layers
        assert set(values) == {
            "smoothing_within_sequence_share",
            "smoothing_k_0.99",
            *(f"smoothing_cosine_layer_{layer}" for layer in range(layers)),
        }
        assert 0 < values["smoothing_within_sequence_share"] <= 1
        assert values["smoothing_k_0.99"] >= 1
    assert not any(of(line) for line in lines(plain))


def test_the_numbers_are_of_the_first_held_out_sequences(tmp_path):
    run = train_here(recipe("language", tmp_path / "text.txt", True), tmp_path)
    model = open_run(run, find_checkpoint(run, "last"), torch.device("cpu")).module
    from lapcli.data.text.batches import TokenBatches
    from lapcli.data.text.tokens import prepare_text

    data = prepare_text(run.recipe.data, run.recipe.tokenizer)
    tokens, _ = TokenBatches(data.validation, context=32, batch=1, seed=0, shuffled=True).sequences(0, 0, 4)
    seen = []
    model.blocks[-1].register_forward_hook(lambda _, __, out: seen.append(out.detach().double().numpy()))
    model.hidden(tokens)
    (x,) = seen
    logged = of(lines(run)[-1])
    cosines = [(pairwise(s).sum() - 32) / (32 * 31) for s in x]
    assert logged["smoothing_cosine_layer_1"] == pytest.approx(np.mean(cosines), rel=1e-5)
    within = np.mean([((s - s.mean(axis=0)) ** 2).sum(axis=1).mean() for s in x])
    total = ((x - x.mean(axis=(0, 1))) ** 2).sum(axis=2).mean()
    assert logged["smoothing_within_sequence_share"] == pytest.approx(within / total, rel=1e-5)


def test_what_operators_learn_is_logged_by_layer_and_head(tmp_path):
    operators = {"mix": {"heads": 2, "learn": ["alpha"]}, "exclusive": {"heads": 1, "gate": "tanh"}, "gate": 1}
    logging = recipe("language", tmp_path / "text.txt", True)
    logging = logging.model_copy(
        update={"model": logging.model.model_copy(update={"laplacian_heads": 0, "operators": operators})}
    )
    run = train_here(logging, tmp_path)
    logged = [{name: of(line)[name] for name in of(line) if "_head_" in name} for line in lines(run)]
    names = {f"smoothing_mix_alpha_layer_{layer}_head_{head}": (layer, head) for layer in (0, 1) for head in (2, 3)}
    assert set(logged[-1]) == {*names, *(f"smoothing_exclusive_gate_layer_{layer}_head_1" for layer in (0, 1))}
    assert set(logged[0].values()) == {0.0}
    weights = load_file(run.checkpoints / "step-000004" / "model.safetensors")
    for name, (layer, head) in names.items():
        assert logged[-1][name] == float(weights[f"blocks.{layer}.attn.operators.mix_alpha"][head - 2])
        gate = weights[f"blocks.{layer}.attn.operators.exclusive_gate"].tanh()
        assert logged[-1][f"smoothing_exclusive_gate_layer_{layer}_head_1"] == float(gate)
    assert any(logged[-1].values()), "it has learnt something"


def test_a_compiled_model_is_measured_as_it_is():
    model, images = vit(2)
    expected = smoothing(model, images)
    model.blocks[0].compile(backend="eager")
    assert smoothing(model, images) == expected


def test_padding_is_no_token():
    targets = torch.tensor([[-1, 5, 6, -1], [-1, 5, -1, -1]])
    assert without_padding(torch.arange(8).view(2, 4), targets).tolist() == [[0, 1], [4, 5]]
