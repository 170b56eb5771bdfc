"""Self-supervised training of a ViT with a student and a teacher, whose backbone is evaluated."""

from typing import TYPE_CHECKING, Any

from lapcli.data.sources import known_set
from lapcli.kinds.kind import (
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
from lapcli.recipe.dino import SelfSupervisedRecipe
from lapcli.recipe.schema import AnyRecipe
from lapcli.runs import Run
from lapcli.runtime.progress import Progress, shown_progress

if TYPE_CHECKING:
    import torch

    from lapcli.objectives.objective import BatchPlan
    from lapcli.runtime.devices import ComputePolicy
    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint


class SelfSupervisedKind(Kind):
    name = "self_supervised"
    recipe = recipe_file = SelfSupervisedRecipe
    gives = frozenset({FEATURES})
    metrics = ("validation_knn",)
    expected_scores = ("linear",)

    def start(self, recipe: SelfSupervisedRecipe, world: "World", run: Run) -> TrainingStart:
        from lapcli.data.images.sources import open_images
        from lapcli.kinds.initial_weights import find_initial_weights
        from lapcli.objectives.self_supervised import SelfSupervised

        initial = find_initial_weights(recipe, run)
        with shown_progress(world.is_main) as progress:
            data = open_images(recipe.data, None, progress)
        objective = SelfSupervised(recipe, data, world)
        size = recipe.data.crops.global_size
        notes = [*objective.notes(), *data.notes(size)]
        return with_initial_weights(objective, data.facts(size), notes, initial, recipe)

    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        from lapcli.models.dino_vit import StudentTeacher

        recipe: Any = run.recipe
        model = load_vit(lambda seed: StudentTeacher(recipe.model, seed), recipe, checkpoint)
        known = {"images": recipe.data, "image_size": recipe.data.crops.global_size}
        # The teacher's, which is what upstream always evaluates.
        return LoadedModel.from_run(run, checkpoint, model.teacher.backbone, device, self.gives, **known)

    def paper_recipe(self, recipe: SelfSupervisedRecipe) -> tuple[str, AnyRecipe]:
        return "dino_vits", load_recipe(find_recipe("dino_vits"))

    def fetch(self, recipe: SelfSupervisedRecipe, progress: Progress) -> Fetched:
        return fetch_images(recipe.data, None, progress)

    def training_step(
        self, recipe: SelfSupervisedRecipe, device: "torch.device", policy: "ComputePolicy"
    ) -> TrainingStep:
        from lapcli.objectives.schedules import parameter_groups
        from lapcli.objectives.self_supervised import SelfSupervisedStep

        step = SelfSupervisedStep(recipe, device, policy)
        return TrainingStep(
            step.model,
            lambda: parameter_groups(recipe, step.model),
            step.synthetic_batch,
            lambda batch: step.loss(batch)[0],
            after_step=lambda: step.model.update_teacher(0.99),  # any momentum costs the same
        )

    def micro_batch_multiple(self, recipe: SelfSupervisedRecipe) -> int:
        return recipe.train.group

    def plan_facts(self, recipe: SelfSupervisedRecipe, batches: "BatchPlan") -> PlanFacts:
        import torch

        from lapcli.data.images.colours import BYTES_A_VALUE
        from lapcli.data.images.crops import GLOBALS
        from lapcli.data.images.loader import seconds_to_read
        from lapcli.models.dino_vit import DinoViT
        from lapcli.objectives.self_supervised import accumulation_in_words, epochs_in_words

        crops, patch = recipe.data.crops, recipe.model.patch
        global_tokens, local_tokens = ((size // patch) ** 2 + 1 for size in (crops.global_size, crops.local_size))
        tokens, images = GLOBALS * global_tokens + crops.locals * local_tokens, recipe.steps * recipe.train.batch
        with torch.device("meta"):
            parameters = sum(p.numel() for p in DinoViT(recipe.model).parameters())
        length = [epochs_in_words(recipe, known_set(recipe.data.train).train_images)]
        length += accumulation_in_words(batches.accumulation)
        return PlanFacts(
            steps=recipe.steps,
            data=recipe.data.train,
            **download_facts(recipe.data),
            example="images",
            unit="image",
            prepared_bytes=BYTES_A_VALUE * 3 * (GLOBALS * crops.global_size**2 + crops.locals * crops.local_size**2),
            read_seconds=seconds_to_read([crops.global_size] * GLOBALS + [crops.local_size] * crops.locals),
            lines={
                "tokens": f"{tokens} an image, {images:,} images in all",
                "backbone": f"{parameters:,} parameters, student and teacher each",
                "crops": f"{GLOBALS} of {crops.global_size} and {crops.locals} of {crops.local_size} pixels an image",
                "groups": f"masks and neighbours of {recipe.train.group} images",
                "length": "\n".join(length),
            },
            values={"images": images, "tokens_per_image": tokens},
        )


KIND = SelfSupervisedKind()
