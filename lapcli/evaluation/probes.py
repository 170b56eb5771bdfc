"""What frozen features know, whatever network they come from.

linear   top-1 of a linear classifier on them
knn      top-1 by the nearest training images
ade20k   mean IoU of a linear segmentation head on the patches
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.data.cache import digest
from lapcli.evaluation.protocols import Protocols, read_protocols
from lapcli.evaluation.tasks import EvaluationRequest, Measured, TaskFamily, TaskScore
from lapcli.kinds.kind import FEATURES
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.devices import compute_policy
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import shown_progress

if TYPE_CHECKING:
    from lapcli.evaluation.features import Backbone


class ProbeTasks(TaskFamily):
    needs = frozenset({FEATURES})
    measures = "features of images"
    tasks = ("linear", "knn", "ade20k")
    default = ("knn",)
    options = ("set", "holdout")

    def check(self, tasks: Sequence[str], options: Mapping[str, Any], data: Path | None, gives: frozenset[str]) -> None:
        read_probe_protocols(tasks, options)

    def measure(self, request: EvaluationRequest) -> Measured:
        from lapcli.evaluation.features import backbone_of

        settings = read_probe_settings(request.tasks, request.options, request.data)
        return measure_probes(backbone_of(request.loaded), settings, request)


@dataclass(frozen=True)
class ProbeSettings:
    """What was asked for: the protocols, and which local folder is which."""

    protocols: Protocols
    images: Path | None  # instead of the run's own
    is_changed: bool

    @property
    def variant(self) -> str:
        """Tells results of other settings apart; empty for the default ones."""
        return digest(self.protocols.model_dump(mode="json"))[:6] if self.is_changed else ""


def read_probe_protocols(tasks: Sequence[str], options: Mapping[str, Any]) -> Protocols:
    changes, holdout = list(options.get("set") or []), bool(options.get("holdout"))
    for text in changes:
        task = text.partition("=")[0].partition(".")[0].strip()
        if task in ProbeTasks.tasks and task not in tasks:
            raise UsageError(f"--set {text[:60]}: {task} is not among the tasks; add it to --tasks or leave it out")
    if holdout and "linear" not in tasks:
        raise UsageError("--holdout chooses the learning rate of `linear`, which is not among the tasks; leave it out")
    return read_protocols(changes, holdout)


def read_probe_settings(tasks: Sequence[str], options: Mapping[str, Any], data: Path | None) -> ProbeSettings:
    """`--data` with ADE20K's layout is for `ade20k`, anything else for the images of `linear` and `knn`."""
    from lapcli.data.images.ade20k import is_ade20k

    protocols = read_probe_protocols(tasks, options)
    is_changed = bool(options.get("set")) or bool(options.get("holdout"))
    if data is not None and "ade20k" in tasks and (is_ade20k(data) or not {"linear", "knn"} & set(tasks)):
        scenes = protocols.ade20k.model_copy(update={"data": str(data), "revision": None})
        return ProbeSettings(protocols.model_copy(update={"ade20k": scenes}), None, is_changed)
    return ProbeSettings(protocols, data, is_changed)


def measure_probes(backbone: "Backbone", settings: ProbeSettings, request: EvaluationRequest) -> Measured:
    """The tasks in their order; images of the model's own source unless other ones were asked for."""
    from lapcli.data.images.ade20k import open_ade20k
    from lapcli.data.images.sources import open_images
    from lapcli.evaluation.features import Pass
    from lapcli.evaluation.image_probes import measure_knn, measure_linear
    from lapcli.evaluation.segmentation import measure_ade20k, window_size

    world, limit, batch, workers = request.world, request.limit, request.images_at_once, request.image_workers
    assert request.loaded.images is not None
    with shown_progress(world.is_main) as progress:
        how = Pass(world, batch, workers, bf16=compute_policy(world.device).bf16, progress=progress)
        scores: list[TaskScore] = []
        descriptions, identities = [], []
        if {"linear", "knn"} & set(request.tasks):
            images = open_images(_images(request.loaded.images, settings, limit), None, progress)
            world.require_same({"data": images.identity})
            descriptions.append(images.description)
            identities.append(images.identity)
        for task in request.tasks:
            if task == "linear":
                scores.append(measure_linear(backbone, images, settings.protocols.linear, how, limit))
            elif task == "knn":
                scores += measure_knn(backbone, images, settings.protocols.knn, how, limit)
            else:
                protocol = settings.protocols.ade20k
                scenes = open_ade20k(protocol.data, protocol.revision, protocol.image_column, protocol.label_column)
                world.require_same({"data": scenes.identity})
                descriptions.append(scenes.description)
                identities.append(scenes.identity)
                # As many pixels at once as the images of the other tasks have.
                share = (backbone.image / window_size(protocol, backbone.patch)) ** 2
                at_once = Pass(world, max(1, int(batch * share)), workers, progress=progress)
                scores.append(measure_ade20k(backbone, scenes, protocol, at_once, limit))
    identity = identities[0] if len(identities) == 1 else digest(*identities)
    return Measured(scores, "; ".join(descriptions), identity, notes=_notes(scores), variant=settings.variant)


def _images(source: ImageFiles, settings: ProbeSettings, limit: int | None) -> ImageFiles:
    changes: dict[str, Any] = {}
    if settings.images is not None:
        changes = {"train": str(settings.images), "validation": None, "revision": None}
        changes |= {"image_column": None, "label_column": None}
    if limit is not None:
        changes["decoded_gigabytes"] = 0.0  # most images are not looked at
    return source.model_copy(update=changes)


def _notes(scores: Sequence[TaskScore]) -> dict[str, str]:
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


PROBES = ProbeTasks()
