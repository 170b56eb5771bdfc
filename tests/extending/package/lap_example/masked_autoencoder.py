"""An objective of another package: a ViT that reconstructs the hidden patches of an image.

Shapes: B images, P patches, D features, C values per patch.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from lapcli import laplacianize
from lapcli.checkpoint import Checkpoint, load_weights
from lapcli.data.images.augmentation import evaluation_transform, normalise
from lapcli.data.images.loader import Example, ImageBatches, Reader
from lapcli.data.images.sources import open_images
from lapcli.objectives.objective import LoadedModel, Objective, ParameterGroup, decay_groups
from lapcli.objectives.schedules import cosine_multiplier
from lapcli.recipe.optimizers import AdamWSection
from lapcli.recipe.schema import FEATURES, BaseRecipe, TransformerModel
from lapcli.recipe.section import Size, combination
from lapcli.recipe.vision import CosineSchedule, ImageFiles
from lapcli.runs import Run
from lapcli.runtime.devices import ComputePolicy, compute_policy
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World


class AutoencoderModel(TransformerModel):
    image: Size = 32
    patch: Size = 8
    hidden: Annotated[float, Field(gt=0, lt=1)] = 0.6  # fraction of the patches that the model does not see

    @combination("image", "patch")
    def _patches_tile_the_image(self) -> str | None:
        return f"{self.image} is not a multiple of patch {self.patch}" if self.image % self.patch else None


class AutoencoderRecipe(BaseRecipe):
    implementation = "lap_example.masked_autoencoder:MaskedAutoencoder"
    gives = frozenset({FEATURES})
    metrics: ClassVar = {"validation_loss": ("squared error", "lower")}
    takes_any_optimizer = True

    objective: Literal["masked_autoencoder"]
    model: AutoencoderModel
    data: ImageFiles
    optimizer: AdamWSection
    schedule: CosineSchedule = CosineSchedule()


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
        """Mean squared error of the hidden patches; hidden patches are grey to the encoder."""
        side = images_BCHW.shape[-1] // self.patch
        seen_BHW = (~hidden_BP).unflatten(1, (side, side)).repeat_interleave(self.patch, 1)
        seen_BHW = seen_BHW.repeat_interleave(self.patch, 2)
        tokens_BTD = self.encoder.forward_features(images_BCHW * seen_BHW[:, None])
        painted_BPC = self.pixels(tokens_BTD[:, self.encoder.num_prefix_tokens :])
        wanted_BCP = nn.functional.unfold(images_BCHW, self.patch, stride=self.patch)
        error_BP = (painted_BPC - wanted_BCP.transpose(1, 2)).square().mean(dim=2)
        return (error_BP * hidden_BP).sum() / hidden_BP.sum()


class MaskedAutoencoder(Objective[AutoencoderRecipe]):
    unit = "images"

    def prepare(self, world: World, run: Run, initial: Any) -> dict[str, Any]:
        self.world, recipe, size = world, self.recipe, self.recipe.model.image
        self.data = open_images(recipe.data, None)
        train = recipe.train
        self.batches = self.plan_batches(world.size)
        self._images = ImageBatches(
            len(self.data.train), batch=train.batch, group=train.batch, repeats=1, seed=recipe.seed
        )
        self.steps = train.steps or max(1, int((train.epochs or 0) * self._images.steps_per_epoch))
        self.units_per_step = train.batch
        transform = evaluation_transform(recipe.data, size)
        self._train = Reader(self.data.train, transform, size, recipe.seed)
        self._validation = Reader(self.data.validation, transform, size, None)
        return {"data": self.data.description, "data_sha256": self.data.identity}

    def build(self, device: torch.device, policy: ComputePolicy | None = None) -> None:
        train = self.recipe.train
        self.policy = policy or compute_policy(device, train.precision, train.compile)
        with device if device.type == "meta" else torch.device("cpu"):
            self.model = Painter(self.recipe.model, self.recipe.seed).to(device).train()

    def parameter_groups(self) -> list[ParameterGroup]:
        named = dict(self.model.named_parameters())
        return decay_groups(self.recipe.optimizer, named, [name for name, p in named.items() if p.ndim < 2])

    def synthetic_batch(self, examples: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size, patch = self.recipe.model.image, self.recipe.model.patch
        hidden_BP = torch.ones(examples, (size // patch) ** 2, dtype=torch.bool, device=device)
        return torch.zeros(examples, 3, size, size, device=device), hidden_BP

    def batch(self, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        first = self.batches.first(micro_step, self.world.rank)
        return self._read(self._train, self._images.examples(step, first, self.batches.micro_batch))

    def _read(self, reader: Reader, examples: list[Example]) -> tuple[Tensor, Tensor]:
        images_BCHW, _ = reader.read(examples)
        section = self.recipe.model
        patches = (section.image // section.patch) ** 2
        # Drawn from the example's key, never from earlier state: a resumed run hides the same patches.
        keys = [(self.recipe.seed, example.epoch, example.index) for example in examples]
        order_BP = np.stack([np.random.default_rng(key).permutation(patches) for key in keys])
        hidden_BP = torch.from_numpy(order_BP < max(1, round(section.hidden * patches)))
        device = self.world.device
        return normalise(images_BCHW.to(device), self.recipe.data), hidden_BP.to(device)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.model(*batch)

    def learning_rate_multiplier(self, step: int) -> float:
        recipe = self.recipe
        return cosine_multiplier(recipe.schedule, recipe.optimizer.lr, step, self.steps, self._images.steps_per_epoch)

    @torch.no_grad()
    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        count, size, world = len(self.data.validation), self.batches.micro_batch, self.world
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

    @classmethod
    def load(
        cls, run: Run, checkpoint: Checkpoint | None, device: torch.device, *, float32: bool = False
    ) -> LoadedModel:
        recipe: Any = run.recipe
        model = Painter(recipe.model, recipe.seed)
        if checkpoint is not None:
            load_weights(checkpoint.weights, model, str(recipe.model.head_plan()))
        known = {"images": recipe.data, "image_size": recipe.model.image}
        return LoadedModel.from_run(run, checkpoint, model.encoder, device, **known)

    @classmethod
    def fetch(cls, recipe: AutoencoderRecipe, progress: Progress) -> dict[str, Any]:
        return {"train_images": len(open_images(recipe.data, None).train)}
