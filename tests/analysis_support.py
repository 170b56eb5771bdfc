"""Tiny models for the tests of the analyses, every weight drawn: where outputs are zero, heads would add nothing."""

from typing import Any

import timm
import torch

import lapcli
from lapcli.models.gpt import GPT, GPTConfig


def gpt(laplacian_heads, kv_heads=None):
    torch.manual_seed(0)
    config = GPTConfig(
        layers=2, heads=4, kv_heads=kv_heads, width=16, vocab=11, context=8, laplacian_heads=laplacian_heads
    )
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model, torch.randint(11, (2, 8))


def vit(laplacian_heads, name="deit3_base_patch16_224", **options: Any):
    torch.manual_seed(0)
    model = timm.create_model(
        name, img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=3, **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return lapcli.laplacianize(model.eval(), laplacian_heads), torch.randn(2, 3, 8, 8)
