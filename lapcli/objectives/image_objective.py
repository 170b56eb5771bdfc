"""The common base of image objectives: data, workers and loading."""

import contextlib
from typing import Any, TypeVar

import torch
from torch import nn

from lapcli.checkpoint import Checkpoint, load_weights
from lapcli.data.images.loader import Example, ImageBatches, ImageLoader, count_workers
from lapcli.data.images.sources import ImageData, open_images
from lapcli.objectives.objective import LoadedModel, Objective
from lapcli.objectives.weights import InitialWeights
from lapcli.recipe.dino import SelfSupervisedRecipe
from lapcli.recipe.vision import ClassificationRecipe
from lapcli.runs import Run
from lapcli.runtime.devices import ComputePolicy, compute_policy
from lapcli.runtime.environment import check_compiler
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World

R = TypeVar("R", ClassificationRecipe, SelfSupervisedRecipe)


class ImageObjective(Objective[R]):
    """Training on images. A subclass sets `image_size` (pixels of a side), `classes` (None: any number), and `use`."""

    unit = "images"
    classes: int | None = None
    image_size: int
    _images: ImageBatches
    _loader: ImageLoader

    def prepare(self, world: World, run: Run, initial: InitialWeights | None) -> dict[str, Any]:
        data = open_images(self.recipe.data, self.classes)
        self.use(data, world)
        self.notes += [data.note] if data.note else []
        return {"data": data.description, "data_sha256": data.identity, "classes": data.train.classes}

    def use(self, data: ImageData, world: World) -> None:
        """Plan the batches of opened images."""
        self.data, self.world = data, world
        self.batches = self.plan_batches(world.size)
        self.units_per_step = self.recipe.train.batch

    def start_workers(self, reader: Any) -> None:
        self._loader = ImageLoader(
            reader,
            self.examples,
            micro_steps=self.batches.accumulation,
            last=(self.steps - 1, self.batches.accumulation - 1),
            workers=count_workers(self.recipe.data.workers, self.world.device),
            device=self.world.device,
        )

    def examples(self, step: int, micro_step: int) -> list[Example]:
        first = self.batches.first(micro_step, self.world.rank)
        return self._images.examples(step, first, self.batches.micro_batch)

    def build(self, device: torch.device, policy: ComputePolicy | None = None) -> None:
        train = self.recipe.train
        self.policy = policy or compute_policy(device, train.precision, train.compile)
        # Initialised on the CPU, so that one seed gives the same weights on every device.
        with device if device.type == "meta" else contextlib.nullcontext():
            model = self.new_model(self.recipe, self.recipe.seed)
        self.model = model.to(device).train()
        if self.policy.compiles:
            check_compiler(device.type)
            self.compile()

    @classmethod
    def new_model(cls, recipe: R, seed: int | None) -> nn.Module:
        """Return the model, initialised from the seed, or with arbitrary weights if it is None."""
        raise NotImplementedError

    def compile(self) -> None:
        """Compile the model in place."""

    def describe_batch(self, step: int) -> str:
        return self._images.identity(step)

    def close(self) -> None:
        if hasattr(self, "_loader"):
            self._loader.close()

    @classmethod
    def load(
        cls, run: Run, checkpoint: Checkpoint | None, device: torch.device, *, float32: bool = False
    ) -> LoadedModel:
        recipe: Any = run.recipe
        if checkpoint is None:
            model = cls.new_model(recipe, recipe.seed)
        else:
            with torch.device("meta"):  # weights that are overwritten need no initialisation
                model = cls.new_model(recipe, None)
            # Buffers that are not in the state dict would stay unset; these models have none.
            model.to_empty(device="cpu")
            load_weights(checkpoint.weights, model, str(recipe.model.head_plan()))
        objective = cls(recipe)
        return LoadedModel.from_run(
            run,
            checkpoint,
            cls.evaluated(model),
            device,
            images=recipe.data,
            image_size=objective.image_size,
            classes=objective.classes,
        )

    @classmethod
    def evaluated(cls, model: Any) -> nn.Module:
        """Return the part of the model to evaluate."""
        return model

    @classmethod
    def fetch(cls, recipe: R, progress: Progress) -> dict[str, Any]:
        data = open_images(recipe.data, cls(recipe).classes)
        return {
            "source": recipe.data.train,
            "classes": len(data.train.classes),
            "train_images": len(data.train),
            "validation_images": len(data.validation),
            "identity": data.identity,
        }

    def image_facts(self) -> dict[str, Any]:
        """Return the fields of `PlanFacts` that images have."""
        return {"data": self.recipe.data.train, "example": "images", "unit": "image"}
