"""Image classification with a ViT."""

from typing import TYPE_CHECKING, Any

from lapcli.kinds.kind import CLASSES, FEATURES, Fetched, Kind, LoadedModel, Start
from lapcli.recipe.vision import ClassificationRecipe, ImageFiles
from lapcli.runs import Run
from lapcli.runtime.progress import Progress, shown_progress

if TYPE_CHECKING:
    import torch

    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint


class ClassificationKind(Kind):
    name = "classification"
    recipe = recipe_file = ClassificationRecipe
    gives = frozenset({CLASSES, FEATURES})
    metrics = ("validation_loss", "validation_top1", "validation_top5")
    expected_scores = ("top1",)

    def start(self, recipe: ClassificationRecipe, world: "World", run: Run) -> Start:
        from lapcli.data.images.sources import open_images
        from lapcli.objectives.classification import Classification

        with shown_progress(world.is_main) as progress:
            data = open_images(recipe.data, recipe.model.classes, progress)
        objective, size = Classification(recipe, data, world), recipe.model.image
        if run.info.get("step", 0) == 0:  # a run that began with such a schedule goes on
            objective.refuse_long_warmup()
        return Start(objective, data.facts(size), data.notes(size))

    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        from lapcli.models.vit import build_vit
        from lapcli.training.checkpoint import load_weights

        recipe: Any = run.recipe
        model = build_vit(recipe.model, recipe.seed)
        if checkpoint is not None:
            load_weights(checkpoint.weights, model, str(recipe.model.head_plan()))
        return LoadedModel(
            name=run.name,
            module=model.to(device),
            gives=self.gives,
            weights="untrained" if checkpoint is None else "trained",
            weights_sha256=None if checkpoint is None else checkpoint.weights_sha256,
            step=0 if checkpoint is None else checkpoint.step,
            device=device,
            run=run,
            images=recipe.data,
            image_size=recipe.model.image,
            classes=recipe.model.classes,
        )

    def fetch(self, recipe: ClassificationRecipe, progress: Progress) -> Fetched:
        return fetch_images(recipe.data, recipe.model.classes, progress)


def fetch_images(source: ImageFiles, classes: int | None, progress: Progress) -> Fetched:
    from lapcli.data.images.sources import open_images

    data = open_images(source, classes, progress)
    facts = {
        "source": source.train,
        "classes": len(data.train.classes),
        "train_images": len(data.train),
        "validation_images": len(data.validation),
        "identity": data.identity,
    }
    lines = [
        f"{name.replace('_', ' '):<19}{f'{value:,}' if isinstance(value, int) else value}"
        for name, value in facts.items()
    ]
    return Fetched(facts, lines)


KIND = ClassificationKind()
