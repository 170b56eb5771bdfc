"""`top1` and `top5`: how often a classifier's first guesses hold the class of an image."""

from typing import Any

from lapcli.evaluation.tasks import EvaluationRequest, Measured, TaskFamily, TaskScore, wilson_interval
from lapcli.kinds.kind import CLASSES
from lapcli.runtime.devices import compute_policy

TOP = {"top1": 1, "top5": 5}


class AccuracyTasks(TaskFamily):
    needs = frozenset({CLASSES})
    measures = "classes of images"
    tasks = default = ("top1", "top5")

    def measure(self, request: EvaluationRequest) -> Measured:
        """Over the run's own validation images, or all images of --data."""
        import numpy as np

        from lapcli.data.images.ade20k import is_ade20k
        from lapcli.data.images.image_set import ImageSubset
        from lapcli.data.images.sources import open_held_out
        from lapcli.evaluation.features import spread
        from lapcli.measures.accuracy import measure_accuracy

        run, loaded, world = request.run, request.loaded, request.world
        assert run is not None
        assert loaded.classes is not None
        source: Any = loaded.images
        if request.data is not None and not ("ade20k" in request.all_tasks and is_ade20k(request.data)):
            source = source.model_copy(update={"train": str(request.data), "validation": None, "revision": None})
        names = run.info.get("classes") or [str(number) for number in range(loaded.classes)]
        images, description = open_held_out(source, names)
        identity = images.identity()
        world.require_same({"data": identity})
        positions = spread(len(images), request.limit)
        measured = images if positions is None else ImageSubset(images, np.array(positions))
        with compute_policy(world.device, run.recipe.train.precision).autocast():
            accuracy = measure_accuracy(
                loaded.module,
                measured,
                source,
                loaded.image_size or 0,
                world,
                request.images_at_once,
                workers=request.image_workers,
            )
        scores = []
        for task in request.tasks:
            interval = wilson_interval(accuracy.correct[TOP[task]], accuracy.images)
            scores.append(TaskScore(task, accuracy.top(TOP[task]), accuracy.images, interval))
        return Measured(scores, description, identity)


ACCURACY = AccuracyTasks()
