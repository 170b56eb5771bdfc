"""`import lapcli.timm` registers the architectures of exported folders with timm, so that timm can load them.

    import lapcli.timm, timm
    model = timm.create_model("local-dir:my_folder", pretrained=True)

Without the import, timm says that the architecture is unknown. Under the name of a stock ViT it would load the weights
silently and compute plain attention.
"""

from typing import Any

from timm.models import register_model
from timm.models.eva import vit_small_patch16_dinov3
from timm.models.vision_transformer import vit_base_patch16_224
from torch import nn

from lapcli.heads.laplacianize import laplacianize
from lapcli.heads.plan import HeadSpec
from lapcli.models.dino_vit import TIMM_OPTIONS

__all__: list[str] = []


@register_model
def lap_vit(pretrained: bool = False, *, laplacian_heads: HeadSpec, **options: Any) -> nn.Module:
    """Build the ViT of a classification run: timm's own, with no position for the class token, with Laplacian heads."""
    return laplacianize(vit_base_patch16_224(pretrained, **{"no_embed_class": True, **options}), laplacian_heads)


@register_model
def lap_dino_vit(pretrained: bool = False, *, laplacian_heads: HeadSpec, **options: Any) -> nn.Module:
    """Build the backbone of a self-supervised run: timm's `vit_small_patch16_dinov3` with our settings."""
    return laplacianize(vit_small_patch16_dinov3(pretrained, **{**TIMM_OPTIONS, **options}), laplacian_heads)
