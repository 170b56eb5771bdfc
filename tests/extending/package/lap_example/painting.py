"""What a masked autoencoder minimises: the squared error of the patches that it did not see."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lapcli.kinds.kind import TrainingStep
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from lap_example.masked_autoencoder import AutoencoderModel, AutoencoderRecipe
from lapcli import laplacianize
from lapcli.data.images.augmentation import evaluation_transform, normalise
from lapcli.data.images.loader import Example, ImageBatches, Reader
from lapcli.data.images.sources import ImageData
from lapcli.objectives.objective import ParameterGroup, decay_groups, plan_batches
from lapcli.objectives.schedules import cosine_multiplier
from lapcli.runtime.ranks import World


class Painter(nn.Module):
    """timm's ViT with Laplacian heads, and a linear map from its patches to pixels."""

    def __init__(self, section: AutoencoderModel, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = VisionTransformer(
                img_size=section.image,
                patch_size=section.patch,
                embed_dim=section.width,
                depth=section.layers,
                num_heads=section.heads,
                num_classes=0,
            )
            self.pixels = nn.Linear(section.width, 3 * section.patch**2)
        self.encoder = laplacianize(encoder, section.head_plan().per_layer)
        self.patch = section.patch

    def forward(self, images_BCHW: Tensor, hidden_BP: Tensor) -> Tensor:
        """Mean squared error of the hidden patches; what is hidden is grey to the encoder."""
        side = images_BCHW.shape[-1] // self.patch
        seen_BHW = (~hidden_BP).unflatten(1, (side, side)).repeat_interleave(self.patch, 1)
        seen_BHW = seen_BHW.repeat_interleave(self.patch, 2)
        tokens_BTD = self.encoder.forward_features(images_BCHW * seen_BHW[:, None])
        painted_BPC = self.pixels(tokens_BTD[:, self.encoder.num_prefix_tokens :])
        wanted_BCP = nn.functional.unfold(images_BCHW, self.patch, stride=self.patch)
        error_BP = (painted_BPC - wanted_BCP.transpose(1, 2)).square().mean(dim=2)
        return (error_BP * hidden_BP).sum() / hidden_BP.sum()


def parameter_groups(recipe: AutoencoderRecipe, model: Painter) -> list[ParameterGroup]:
    named = dict(model.named_parameters())
    return decay_groups(recipe.optimizer, named, [name for name, p in named.items() if p.ndim < 2])


def training_step(recipe: AutoencoderRecipe, device: torch.device) -> TrainingStep:
    """A step on made-up images, for plans."""
    size, patch = recipe.model.image, recipe.model.patch
    with device:
        model = Painter(recipe.model, recipe.seed)

    def synthetic_batch(examples: int, device: torch.device) -> tuple[Tensor, Tensor]:
        hidden_BP = torch.ones(examples, (size // patch) ** 2, dtype=torch.bool, device=device)
        return torch.zeros(examples, 3, size, size, device=device), hidden_BP

    return TrainingStep(model, lambda: parameter_groups(recipe, model), synthetic_batch, lambda batch: model(*batch))


class Painting:
    unit = "images"
    best_metric = None

    def __init__(self, recipe: AutoencoderRecipe, data: ImageData, world: World) -> None:
        self._recipe, self._data, self._world = recipe, data, world
        train, size = recipe.train, recipe.model.image
        self.batches = plan_batches(train.batch, train.micro_batch, world.size)
        self._images = ImageBatches(len(data.train), batch=train.batch, group=train.batch, repeats=1, seed=recipe.seed)
        self.steps = train.steps or max(1, int((train.epochs or 0) * self._images.steps_per_epoch))
        transform = evaluation_transform(recipe.data, size)
        self._train = Reader(data.train, transform, size, recipe.seed)
        self._validation = Reader(data.validation, transform, size, None)
        self.model = Painter(recipe.model, recipe.seed).to(world.device).train()
        self.units_per_step = train.batch
        tokens = (size // recipe.model.patch) ** 2 + 1
        self.flops_per_step = 6.0 * sum(p.numel() for p in self.model.parameters()) * tokens * train.batch

    def parameter_groups(self) -> list[ParameterGroup]:
        return parameter_groups(self._recipe, self.model)

    def batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        first = self.batches.first(micro_step, self._world.rank)
        return self._read(self._train, self._images.examples(step, first, self.batches.micro_batch))

    def _read(self, reader: Reader, examples: list[Example]) -> tuple[Tensor, Tensor]:
        images_BCHW, _ = reader.read(examples)
        section = self._recipe.model
        patches = (section.image // section.patch) ** 2
        # Drawn by what the example is, never by what came before: a resumed run hides the same patches.
        keys = [(self._recipe.seed, example.epoch, example.index) for example in examples]
        order_BP = np.stack([np.random.default_rng(key).permutation(patches) for key in keys])
        hidden_BP = torch.from_numpy(order_BP < max(1, round(section.hidden * patches)))
        device = self._world.device
        return normalise(images_BCHW.to(device), self._recipe.data), hidden_BP.to(device)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.model(*batch)

    def learning_rate_multiplier(self, step: int) -> float:
        recipe = self._recipe
        return cosine_multiplier(recipe.schedule, recipe.optimizer.lr, step, self.steps, self._images.steps_per_epoch)

    def after_step(self, step: int) -> None:
        pass

    @torch.no_grad()
    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        count, size, world = len(self._data.validation), self.batches.micro_batch, self._world
        total = seen = 0.0
        for first in range(0, count, size * world.size):
            stop_if_asked()
            start = first + world.rank * size
            examples = [Example(0, index, 0) for index in range(start, min(count, start + size))]
            if examples:
                total += float(self.loss(self._read(self._validation, examples))) * len(examples)
                seen += len(examples)
        total, seen = world.sum([total, seen])
        return {"validation_loss": total / seen}

    def describe_batch(self, step: int) -> str:
        return self._images.identity(step)

    def weights_metadata(self) -> dict[str, str]:
        return {"laplacian_heads": str(self._recipe.model.head_plan())}

    def finish(self, run_dir: Path) -> dict[str, Any]:
        return {}
