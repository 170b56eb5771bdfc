"""The paper's ViT: timm's own DeiT-III model with the DeiT repository's initial values, some heads Laplacian.

timm and the repository differ in ways that change results: LayerScale starts at 1e-6 in timm and 1e-4 in the
repository, the class token has a deviation of 1e-6 and 0.02, and drop path grows over the blocks in timm but has one
rate in the repository. This model uses the repository's values. State-dict names are timm's.
"""

from typing import Any

import torch
from timm.layers.drop import DropPath
from timm.models.deit import deit3_base_patch16_224
from torch import nn

from lapcli.heads.laplacian import operator_parameters
from lapcli.heads.laplacianize import set_operators
from lapcli.recipe.vision import ViTModel


def build_vit(section: ViTModel, seed: int | None = None) -> nn.Module:
    """Build the model of a recipe on the CPU; for one seed the weights do not depend on the head operators."""
    # Weights are initialised on the CPU, and the caller's generator is restored.
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        # Not timm.create_model: it drops arguments that are None, so that `layer_scale: null` would mean timm's 1e-6.
        model: Any = deit3_base_patch16_224(
            img_size=section.image,
            patch_size=section.patch,
            embed_dim=section.width,
            depth=section.layers,
            num_heads=section.heads,
            mlp_ratio=section.mlp_ratio,
            num_classes=section.classes,
            init_values=section.layer_scale,
        )
        nn.init.trunc_normal_(model.cls_token, std=0.02)
        set_operators(model, section.head_plan())  # last: operators may draw, and no other weight depends on them
    if section.drop_path > 0:
        for block in model.blocks:
            block.drop_path1, block.drop_path2 = DropPath(section.drop_path), DropPath(section.drop_path)
    return model


def without_decay(model: nn.Module) -> set[str]:
    """Return the names of parameters without weight decay: vectors (biases, norms, LayerScale), positions, the class
    token, and the parameters of head operators."""
    listed = model.no_weight_decay() | operator_parameters(model)  # type: ignore[operator]
    return {name for name, p in model.named_parameters() if p.ndim <= 1 or name in listed}
