"""`--model timm:NAME`: weights from a file, exactly those, or a sentence that says why not."""

import hashlib

import pytest
import timm
import torch
from probe_support import CPU
from safetensors.torch import save_file

from lapcli.objectives.loading import open_timm
from lapcli.runtime.errors import DataError, UsageError

NAME = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """With a head of 1,000 classes, as the hub's files have."""
    torch.manual_seed(3)
    state = timm.create_model(NAME).state_dict()
    folder = tmp_path_factory.mktemp("weights")
    save_file(state, folder / "model.safetensors")
    torch.save(state, folder / "model.pth")
    return folder, state


@pytest.mark.parametrize("file", ["model.safetensors", "model.pth"])
def test_a_file_is_loaded_whole(weights, file):
    folder, state = weights
    stock = open_timm(f"timm:{NAME}", CPU, weights=folder / file)
    loaded = stock.module.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items() if not key.startswith("head."))
    assert stock.weights_sha256 == hashlib.sha256((folder / file).read_bytes()).hexdigest()
    assert stock.image_size == 224
    assert stock.images.mean == [0.5, 0.5, 0.5]  # this model's own


def test_a_classifier_is_loaded_with_the_rest_or_missed(weights, tmp_path):
    folder, state = weights
    stock = open_timm(f"timm:{NAME}", CPU, weights=folder / "model.safetensors", with_classifier=True)
    assert torch.equal(stock.module.head.weight, state["head.weight"])
    save_file({k: v for k, v in state.items() if not k.startswith("head.")}, tmp_path / "headless.safetensors")
    with pytest.raises(DataError, match=r"head.weight .*missing"):
        open_timm(f"timm:{NAME}", CPU, weights=tmp_path / "headless.safetensors", with_classifier=True)


def test_weights_that_do_not_fit_are_refused(weights, tmp_path):
    _, state = weights
    save_file({k: v for k, v in state.items() if not k.startswith("blocks.3.")}, tmp_path / "less.safetensors")
    save_file({**state, "extra.weight": torch.zeros(2)}, tmp_path / "more.safetensors")
    save_file(state, tmp_path / "turned.safetensors", metadata={"laplacian_heads": "[0, 1]"})
    save_file(timm.create_model("vit_small_patch16_224").state_dict(), tmp_path / "other.safetensors")
    save_file({**state, "blocks.1.attn.proj.bias": torch.ones(192, dtype=torch.int8)}, tmp_path / "eighths.safetensors")
    broken = {**state, "blocks.2.mlp.fc1.weight": state["blocks.2.mlp.fc1.weight"].clone()}
    broken["blocks.2.mlp.fc1.weight"][5, 7] = torch.nan
    save_file(broken, tmp_path / "broken.safetensors")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "junk.pth").write_bytes(b"junk")
    for file, message in (
        ("less.safetensors", r"blocks.3.norm1.weight \(and 11 more\) is missing from it"),
        ("more.safetensors", "extra.weight is not a tensor of the model"),
        ("turned.safetensors", r"laplacian_heads \[0, 1\], a stock ViT has none.*--init-from"),
        ("other.safetensors", r"cls_token has shape \[1, 1, 384\] and the model's has \[1, 1, 192\]"),
        ("eighths.safetensors", r"blocks.1.attn.proj.bias is torch.int8, not torch.float32"),
        ("broken.safetensors", "blocks.2.mlp.fc1.weight has values that are not finite"),
        ("junk.safetensors", "not a readable safetensors file"),
        ("junk.pth", "is not a file of tensors that torch can read"),
    ):
        with pytest.raises(DataError, match=message):
            open_timm(f"timm:{NAME}", CPU, weights=tmp_path / file)
    with pytest.raises(UsageError, match="there is no file"):
        open_timm(f"timm:{NAME}", CPU, weights=tmp_path / "none.safetensors")


def test_without_a_network_the_next_step_is_named():
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set.*train.init_from.weights"):
        open_timm(f"timm:{NAME}", CPU)
