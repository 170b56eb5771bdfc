"""A kind of training: a ViT that paints the hidden patches of an image.

The shapes in names: B images, P patches, D features, C values of a patch.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from lapcli.kinds.kind import FEATURES, Fetched, Kind, LoadedModel, TrainingStart, TrainingStep
from pydantic import Field

from lapcli.recipe.optimizers import AdamWSection
from lapcli.recipe.schema import BaseRecipe, TransformerModel
from lapcli.recipe.section import Size, combination
from lapcli.recipe.vision import CosineSchedule, ImageFiles

if TYPE_CHECKING:  # a kind is imported when names are listed; torch and timm only when it trains or loads
    import torch

    from lapcli.checkpoint import Checkpoint
    from lapcli.runs import Run
    from lapcli.runtime.devices import ComputePolicy
    from lapcli.runtime.progress import Progress
    from lapcli.runtime.ranks import World


class AutoencoderModel(TransformerModel):
    image: Size = 32
    patch: Size = 8
    hidden: Annotated[float, Field(gt=0, lt=1)] = 0.6  # share of the patches that the model does not see

    @combination("image", "patch")
    def _patches_tile_the_image(self) -> str | None:
        return f"{self.image} is not a multiple of patch {self.patch}" if self.image % self.patch else None


class AutoencoderRecipe(BaseRecipe):
    takes_any_optimizer = True

    objective: Literal["masked_autoencoder"]
    model: AutoencoderModel
    data: ImageFiles
    optimizer: AdamWSection
    schedule: CosineSchedule = CosineSchedule()


class MaskedAutoencoder(Kind):
    name = "masked_autoencoder"
    recipe = recipe_file = AutoencoderRecipe
    gives = frozenset({FEATURES})
    metrics = ("validation_loss",)
    expected_scores = ("knn",)

    def start(self, recipe: AutoencoderRecipe, world: "World", run: "Run") -> TrainingStart:
        from lap_example.painting import Painting
        from lapcli.data.images.sources import open_images
        from lapcli.runtime.progress import shown_progress

        with shown_progress(world.is_main) as progress:
            data = open_images(recipe.data, None, progress)
        return TrainingStart(
            Painting(recipe, data, world), data.facts(recipe.model.image), data.notes(recipe.model.image)
        )

    def load(
        self, run: "Run", checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        from lap_example.painting import Painter
        from lapcli.checkpoint import load_weights

        recipe: Any = run.recipe
        model = Painter(recipe.model, recipe.seed)
        if checkpoint is not None:
            load_weights(checkpoint.weights, model, str(recipe.model.head_plan()))
        known = {"images": recipe.data, "image_size": recipe.model.image}
        return LoadedModel.from_run(run, checkpoint, model.encoder, device, self.gives, **known)

    def fetch(self, recipe: AutoencoderRecipe, progress: "Progress") -> Fetched:
        from lapcli.kinds.kind import fetch_images

        return fetch_images(recipe.data, None, progress)

    def training_step(self, recipe: AutoencoderRecipe, device: "torch.device", policy: "ComputePolicy") -> TrainingStep:
        from lap_example.painting import training_step

        return training_step(recipe, device)
