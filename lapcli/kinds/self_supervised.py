"""Self-supervised training of a ViT with a student and a teacher; the teacher's backbone is what is measured."""

from typing import TYPE_CHECKING, Any

from lapcli.kinds.classification import fetch_images
from lapcli.kinds.kind import FEATURES, Fetched, Kind, LoadedModel, Start
from lapcli.recipe.self_supervised import SelfSupervisedRecipe
from lapcli.runs import Run
from lapcli.runtime.progress import Progress, shown_progress

if TYPE_CHECKING:
    import torch

    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint


class SelfSupervisedKind(Kind):
    name = "self_supervised"
    recipe = recipe_file = SelfSupervisedRecipe
    gives = frozenset({FEATURES})
    metrics = ("validation_knn",)
    expected_scores = ("linear",)

    def start(self, recipe: SelfSupervisedRecipe, world: "World", run: Run) -> Start:
        from lapcli.data.images.sources import open_images
        from lapcli.objectives.self_supervised import SelfSupervised

        with shown_progress(world.is_main) as progress:
            data = open_images(recipe.data, None, progress)
        objective = SelfSupervised(recipe, data, world)
        size = recipe.data.crops.global_size
        return Start(objective, data.facts(size), [*objective.notes(), *data.notes(size)])

    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        import torch

        from lapcli.models.self_supervised import StudentTeacher
        from lapcli.training.checkpoint import load_weights

        recipe: Any = run.recipe
        if checkpoint is None:
            model = StudentTeacher(recipe.model, recipe.seed)
        else:
            with torch.device("meta"):  # nothing is drawn only to be overwritten
                model = StudentTeacher(recipe.model)
            model.to_empty(device="cpu")
            load_weights(checkpoint.weights, model, str(recipe.model.head_plan()))
        return LoadedModel(
            name=run.name,
            module=model.teacher.backbone.to(device),
            gives=self.gives,
            weights="untrained" if checkpoint is None else "trained",
            weights_sha256=None if checkpoint is None else checkpoint.weights_sha256,
            step=0 if checkpoint is None else checkpoint.step,
            device=device,
            run=run,
            images=recipe.data,
            image_size=recipe.data.crops.global_size,
        )

    def fetch(self, recipe: SelfSupervisedRecipe, progress: Progress) -> Fetched:
        return fetch_images(recipe.data, None, progress)


KIND = SelfSupervisedKind()
