"""`linear` and `knn`: what frozen features know about the classes of images.

Shapes: B images, N images of a whole set, D features, R learning rates, K classes.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lapcli.data.images.augmentation import evaluation_transform, training_transform
from lapcli.data.images.image_set import ImageSet, Part
from lapcli.data.images.sources import ImageData, held_out_fraction
from lapcli.evaluation.backbones import Backbone
from lapcli.evaluation.features import (
    Pass,
    TrainingFeatures,
    all_features,
    batches_of_features,
    class_token,
    class_token_and_mean_patch,
    spread,
)
from lapcli.evaluation.linear_probe import LinearProbes
from lapcli.evaluation.protocols import KnnProtocol, LinearProtocol, within, written_out
from lapcli.evaluation.tasks import Score, wilson_interval
from lapcli.measures.nearest_neighbours import classify
from lapcli.recipe.vision import Augmentation, ImageSource
from lapcli.runtime.errors import LapError, UsageError

REFERENCE_BATCH = 256  # the learning rates are meant for this many images


def limited(data: ImageData, limit: int | None) -> ImageData:
    """At most `limit` training and `limit` validation images, evenly over each set so that all classes have some."""

    def some(images: ImageSet) -> ImageSet:
        positions = spread(len(images), limit)
        return images if positions is None else Part(images, np.array(positions))

    return replace(data, train=some(data.train), validation=some(data.validation))


def measure_knn(
    backbone: Backbone, data: ImageData, protocol: KnnProtocol, how: Pass, limit: int | None = None
) -> list[Score]:
    """One score for each number of neighbours that the training images can give."""
    data = limited(data, limit)
    counts = [k for k in protocol.neighbours if k <= len(data.train)]
    if not counts:
        raise UsageError(
            f"there are {len(data.train):,} training images, fewer than any of knn.neighbours {protocol.neighbours}; "
            "use --set knn.neighbours=[1]"
        )
    transform = evaluation_transform(_source(crop_ratio=protocol.crop_ratio), backbone.image)
    keys_ND = all_features(
        backbone, data.train, transform, class_token, backbone.width, how, "features of training images"
    )
    labels_N = torch.from_numpy(data.train.labels).to(keys_ND.device)
    right = dict.fromkeys(counts, 0.0)
    for positions, queries_BD in batches_of_features(
        backbone, data.validation, transform, class_token, how, "features of validation images"
    ):
        true_B = torch.from_numpy(data.validation.labels[positions.start : positions.stop]).to(keys_ND.device)
        found = classify(queries_BD, keys_ND, labels_N, len(data.train.classes), counts, protocol.temperature)
        for k, classes_B in found.items():
            right[k] += float((classes_B == true_B).sum())
    totals = how.world.sum(list(right.values()))
    shared = {
        "feature": _class_token_name(backbone),
        "training_images": len(data.train),
        "left_out": [k for k in protocol.neighbours if k not in counts],  # beyond the training images
        "protocol": written_out(protocol),
    }
    scores = []
    for k, correct in zip(right, totals, strict=True):
        interval = wilson_interval(int(correct), len(data.validation))
        details = {"k": k, **shared}
        scores.append(Score(f"knn{k}", correct / len(data.validation), len(data.validation), interval, details))
    return scores


def measure_linear(
    backbone: Backbone, data: ImageData, protocol: LinearProtocol, how: Pass, limit: int | None = None
) -> Score:
    """Top-1 of the best learning rate, chosen on the validation images or on held-out training images."""
    data = limited(data, limit)
    train, chosen_on = data.train, data.validation
    if protocol.holdout:
        train, chosen_on = held_out_fraction(data.train, protocol.holdout, protocol.seed)
    protocol = within(protocol, len(train), limit)
    width = 2 * backbone.width
    probes = LinearProbes(
        width,
        len(train.classes),
        [rate * protocol.batch / REFERENCE_BATCH for rate in protocol.rates],
        steps=protocol.steps,
        seed=protocol.seed,
        device=backbone.device,
        momentum=protocol.momentum,
    )
    losses_R = _train(backbone, train, protocol, how, probes, width)
    finite = probes.is_finite()
    if not any(finite):
        raise LapError(
            "the linear probe diverged at every learning rate; use smaller ones with --set linear.rates=[..]"
        )
    transform = evaluation_transform(_source(crop_ratio=protocol.crop_ratio), backbone.image)
    on_validation = _top(backbone, data.validation, transform, probes, how)
    on_chosen = _top(backbone, chosen_on, transform, probes, how) if protocol.holdout else on_validation
    # The smallest of equally good rates, so that the choice is the same everywhere.
    best = max((rate for rate in range(len(finite)) if finite[rate]), key=lambda rate: on_chosen[rate][0])
    images = len(data.validation)
    correct = on_validation[best][0]
    rates: list[dict[str, Any]] = [
        {
            "rate": rate,
            "loss": round(loss, 6) if is_finite else None,
            "top1": top1 / images if is_finite else None,
            "top5": top5 / images if is_finite else None,
            **({"top1_held_out": on_chosen[number][0] / len(chosen_on)} if protocol.holdout and is_finite else {}),
        }
        for number, (rate, loss, is_finite, (top1, top5)) in enumerate(
            zip(protocol.rates, losses_R, finite, on_validation, strict=True)
        )
    ]
    details = {
        "feature": f"{_class_token_name(backbone)} and mean patch of the last block, after the final norm",
        "best_rate": protocol.rates[best],
        "best_rate_chosen_on": (
            f"{len(chosen_on):,} held-out training images" if protocol.holdout else "the validation images themselves"
        ),
        "top5": on_validation[best][1] / images,
        "rates": rates,
        "training_images": len(train),
        "protocol": written_out(protocol),
    }
    return Score("linear", correct / images, images, wilson_interval(correct, images), details)


def _train(
    backbone: Backbone, train: ImageSet, protocol: LinearProtocol, how: Pass, probes: LinearProbes, width: int
) -> list[float]:
    """The loss of each rate in the last step."""
    whole = protocol.scale is None
    augmentation = Augmentation(crop="none" if whole else "random_resized", scale=protocol.scale, flip=protocol.flip)
    source = _source(augmentation=augmentation, mean=backbone.mean, std=backbone.std)
    features = TrainingFeatures(
        backbone,
        train,
        training_transform(source, backbone.image),
        class_token_and_mean_patch,
        width,
        how,
        batch=protocol.batch,
        steps=protocol.steps,
        seed=protocol.seed,
    )
    losses_R = torch.zeros(len(protocol.rates))
    try:
        for step in range(protocol.steps):
            losses_R = probes.step(*features.batch(step))
            if how.progress:
                how.progress("linear probe", step + 1, protocol.steps)
    finally:
        features.close()
    return losses_R.tolist()


def _top(
    backbone: Backbone, images: ImageSet, transform: Any, probes: LinearProbes, how: Pass
) -> list[tuple[int, int]]:
    """Of each rate: images whose class is the first guess, and among the first five."""
    rates = len(probes.weight_RKD)
    counts_R2 = torch.zeros(rates, 2, dtype=torch.int64)
    for positions, features_BD in batches_of_features(
        backbone, images, transform, class_token_and_mean_patch, how, "scoring the linear probe"
    ):
        true_B = torch.from_numpy(images.labels[positions.start : positions.stop]).to(features_BD.device)
        logits_BRK = probes.logits(features_BD)
        hits = logits_BRK.topk(min(5, logits_BRK.shape[2]), dim=2).indices == true_B[:, None, None]
        counts_R2[:, 0] += hits[:, :, 0].sum(dim=0).cpu()
        counts_R2[:, 1] += hits.any(dim=2).sum(dim=0).cpu()
    totals = how.world.sum([float(x) for x in counts_R2.flatten().tolist()])
    return [(int(totals[2 * rate]), int(totals[2 * rate + 1])) for rate in range(rates)]


def _source(**settings: Any) -> ImageSource:
    """The settings of a transform; where the images come from plays no part in it."""
    return ImageSource(train="builtin", validation=0.5, **settings)


def _class_token_name(backbone: Backbone) -> str:
    return "class token" if backbone.has_class_token else "mean patch (the network has no class token)"
