"""Evaluates image tasks.

top1     how often a classifier's first guess is the class of an image
top5     how often the class is among its first five guesses
linear   top-1 of a linear classifier on frozen features
knn      top-1 by the nearest training images
ade20k   mean IoU of a linear segmentation head on the patches

The linear classifiers of all learning rates are trained together by one matmul.

Shapes: B images, N images of a complete set, D features, R learning rates, K classes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lapcli.data.images.augmentation import training_transform
from lapcli.data.images.image_set import ImageSet, ImageSubset
from lapcli.data.images.loader import Reader, count_workers
from lapcli.data.images.sources import ImageData, open_held_out, open_images
from lapcli.evaluation.ade20k import open_ade20k
from lapcli.evaluation.features import (
    Backbone,
    ForwardSettings,
    SharedBatches,
    all_features,
    backbone_of,
    batches_of_features,
    class_token,
    class_token_and_mean_patch,
    evenly_spaced,
    source_of,
)
from lapcli.evaluation.segmentation import measure_ade20k, window_size
from lapcli.evaluation.tasks import KnnProtocol, LinearProtocol, Request, Score, wilson_interval
from lapcli.measures.accuracy import classify, measure_accuracy
from lapcli.objectives.objective import LoadedModel
from lapcli.recipe.vision import Augmentation, ImageFiles
from lapcli.runtime.devices import compute_policy
from lapcli.runtime.errors import LapError, UsageError
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
                # Windows are larger than the other tasks' images; a batch has the same number of pixels.
                share = (backbone.image / window_size(scenes, backbone.patch)) ** 2
                # No bf16: DINOv3's segmentation uses float32.
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
    # The run's own folder keeps its held-out split: all other images were used for training.
    if data is not None and Path(source.train).expanduser().resolve() != data.resolve():
        source = source.model_copy(update={"train": str(data), "validation": None, "revision": None})
    names = run.info.get("classes") or [str(number) for number in range(loaded.classes)]
    images, description = open_held_out(source, names)
    identity = images.identity()
    world.require_same({"data": identity})
    measured = some(images, request.limit)
    with compute_policy(world.device, run.recipe.train.precision).autocast():
        found = measure_accuracy(loaded.module, measured, source, loaded.image_size or 0, world, batch, workers=workers)
    return [
        Score(task, found.top(k), found.images, wilson_interval(found.correct[k], found.images), description, identity)
        for task, k in TOP.items()
        if task in request.tasks
    ]


# `linear` and `knn`.

INITIAL_STD = 0.01
MOMENTUM = 0.9
REFERENCE_BATCH = 256  # the learning rates are given for this batch size


class LinearProbes:
    """SGD with momentum and without weight decay on the cross entropy; each rate follows a cosine to 0.

    All rates start from the same weights, so that a rate's result does not depend on the other rates.
    """

    def __init__(
        self, width: int, classes: int, rates: Sequence[float], *, steps: int, seed: int, device: torch.device
    ) -> None:
        # Initialised on the CPU: the same weights on every device.
        start_KD = torch.randn(classes, width, generator=torch.Generator().manual_seed(seed)) * INITIAL_STD
        self.weights = [start_KD.to(device, copy=True).requires_grad_() for _ in rates]
        self.biases = [torch.zeros(classes, device=device, requires_grad=True) for _ in rates]
        groups = [{"params": pair, "lr": rate} for *pair, rate in zip(self.weights, self.biases, rates, strict=True)]
        self._sgd = torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM)
        self._cosine = torch.optim.lr_scheduler.LambdaLR(self._sgd, lambda n: 0.5 * (1 + math.cos(math.pi * n / steps)))

    def logits(self, features_BD: Tensor) -> Tensor:
        """Return (B, R, K) logits of all classifiers at once."""
        flat = torch.addmm(torch.cat(self.biases), features_BD, torch.cat(self.weights).T)
        return flat.view(len(features_BD), len(self.weights), -1)

    def step(self, features_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Update every classifier once; return the mean cross entropy of each before the update."""
        self._sgd.zero_grad()
        logits_BRK = self.logits(features_BD)
        labels_BR = labels_B[:, None].expand(logits_BRK.shape[:2])
        loss_R = F.cross_entropy(logits_BRK.transpose(1, 2), labels_BR, reduction="none").mean(dim=0)
        loss_R.sum().backward()
        self._sgd.step()
        self._cosine.step()
        return loss_R.detach()

    def is_finite(self) -> list[bool]:
        """Return whether the classifier of each rate still has finite weights."""
        return [
            bool(torch.isfinite(w).all() and torch.isfinite(b).all())
            for w, b in zip(self.weights, self.biases, strict=True)
        ]


