"""One pass delivers the actual layer outputs: tokens of blocks and norms, and selections of tokens."""

import pytest
import torch
from analysis_support import dino, gpt, vit

from lapcli.measures.capture import Batch, Capture, Site, anatomy_of
from lapcli.models.gpt import rms_norm
from lapcli.runtime.errors import LapError


def seen(model, inputs, *sites):
    capture, found = Capture(anatomy_of(model), "tiny"), {}
    for site in sites:
        capture.on_tokens(site, lambda tokens, _, site=site: found.__setitem__(site, tokens))
    capture.run([Batch(inputs, None, 0)])
    return found, capture


@torch.no_grad()
def test_blocks_norms_and_mlp_inputs_of_a_gpt():
    model, tokens = gpt(2)
    sites = [Site(0), Site(1), Site(1, norm="after"), Site(1, "mlp_input")]
    found, capture = seen(model, tokens, *sites)
    rotary = model.cos_PD[:8].unsqueeze(-2), model.sin_PD[:8].unsqueeze(-2)
    x = rms_norm(model.embed(tokens))
    x = model.blocks[0](x, rotary)
    torch.testing.assert_close(found[sites[0]].float(), x)
    x = x + model.blocks[1].attn(rms_norm(x), rotary)
    torch.testing.assert_close(found[sites[3]].float(), rms_norm(x))
    x = x + model.blocks[1].mlp(rms_norm(x))
    torch.testing.assert_close(found[sites[1]].float(), x)
    torch.testing.assert_close(found[sites[2]].float(), model.hidden(tokens))
    assert found[sites[0]].dtype == torch.float64
    assert (capture.sequences, capture.tokens) == (2, 16)


@torch.no_grad()
def test_patches_and_class_token_of_a_vit():
    model, images = vit(2)
    sites = [Site(1, tokens="patch", norm="after"), Site(1, tokens="class", norm="after"), Site(0, "mlp_input")]
    found, _ = seen(model, images, *sites)
    features = model.forward_features(images)
    torch.testing.assert_close(found[sites[0]].float(), features[:, 1:])
    torch.testing.assert_close(found[sites[1]].float(), features[:, :1])
    block = model.blocks[0]
    x = model._pos_embed(model.patch_embed(images))
    torch.testing.assert_close(found[sites[2]].float(), block.norm2(x + block.ls1(block.attn(block.norm1(x)))))


@torch.no_grad()
def test_tokens_per_image_of_a_self_supervised_model():
    model, images = dino(2)
    sites = [Site(1, norm="after"), Site(1, tokens="patch", norm="after")]
    found, capture = seen(model, images, *sites)
    (tokens,) = model.tokens([images])
    torch.testing.assert_close(found[sites[0]].float(), tokens)
    torch.testing.assert_close(found[sites[1]].float(), tokens[:, 1:])
    assert capture.tokens == 2 * (1 + 2 * 3)


def test_non_finite_weights_are_named():
    model, tokens = gpt(2)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = float("nan")
    with pytest.raises(LapError, match="layer 1 of tiny"):
        seen(model, tokens, Site(0), Site(1))
    assert not any(block._forward_hooks for block in model.blocks)
