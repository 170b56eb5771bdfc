"""Exported ViTs in timm: equal outputs, and a refusal where stock timm would compute something else."""

import sys

import pytest
import timm
import torch
from export_support import dino_run, vit_run
from support import run_process

import lapcli.timm  # noqa: F401  registers the architectures
from lapcli.export.export import export_run
from lapcli.objectives.weights import find_checkpoint, open_run
from lapcli.runtime.errors import UsageError

IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def both(run):
    loaded = open_run(run, find_checkpoint(run, "last"), torch.device("cpu"), float32=True)
    folder = export_run(run, "timm", verified=False).folder
    return loaded.module.eval(), timm.create_model(f"local-dir:{folder}", pretrained=True).eval(), folder


@pytest.mark.parametrize("changes", [{}, {"layer_scale": None}, {"laplacian_heads": [0, 4]}, {"laplacian_heads": 0}])
@torch.inference_mode()
def test_a_classifier(changes, tmp_path):
    ours, theirs, _ = both(vit_run(tmp_path, **changes))
    assert torch.equal(ours(IMAGES), theirs(IMAGES))


@torch.inference_mode()
def test_a_self_supervised_teacher_is_a_backbone(tmp_path):
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    ours, theirs, _ = both(dino_run(tmp_path, laplacian_heads=[0, 2], rope_base=50.0))
    assert torch.allclose(ours(images), theirs(images), atol=1e-5)
    assert torch.allclose(ours.tokens([images])[0], theirs.forward_features(images), atol=1e-5)


def test_images_are_prepared_according_to_the_recipe(tmp_path):
    data = {"mean": [0.3, 0.2, 0.1], "std": [0.4, 0.5, 0.6], "crop_ratio": 0.9, "interpolation": "bilinear"}
    _, theirs, _ = both(vit_run(tmp_path, data=data))
    config = timm.data.resolve_model_data_config(theirs)
    assert [list(config[key]) for key in ("mean", "std", "input_size")] == [data["mean"], data["std"], [3, 8, 8]]
    assert (config["crop_pct"], config["interpolation"]) == (0.9, "bilinear")
    assert theirs.pretrained_cfg["label_names"][3] == "digit 3"


@pytest.mark.long
def test_stock_timm_refuses_laplacian_folders_and_accepts_plain_ones(tmp_path):
    laplacian, plain = vit_run(tmp_path), vit_run(tmp_path, name="plain", laplacian_heads=0)
    folders = [str(export_run(run, "timm", verified=False).folder) for run in (laplacian, plain)]
    program = """
import sys, timm
for folder in sys.argv[1:]:
    try:
        print(type(timm.create_model(f"local-dir:{folder}", pretrained=True)).__name__)
    except RuntimeError as error:
        print(error)
assert "lapcli" not in sys.modules
"""
    done = run_process([sys.executable, "-c", program, *folders], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["Unknown model (lap_vit)", "VisionTransformer"]


def test_models_that_timm_cannot_express_are_refused(tmp_path):
    run = dino_run(tmp_path, rope_precision="bf16")
    with pytest.raises(UsageError, match="rotary positions in float32"):
        export_run(run, "timm", verified=False)
    assert not (run.path / "export" / "timm").exists()