def some(images: ImageSet, limit: int | None) -> ImageSet:
    """Take at most `limit` images, spread evenly so that all classes have some."""
    positions = evenly_spaced(len(images), limit)
    return images if positions is None else ImageSubset(images, np.array(positions))


def limited(data: ImageData, limit: int | None) -> ImageData:
    return replace(data, train=some(data.train, limit), validation=some(data.validation, limit))


def measure_knn(
    backbone: Backbone, data: ImageData, protocol: KnnProtocol, how: ForwardSettings, limit: int | None = None
) -> list[Score]:
    """Return one score for each number of neighbours; values above the number of training images are omitted."""
    data = limited(data, limit)
    counts = [k for k in protocol.neighbours if k <= len(data.train)]
    if not counts:
        raise UsageError(
            f"there are {len(data.train):,} training images, fewer than any of knn.neighbours {protocol.neighbours}; "
            "use --set knn.neighbours=[1]"
        )
    # Training images get the evaluation transform too, as in DINOv3's eval/knn.py.
    keys_ND = all_features(
        backbone, data.train, protocol.crop_ratio, class_token, backbone.width, how, "features of training images"
    )
    keys_ND = F.normalize(keys_ND, dim=1)
    labels_N = torch.from_numpy(data.train.labels).to(keys_ND.device)
    right = dict.fromkeys(counts, 0.0)
    for positions, queries_BD in batches_of_features(
        backbone, data.validation, protocol.crop_ratio, class_token, how, "features of validation images"
    ):
        true_B = torch.from_numpy(data.validation.labels[positions.start : positions.stop]).to(keys_ND.device)
        guesses = classify(queries_BD, keys_ND, labels_N, len(data.train.classes), counts, protocol.temperature)
        for k, classes_B in guesses.items():
            right[k] += float((classes_B == true_B).sum())
    totals = how.world.sum(list(right.values()))
    left_out = ", ".join(str(k) for k in protocol.neighbours if k not in counts)
    note = f"k = {left_out} left out: only {len(data.train):,} training images" if left_out else ""
    details = {
        "training_images": len(data.train),
        "protocol": protocol.model_dump(mode="json"),
    }
    count = len(data.validation)
    known: dict[str, Any] = {"conditions": protocol.conditions(), "note": note}
    of = (data.description, data.identity)
    return [
        Score(f"knn{k}", right / count, count, wilson_interval(int(right), count), *of, {"k": k, **details}, **known)
        for k, right in zip(counts, totals, strict=True)
    ]


