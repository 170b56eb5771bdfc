"""Image classification with a ViT."""

from typing import TYPE_CHECKING, Any

from lapcli.data.sources import known_set
from lapcli.kinds.kind import (
    CLASSES,
    FEATURES,
    Fetched,
    Kind,
    LoadedModel,
    PlanFacts,
    TrainingStart,
    TrainingStep,
    download_facts,
    fetch_images,
    load_vit,
    with_initial_weights,
)
from lapcli.recipe import find_recipe, load_recipe
from lapcli.recipe.schema import AnyRecipe
from lapcli.recipe.vision import ClassificationRecipe
from lapcli.runs import Run
from lapcli.runtime.progress import Progress, shown_progress

if TYPE_CHECKING:
    import torch

    from lapcli.objectives.objective import BatchPlan
    from lapcli.runtime.devices import ComputePolicy
    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint


class ClassificationKind(Kind):
    name = "classification"
    recipe = recipe_file = ClassificationRecipe
    gives = frozenset({CLASSES, FEATURES})
    metrics = ("validation_loss", "validation_top1", "validation_top5")
    expected_scores = ("top1",)
    validated_scores = ("top1", "top5")

    def start(self, recipe: ClassificationRecipe, world: "World", run: Run) -> TrainingStart:
        from lapcli.data.images.sources import open_images
        from lapcli.kinds.initial_weights import find_initial_weights
        from lapcli.objectives.classification import Classification

        initial = find_initial_weights(recipe, run)
        with shown_progress(world.is_main) as progress:
            data = open_images(recipe.data, recipe.model.classes, progress)
        objective, size = Classification(recipe, data, world), recipe.model.image
        if run.info.get("step", 0) == 0:  # a run that was started with such a schedule may be resumed
            objective.refuse_long_warmup()
        return with_initial_weights(objective, data.facts(size), data.notes(size), initial, recipe)

    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        from lapcli.models.vit import build_vit

        recipe: Any = run.recipe
        model = load_vit(lambda seed: build_vit(recipe.model, seed), recipe, checkpoint)
        known = {"images": recipe.data, "image_size": recipe.model.image, "classes": recipe.model.classes}
        return LoadedModel.from_run(run, checkpoint, model, device, self.gives, **known)

    def paper_recipe(self, recipe: ClassificationRecipe) -> tuple[str, AnyRecipe]:
        name = {10: "vitb_cifar10", 100: "vitb_cifar100"}.get(recipe.model.classes, "vitb_imagenet")
        return name, load_recipe(find_recipe(name))

    def fetch(self, recipe: ClassificationRecipe, progress: Progress) -> Fetched:
        return fetch_images(recipe.data, recipe.model.classes, progress)

    def training_step(
        self, recipe: ClassificationRecipe, device: "torch.device", policy: "ComputePolicy"
    ) -> TrainingStep:
        import torch

        from lapcli.objectives.classification import ClassificationStep, parameter_groups

        section = recipe.model
        step = ClassificationStep(recipe, device, policy)

        def synthetic_batch(images: int, device: torch.device) -> Any:
            images_BCHW = torch.zeros(images, 3, section.image, section.image, device=device)
            return images_BCHW, torch.full((images, section.classes), 1 / section.classes, device=device)

        return TrainingStep(step.model, lambda: parameter_groups(recipe, step.model), synthetic_batch, step.loss)

    def micro_batch_multiple(self, recipe: ClassificationRecipe) -> int:
        return 2 if recipe.data.mixing.is_on else 1  # images are mixed in pairs

    def plan_facts(self, recipe: ClassificationRecipe, batches: "BatchPlan") -> PlanFacts:
        from lapcli.data.images.loader import seconds_to_read

        section, train, mixing = recipe.model, recipe.train, recipe.data.mixing
        held_out = recipe.data.validation if isinstance(recipe.data.validation, float) else 0.0
        per_epoch = int((known_set(recipe.data.train).train_images or 0) * (1 - held_out)) // train.batch
        steps = train.steps or (int((train.epochs or 0) * per_epoch) or None)
        images = None if steps is None else steps * train.batch
        tokens = (section.image // section.patch) ** 2 + 1
        group = f"groups of {mixing.group or train.batch} images share a lambda" if mixing.is_on else "none"
        return PlanFacts(
            steps=steps,
            data=recipe.data.train,
            **download_facts(recipe.data),
            example="images",
            unit="image",
            read_seconds=seconds_to_read([section.image]),
            epochs=None if train.steps else train.epochs,
            keeps_best=True,
            lines={
                "tokens": f"{tokens} an image" + ("" if images is None else f", {images:,} images in all"),
                "mixing": group,
            },
            values={"images": images, "tokens_per_image": tokens},
        )


KIND = ClassificationKind()
