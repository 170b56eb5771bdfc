"""Measures frozen features by `linear`, `knn` and `ade20k`, whatever network they come from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapcli.data.cache import digest
from lapcli.data.images.ade20k import is_ade20k, open_ade20k
from lapcli.data.images.sources import open_images
from lapcli.evaluation.backbones import Backbone
from lapcli.evaluation.features import Pass
from lapcli.evaluation.protocols import Protocols, read_protocols
from lapcli.evaluation.tasks import PROBES, Measured, Score
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.devices import uses_bf16
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World


@dataclass(frozen=True)
class Settings:
    """What was asked for: the protocols, and which local folder is which."""

    protocols: Protocols
    images: Path | None  # instead of the run's own
    is_changed: bool

    @property
    def variant(self) -> str:
        """Tells results of other settings apart; empty for the default ones."""
        return digest(self.protocols.model_dump(mode="json"))[:6] if self.is_changed else ""


def read_settings(tasks: Sequence[str], options: Mapping[str, Any], data: Path | None) -> Settings:
    """`--data` with ADE20K's layout is for `ade20k`, anything else for the images of `linear` and `knn`."""
    asked, holdout = list(options.get("set") or []), bool(options.get("holdout"))
    for text in asked:
        task = text.partition("=")[0].partition(".")[0].strip()
        if task in PROBES and task not in tasks:
            raise UsageError(f"--set {text[:60]}: {task} is not among the tasks; add it to --tasks or leave it out")
    if holdout and "linear" not in tasks:
        raise UsageError("--holdout chooses the learning rate of `linear`, which is not among the tasks; leave it out")
    is_changed = bool(asked) or holdout
    protocols = read_protocols(asked, holdout)
    if data is not None and "ade20k" in tasks and (is_ade20k(data) or not {"linear", "knn"} & set(tasks)):
        scenes = protocols.ade20k.model_copy(update={"data": str(data), "revision": None})
        return Settings(protocols.model_copy(update={"ade20k": scenes}), None, is_changed)
    return Settings(protocols, data, is_changed)


def measure_probes(
    backbone: Backbone,
    tasks: Sequence[str],
    settings: Settings,
    source: ImageFiles,
    world: World,
    *,
    batch: int,
    workers: int,
    limit: int | None,
) -> Measured:
    """The tasks in their order; images of `source` unless other ones were asked for."""
    from lapcli.evaluation.image_probes import measure_knn, measure_linear
    from lapcli.evaluation.segmentation import measure_ade20k, window_size

    with _shown(world) as progress:
        how = Pass(world, batch, workers, bf16=uses_bf16("auto", world.device), progress=progress)
        scores: list[Score] = []
        described, identities = [], []
        if {"linear", "knn"} & set(tasks):
            opened = open_images(_images(source, settings, limit), None, progress)
            world.require_same({"data": opened.identity})
            described.append(opened.description)
            identities.append(opened.identity)
            images = opened
        for task in tasks:
            if task == "linear":
                scores.append(measure_linear(backbone, images, settings.protocols.linear, how, limit))
            elif task == "knn":
                scores += measure_knn(backbone, images, settings.protocols.knn, how, limit)
            else:
                protocol = settings.protocols.ade20k
                scenes = open_ade20k(protocol.data, protocol.revision, protocol.image_column, protocol.label_column)
                world.require_same({"data": scenes.identity})
                described.append(scenes.description)
                identities.append(scenes.identity)
                # As many pixels at once as the images of the other tasks have.
                share = (backbone.image / window_size(protocol, backbone.patch)) ** 2
                at_once = Pass(world, max(1, int(batch * share)), workers, progress=progress)
                scores.append(measure_ade20k(backbone, scenes, protocol, at_once, limit))
    found = identities[0] if len(identities) == 1 else digest(*identities)
    return Measured(scores, "; ".join(described), found, notes=_notes(scores), variant=settings.variant)


def _images(source: ImageFiles, settings: Settings, limit: int | None) -> ImageFiles:
    changes: dict[str, Any] = {}
    if settings.images is not None:
        changes = {"train": str(settings.images), "validation": None, "revision": None}
        changes |= {"image_column": None, "label_column": None}
    if limit is not None:
        changes["decoded_gigabytes"] = 0.0  # most images are not looked at
    return source.model_copy(update=changes)


def _notes(scores: Sequence[Score]) -> dict[str, str]:
    """What a reader of the table has to know, by task."""
    notes = {}
    for score in scores:
        details = score.details
        if score.task == "linear":
            notes["linear"] = f"best rate {details['best_rate']:g}, chosen on {details['best_rate_chosen_on']}"
        elif score.task == "ade20k":
            notes["ade20k"] = (
                f"mean IoU over {details['classes_seen']} classes, step {details['best_step']:,} the best on "
                f"{details['best_step_chosen_on']}"
            )
        elif details["left_out"]:
            left_out = ", ".join(map(str, details["left_out"]))
            notes["knn"] = f"k = {left_out} left out: only {details['training_images']:,} training images"
        if changed := details["protocol"]["changed"]:
            name = "knn" if score.task.startswith("knn") else score.task
            text = ", ".join(f"{key} {value['used']} ({value['default']})" for key, value in changed.items())
            notes.setdefault("not default", "")
            if f"{name}: " not in notes["not default"]:
                notes["not default"] += f"{'; ' if notes['not default'] else ''}{name}: {text}"
    return notes


@contextmanager
def _shown(world: World) -> Iterator[Progress | None]:
    from lapcli.runtime.progress import shown_progress

    if not world.is_main:
        yield None
        return
    with shown_progress() as progress:
        yield progress