def measure_linear(
    backbone: Backbone, data: ImageData, protocol: LinearProtocol, how: ForwardSettings, limit: int | None = None
) -> Score:
    """Return top-1 of the best learning rate, chosen on the validation images, as the DINOv3 scripts do."""
    data = limited(data, limit)
    train = data.train
    width = 2 * backbone.width
    probes = LinearProbes(
        width,
        len(train.classes),
        [rate * protocol.batch / REFERENCE_BATCH for rate in protocol.rates],
        steps=protocol.steps,
        seed=protocol.seed,
        device=backbone.device,
    )
    losses_R = _train(backbone, train, protocol, how, probes, width)
    finite = probes.is_finite()
    if not any(finite):
        raise LapError(
            "the linear probe diverged at every learning rate; use smaller ones with --set linear.rates=[..]"
        )
    on_validation = _top(backbone, data.validation, protocol.crop_ratio, probes, how)
    # The first of equally good rates wins, so that the choice is reproducible.
    best = max((rate for rate in range(len(finite)) if finite[rate]), key=lambda rate: on_validation[rate][0])
    images = len(data.validation)
    correct = on_validation[best][0]
    top1 = [hits / images if is_finite else None for (hits, _), is_finite in zip(on_validation, finite, strict=True)]
    details = {
        "best_rate": protocol.rates[best],
        "top5": on_validation[best][1] / images,
        "rates": [
            {"rate": rate, "loss": loss if is_finite else None, "top1": score}
            for rate, loss, is_finite, score in zip(protocol.rates, losses_R, finite, top1, strict=True)
        ],
        "training_images": len(train),
        "protocol": protocol.model_dump(mode="json"),
    }
    return Score(
        "linear",
        correct / images,
        images,
        wilson_interval(correct, images),
        data.description,
        data.identity,
        details,
        conditions=protocol.conditions(),
        note=f"best rate {protocol.rates[best]:g}, chosen on the validation images",
    )


def _train(
    backbone: Backbone,
    train: ImageSet,
    protocol: LinearProtocol,
    how: ForwardSettings,
    probes: LinearProbes,
    width: int,
) -> list[float]:
    """Train the classifiers; return the loss of each rate in the last step."""
    is_whole = protocol.scale is None
    augmentation = Augmentation(crop="none" if is_whole else "random_resized", flip=protocol.flip)
    source = source_of(backbone, augmentation=augmentation)
    reader = Reader(train, training_transform(source, backbone.image, protocol.scale), backbone.image, protocol.seed)
    sizes = {"batch": protocol.batch, "steps": protocol.steps, "seed": protocol.seed}
    batches = SharedBatches(reader, len(train), how, key="linear", **sizes)
    labels_N = torch.from_numpy(train.labels)
    losses_R = torch.zeros(len(protocol.rates))
    try:
        for step in range(protocol.steps):
            features_BD = torch.zeros(protocol.batch, width, device=backbone.device)
            for share, images_BCHW, _ in batches.turns(step):
                features_BD[share.start : share.stop] = class_token_and_mean_patch(*backbone(images_BCHW, how.bf16))
            losses_R = probes.step(how.together(features_BD), labels_N[batches.indices(step)].to(backbone.device))
            if how.progress:
                how.progress("linear probe", step + 1, protocol.steps)
    finally:
        batches.close()
    return losses_R.tolist()


def _top(
    backbone: Backbone, images: ImageSet, crop_ratio: float, probes: LinearProbes, how: ForwardSettings
) -> list[tuple[int, int]]:
    """Count the correct top-1 and top-5 predictions for each rate."""
    rates = len(probes.weights)
    counts_R2 = torch.zeros(rates, 2, dtype=torch.int64)
    for positions, features_BD in batches_of_features(
        backbone, images, crop_ratio, class_token_and_mean_patch, how, "scoring the linear probe"
    ):
        true_B = torch.from_numpy(images.labels[positions.start : positions.stop]).to(features_BD.device)
        logits_BRK = probes.logits(features_BD).detach()
        hits = logits_BRK.topk(min(5, logits_BRK.shape[2]), dim=2).indices == true_B[:, None, None]
        counts_R2[:, 0] += hits[:, :, 0].sum(dim=0).cpu()
        counts_R2[:, 1] += hits.any(dim=2).sum(dim=0).cpu()
    totals = how.world.sum([float(x) for x in counts_R2.flatten().tolist()])
    return [(int(totals[2 * rate]), int(totals[2 * rate + 1])) for rate in range(rates)]
