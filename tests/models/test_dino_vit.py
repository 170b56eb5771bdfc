"""The self-supervised backbone against timm's own, and its parts against their definitions."""

import math

import pytest
import timm
import torch

from lapcli.heads.plan import head_plan
from lapcli.models.dino_vit import TIMM_OPTIONS, Block, CropGroup, DinoViT, rotary_tables, to_timm
from lapcli.recipe.dino import DinoModel

TINY = {"layers": 3, "width": 32, "heads": 4, "patch": 4, "layer_scale": 0.7}


def tiny(**changes):
    torch.manual_seed(0)
    section = DinoModel(**{**TINY, **changes})
    return DinoViT(section, section.drop_path)


def tiny_timm(heads=4):
    options = {"embed_dim": 32, "depth": 3, "num_heads": heads, "patch_size": 4, "img_size": 16, "init_values": 0.7}
    return timm.create_model("vit_small_patch16_dinov3", **TIMM_OPTIONS, **options).eval()


def test_timm_agrees_and_names_map_both_ways():
    ours, theirs = tiny().eval(), tiny_timm()
    theirs.load_state_dict(to_timm(ours.state_dict()))
    images = torch.randn(2, 3, 16, 16)
    expected = theirs.forward_features(images)
    assert torch.allclose(ours.tokens([images])[0], expected, atol=1e-5)
    back = tiny().load_state_dict(theirs.state_dict(), strict=False)
    assert (back.missing_keys, back.unexpected_keys) == (["mask_token"], [])


def test_laplacian_heads_match_converted_timm_models():
    from lapcli import laplacianize

    ours, theirs = tiny(laplacian_heads=[0, 2, 4]).eval(), tiny_timm()
    laplacianize(theirs, [0, 2, 4])
    theirs.load_state_dict(to_timm(ours.state_dict()))
    images = torch.randn(2, 3, 16, 16)
    assert torch.allclose(ours.tokens([images])[0], theirs.forward_features(images), atol=1e-5)


def test_rotary_tables_by_hand():
    cos, sin = rotary_tables(2, 4, 8, base=100.0)
    assert cos.shape == (9, 8)
    assert cos[0].tolist() == [1.0] * 8  # the class token stays
    assert sin[0].tolist() == [0.0] * 8
    # Patch (row 1, column 0) is token 5: its centre is (0.5, -0.75); the periods are 1 and 100^(2/4) = 10.
    angles = [2 * math.pi * x for x in (0.5 / 1, 0.5 / 10, -0.75 / 1, -0.75 / 10)] * 2
    assert cos[5].tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-6)
    assert sin[5].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-6)


def test_crop_sizes_in_one_forward_are_independent():
    model = tiny(laplacian_heads=2).eval()
    large, small = torch.randn(2, 3, 16, 16), torch.randn(5, 3, 8, 8)
    together = model.tokens([large, small])
    for joint, alone in zip(together, (model.tokens([large])[0], model.tokens([small])[0]), strict=True):
        assert torch.allclose(joint, alone, atol=1e-5)


def test_masked_patches_have_no_effect():
    model = tiny().eval()
    with torch.no_grad():
        model.mask_token.normal_()
    one, other = torch.randn(2, 1, 3, 16, 16)
    other[:, :, :, :12] = one[:, :, :, :12]  # they differ in the last column of patches
    mask = torch.zeros(1, 16, dtype=torch.bool)
    mask[0, 3::4] = True
    assert torch.equal(model.tokens([one], [mask])[0], model.tokens([other], [mask])[0])
    assert not torch.equal(model.tokens([one])[0], model.tokens([other])[0])


def test_drop_path_keeps_a_fixed_number_of_images_and_scales_them():
    """Each branch changes exactly the kept images, by b / kept times its output without drop path."""
    torch.manual_seed(1)
    block = Block(8, head_plan(1, 1, 2), 0, 16, 1.0, drop_path=0.3)
    block.gamma_2.data.zero_()  # the attention branch alone
    cos, sin = rotary_tables(1, 2, 4, 100.0)
    groups = [CropGroup(10, 3, cos, sin), CropGroup(1, 3, cos, sin)]
    x = torch.randn(33, 8)
    whole = (block.eval()(x, groups) - x).view(11, 3, 8)
    changed = (block.train()(x, groups) - x).view(11, 3, 8)
    moved = changed.flatten(1).abs().amax(1) > 0
    assert int(moved[:10].sum()) == 7  # int(10 * 0.7)
    assert bool(moved[10])  # never none
    assert torch.allclose(changed[:10][moved[:10]], whole[:10][moved[:10]] * 10 / 7, atol=1e-5)
    assert torch.allclose(changed[10], whole[10], atol=1e-5)
