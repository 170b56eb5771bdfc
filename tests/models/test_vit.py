"""The paper's ViT: timm's model with the DeiT repository's initial values."""

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay

from lapcli.models.vit import build_vit, without_decay
from lapcli.recipe.vision import ViTModel

SMALL = {"layers": 3, "width": 48, "heads": 4, "image": 16, "patch": 4, "classes": 7}


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({}, 86_585_320),
        ({"image": 32, "patch": 4, "classes": 10}, 85_169_674),
        ({"image": 32, "patch": 4, "classes": 100}, 85_238_884),
    ],
)
def test_parameter_counts_of_the_paper_models(sizes, count):
    with torch.device("meta"):
        model = build_vit(ViTModel(**sizes, laplacian_heads=6))
    assert sum(p.numel() for p in model.parameters()) == count


def test_without_laplacian_heads_the_model_is_bitwise_timms():
    ours = build_vit(ViTModel(**SMALL, drop_path=0.2), seed=0).eval()
    stock = timm.create_model(
        "deit3_base_patch16_224",
        img_size=16,
        patch_size=4,
        embed_dim=48,
        depth=3,
        num_heads=4,
        num_classes=7,
        init_values=1e-4,
    ).eval()
    assert list(ours.state_dict()) == list(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(5, 3, 16, 16)
    assert torch.equal(ours(x), stock(x))
    turned = build_vit(ViTModel(**SMALL, drop_path=0.2, laplacian_heads=4, layer_scale=1.0), seed=0).eval()
    turned.load_state_dict(ours.state_dict())
    assert not torch.equal(turned(x), stock(x))


def test_weight_decay_skips_the_same_parameters_as_timm():
    model = build_vit(ViTModel(**SMALL))
    exempt, decayed = param_groups_weight_decay(model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay())
    assert exempt["weight_decay"] == 0.0
    assert {id(p) for p in exempt["params"]} == {
        id(p) for name, p in model.named_parameters() if name in without_decay(model)
    }
    assert len(decayed["params"]) > 0
