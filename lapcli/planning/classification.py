"""The plan of image classification."""

from typing import Any

import torch

from lapcli.data.images.sources import KNOWN_SIZES
from lapcli.heads.plan import HeadPlan
from lapcli.models import compiling
from lapcli.models.vit import build_vit
from lapcli.objectives.classification import build_loss, parameter_groups
from lapcli.planning.download import image_download
from lapcli.planning.kind import with_layers
from lapcli.planning.plan import ImagePlan
from lapcli.planning.pretending import autocast
from lapcli.planning.sketch import Sketch
from lapcli.recipe.vision import ClassificationRecipe


class Classifying:
    keeps_best = True

    def __init__(self, recipe: ClassificationRecipe) -> None:
        self._recipe = recipe
        self.multiple = 2 if recipe.data.mixing.is_on else 1

    @property
    def head_plan(self) -> HeadPlan:
        return self._recipe.model.head_plan()

    @property
    def steps(self) -> int | None:
        train, data = self._recipe.train, self._recipe.data
        held_out = data.validation if isinstance(data.validation, float) else 0.0
        per_epoch = int(KNOWN_SIZES.get(data.train, 0) * (1 - held_out)) // train.batch
        return train.steps or (int((train.epochs or 0) * per_epoch) or None)

    def sketch(self, device: torch.device, bf16: bool, layers: int | None = None, compiled: bool = False) -> Sketch:
        recipe = with_layers(self._recipe, layers)
        section = recipe.model
        with device:
            model = build_vit(section).train()
        if compiled:
            model.compile(**compiling.OPTIONS)
        criterion = build_loss(recipe)

        def forward(examples: int) -> tuple[torch.Tensor, torch.Tensor]:
            images_BCHW = torch.zeros(examples, 3, section.image, section.image, device=device)
            targets_BK = torch.full((examples, section.classes), 1 / section.classes, device=device)
            with autocast(device, bf16):
                return model(images_BCHW), targets_BK

        def loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            found: torch.Tensor = criterion(output[0].float(), output[1])
            return found

        return Sketch(model, parameter_groups(recipe, model), forward, loss)

    def download(self) -> tuple[int | None, str]:
        return image_download(self._recipe.data)

    def plan(self, shared: dict[str, Any]) -> ImagePlan:
        section, train, mixing = self._recipe.model, self._recipe.train, self._recipe.data.mixing
        group = (mixing.group or train.batch) if mixing.is_on else None
        return ImagePlan(
            **shared,
            epochs=None if train.steps else train.epochs,
            images=None if self.steps is None else self.steps * train.batch,
            tokens_per_image=(section.image // section.patch) ** 2 + 1,
            flops_per_image=shared["flops_per_step"] // train.batch,
            notes={"mixing": "none" if group is None else f"groups of {group} images share a lambda"},
            data=self._recipe.data.train,
        )
