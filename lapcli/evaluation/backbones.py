"""A frozen ViT as the probes see it: images in, class token and patches of the last block after the final norm out.

Shapes: B images, P patches, D features.
"""

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lapcli.runtime.errors import LapError, UsageError


class Backbone:
    """Takes uint8 images of any square size that its patches tile; gives float32 features. It is never trained."""

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        width: int,
        patch: int,
        image: int,
        mean: Sequence[float],
        std: Sequence[float],
        has_class_token: bool,
        device: torch.device,
    ) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.name, self.width, self.patch, self.image = name, width, patch, image
        self.mean, self.std = list(mean), list(std)
        self.has_class_token, self.device = has_class_token, device

    def tokens(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Of normalised images: class token (B, D) and patches row by row (B, P, D)."""
        raise NotImplementedError

    def at_size(self, size: int) -> "Backbone":
        """The same network for square images of that many pixels."""
        return self

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor, bf16: bool = False) -> tuple[Tensor, Tensor]:
        """Of uint8 images, on the network's device. A network without class token gives the mean patch for it."""
        device = self.device
        mean, std = (torch.tensor(x, device=device)[:, None, None] * 255 for x in (self.mean, self.std))
        normal_BCHW = images_BCHW.to(device).float().sub_(mean).div_(std)
        with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            class_BD, patches_BPD = self.tokens(normal_BCHW)
        class_BD, patches_BPD = class_BD.float(), patches_BPD.float()
        if not (torch.isfinite(class_BD).all() and torch.isfinite(patches_BPD).all()):
            raise LapError(f"{self.name} gives features that are not finite; these weights cannot be evaluated")
        return class_BD, patches_BPD


class TimmBackbone(Backbone):
    """timm's ViTs with absolute positions (VisionTransformer) or rotary ones (Eva, DINOv3)."""

    def __init__(
        self, model: Any, *, name: str, mean: Sequence[float], std: Sequence[float], device: torch.device
    ) -> None:
        from timm.models.eva import Eva
        from timm.models.vision_transformer import VisionTransformer

        if not isinstance(model, VisionTransformer | Eva):
            raise UsageError(
                f"{name} is a {type(model).__name__}; the probes need a plain ViT, timm's VisionTransformer or Eva"
            )
        patch, image = model.patch_embed.patch_size, model.patch_embed.img_size
        if patch[0] != patch[1] or image is None or image[0] != image[1]:
            raise UsageError(f"{name} takes images of {image} in patches of {patch}; the probes need squares")
        super().__init__(
            model,
            name=name,
            width=model.embed_dim,
            patch=patch[0],
            image=image[0],
            mean=mean,
            std=std,
            has_class_token=model.cls_token is not None,
            device=device,
        )

    def tokens(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        model: Any = self.model
        tokens_BTD = model.forward_features(images_BCHW)
        if isinstance(model.norm, nn.Identity):  # models that pool the patches have their final norm after it
            tokens_BTD = model.fc_norm(tokens_BTD)
        patches_BPD = tokens_BTD[:, model.num_prefix_tokens :]
        return tokens_BTD[:, 0] if self.has_class_token else patches_BPD.mean(dim=1), patches_BPD

    def at_size(self, size: int) -> "TimmBackbone":
        """Learned positions are interpolated, once."""
        model: Any = copy.deepcopy(self.model)
        model.set_input_size(img_size=(size, size))
        return TimmBackbone(model, name=self.name, mean=self.mean, std=self.std, device=self.device)


class DinoBackbone(Backbone):
    """The teacher of a self-supervised run; rotary positions suit any size."""

    def tokens(self, images_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        model: Any = self.model
        return model.features(images_BCHW)[-1]
