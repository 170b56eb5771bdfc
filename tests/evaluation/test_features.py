"""Features equal those of timm and of the teacher for every batch size; each image is passed through once."""

import pytest
import timm
import torch
from image_support import image_recipe
from probe_support import CPU, alone, one_of

from lapcli.data.images.sources import open_images
from lapcli.evaluation.features import (
    Backbone,
    all_features,
    class_token,
)
from lapcli.models.dino_vit import DinoViT
from lapcli.models.vit import build_vit
from lapcli.recipe.dino import DinoModel

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def images_of(size, count=3):
    return torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def normal(images):
    return (images / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def timm_backbone(model, image=32):
    return Backbone(model, name="it", mean=MEAN, std=STD, device=CPU, image=image)


def test_another_image_size_matches_timm_dynamic_img_size():
    options = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 0, "img_size": 32}
    torch.manual_seed(0)
    fixed = timm.create_model("deit3_small_patch16_224", **options).eval()
    dynamic = timm.create_model("deit3_small_patch16_224", dynamic_img_size=True, **options).eval()
    dynamic.load_state_dict(fixed.state_dict())
    backbone = timm_backbone(fixed)
    _, patches = backbone.at_size(64)(images_of(64))
    with torch.no_grad():
        expected = dynamic.forward_features(normal(images_of(64)))[:, 1:]
    assert torch.allclose(patches, expected, atol=1e-4)
    assert patches.shape[1] == 16
    assert backbone(images_of(32))[1].shape[1] == 4  # the first one is as it was


def test_teacher_features_are_its_tokens():
    torch.manual_seed(0)
    model = DinoViT(DinoModel(layers=2, width=48, heads=3, patch=4, layer_scale=1.0, laplacian_heads=1)).eval()
    backbone = Backbone(model, name="teacher", image=16, mean=MEAN, std=STD, device=CPU)
    for size in (16, 32):
        first, rest = backbone.at_size(size)(images_of(size))
        with torch.no_grad():
            expected = model.tokens([normal(images_of(size))])[0]
        assert torch.allclose(torch.cat([first[:, None], rest], dim=1), expected, atol=1e-4)


@pytest.fixture(scope="module")
def digits():
    return open_images(image_recipe().data, None)


def test_several_processes_compute_the_same_chunks_as_one(digits):
    """Bit for bit: each chunk holds the same images on one or several processes, and nothing is computed twice."""
    backbone = timm_backbone(build_vit(image_recipe().model, 0), 8)
    whole = all_features(backbone, digits.validation, 1.0, class_token, 32, alone(50), "")
    total = torch.zeros_like(whole)
    for rank in range(3):
        part = all_features(backbone, digits.validation, 1.0, class_token, 32, one_of(rank, 3), "")
        assert not (total.any(dim=1) & part.any(dim=1)).any()
        total += part
    assert torch.equal(total, whole)
