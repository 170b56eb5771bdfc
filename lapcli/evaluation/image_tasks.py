"""Evaluates image tasks.

top1     how often a classifier's first guess is the class of an image
top5     how often the class is among its first five guesses
linear   top-1 of a linear classifier on frozen features
knn      top-1 by the nearest training images
ade20k   mean IoU of a linear segmentation head on the patches
"""

from pathlib import Path
from typing import Any

import numpy as np

from lapcli.data.images.image_set import ImageSubset
from lapcli.data.images.loader import count_workers
from lapcli.data.images.sources import ImageData, open_held_out, open_images
from lapcli.evaluation.ade20k import open_ade20k
from lapcli.evaluation.features import ForwardSettings, backbone_of, evenly_spaced
from lapcli.evaluation.image_probes import measure_knn, measure_linear
from lapcli.evaluation.segmentation import measure_ade20k, window_size
from lapcli.evaluation.tasks import Request, Score, wilson_interval
from lapcli.measures.accuracy import measure_accuracy
from lapcli.objectives.objective import LoadedModel
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.devices import compute_policy
from lapcli.runtime.progress import shown_progress
from lapcli.runtime.ranks import World

TOP = {"top1": 1, "top5": 5}


def measure_images(request: Request, loaded: LoadedModel, world: World) -> list[Score]:
    """Measure the tasks, accuracies first; called on every process."""
    probes = [task for task in request.tasks if task not in TOP]
    batch = request.batch or loaded.validation_batch
    if batch is None:
        batch = request.run.recipe.train.micro_batch
    workers = count_workers(getattr(loaded.images, "workers", "auto"), world.device)
    data, scenes = request.data, request.settings.ade20k
    if data is not None and list(request.tasks) == ["ade20k"]:
        scenes = scenes.model_copy(update={"data": str(data)})
    scores = _accuracy(request, loaded, data, world, batch, workers) if len(probes) < len(request.tasks) else []
    if not probes:
        return scores
    backbone = backbone_of(loaded)
    with shown_progress(world.is_main) as progress:
        how = ForwardSettings(world, batch, workers, bf16=compute_policy(world.device).bf16, progress=progress)
        images: ImageData | None = None
        if {"linear", "knn"} & set(probes):
            assert loaded.images is not None
            images = open_images(_source(loaded.images, data), None)
            world.require_same({"data": images.identity})
        for task in probes:
            if task == "linear" and images is not None:
                scores.append(measure_linear(backbone, images, request.settings.linear, how, request.limit))
            elif task == "knn" and images is not None:
                scores += measure_knn(backbone, images, request.settings.knn, how, request.limit)
            else:
                opened = open_ade20k(scenes.data)
                world.require_same({"data": opened.identity})
                # Windows are larger than the other tasks' images; a batch has as many pixels as one of theirs.
                share = (backbone.image / window_size(scenes, backbone.patch)) ** 2
                # No bf16: DINOv3's segmentation computes in float32.
                at_once = ForwardSettings(world, max(1, int(batch * share)), workers, progress=progress)
                scores.append(measure_ade20k(backbone, opened, scenes, at_once, request.limit))
    return scores


def _source(source: ImageFiles, data: Path | None) -> ImageFiles:
    if data is None:
        return source
    own = dict.fromkeys(("validation", "revision", "label_column"))
    return source.model_copy(update={"train": str(data), **own})


def _accuracy(
    request: Request, loaded: LoadedModel, data: Path | None, world: World, batch: int, workers: int
) -> list[Score]:
    """Measure on the run's own validation images, or on all images of --data."""
    run = request.run
    source: Any = loaded.images
    assert loaded.classes is not None
    # The folder that the run was trained on keeps its held-out images: all others would be training images.
    if data is not None and Path(source.train).expanduser().resolve() != data.resolve():
        source = source.model_copy(update={"train": str(data), "validation": None, "revision": None})
    names = run.info.get("classes") or [str(number) for number in range(loaded.classes)]
    images, description = open_held_out(source, names)
    identity = images.identity()
    world.require_same({"data": identity})
    positions = evenly_spaced(len(images), request.limit)
    measured = images if positions is None else ImageSubset(images, np.array(positions))
    with compute_policy(world.device, run.recipe.train.precision).autocast():
        found = measure_accuracy(loaded.module, measured, source, loaded.image_size or 0, world, batch, workers=workers)
    return [
        Score(task, found.top(k), found.images, wilson_interval(found.correct[k], found.images), description, identity)
        for task, k in TOP.items()
        if task in request.tasks
    ]
