"""Tasks on images, and their settings.

top1     how often a classifier's first guess is the class of an image
top5     how often the class is among its first five guesses
linear   top-1 of a linear classifier on frozen features
knn      top-1 by the nearest training images
ade20k   mean IoU of a linear segmentation head on the patches

The paper names the last three and gives no settings; the defaults are those of the DINOv3 evaluation scripts. `--set`
changes them, and every result lists the settings that were used and which of them differ from the defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from lapcli.data.cache import digest
from lapcli.evaluation.tasks import EvaluationRequest, TaskFamily, TaskResults, TaskScore, wilson_interval
from lapcli.recipe.checking import check_recipe
from lapcli.recipe.loading import apply_overrides
from lapcli.recipe.reading import Document, RecipeError
from lapcli.recipe.resolved import differing_keys
from lapcli.recipe.schema import CLASSES, FEATURES
from lapcli.recipe.section import Count, Fraction, NonNegative, Positive, Section, Size, Text, Whole, combination
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.devices import compute_policy
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import shown_progress

if TYPE_CHECKING:
    from lapcli.evaluation.features import Backbone

#: Short side to 256, then the centre of 224, for images of 224 pixels; the same share for others.
CROP_RATIO = 224 / 256
#: The share of the training images that `--holdout` keeps for choosing the learning rate.
HOLDOUT = 0.1

#: Settings that say where the data is, which are no differences from the default protocol.
PLACES = {"data", "revision", "image_column", "label_column"}
Seed = Annotated[Whole, Field(ge=0, lt=2**62)]
Share = Annotated[float, Field(gt=0, le=1)]


class LinearProtocol(Section):
    """A linear classifier on class token and mean patch of the last block, after the final norm."""

    rates: Annotated[list[Positive], Field(min_length=1, max_length=1000)] = Field(
        default_factory=lambda: [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]
    )  # each is scaled by batch / 256
    batch: Count = 512  # of all processes: 128 on each of the paper's 4 GPUs
    steps: Count = 12_500  # 10 epochs of 1,250 steps in DINOv3's eval/linear.py
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    scale: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = Field(
        default_factory=lambda: [0.08, 1.0], description="two shares of the area, or null for whole images"
    )
    flip: Fraction = 0.5
    crop_ratio: Share = CROP_RATIO  # of the shorter side, when evaluating
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share to choose the rate on; 0: on the validation images
    seed: Seed = 0

    @combination("scale")
    def _from_small_to_large(self) -> str | None:
        return "must go from the smaller share to the larger" if self.scale and self.scale[0] > self.scale[1] else None


class KnnProtocol(Section):
    """Votes of the nearest training images by cosine similarity of the class token, after the final norm."""

    neighbours: Annotated[list[Count], Field(min_length=1, max_length=100)] = Field(
        default_factory=lambda: [10, 20, 100, 200]
    )
    temperature: Positive = 0.07
    crop_ratio: Share = CROP_RATIO


class Ade20kProtocol(Section):
    """Batch norm and a 1 x 1 convolution on the patch tokens of the last block, after the final norm."""

    data: Text = "hub:zhoubolei/scene_parse_150"  # or a folder: the official layout, or parquet files
    revision: Text | None = None  # of the hub data set
    image_column: Text = "image"  # of hub sets and parquet files
    label_column: Text = "annotation"
    window: Size = 512  # pixels; the nearest multiple of the patch is taken
    batch: Count = 16  # of all processes
    steps: Count = 40_000
    lr: Positive = 1e-3
    weight_decay: NonNegative = 1e-3
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 1500 / 40_000  # of the steps
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    scale: Annotated[list[Positive], Field(min_length=2, max_length=2)] = Field(default_factory=lambda: [0.5, 2.0])
    validate_every: Count = 5_000  # the best of these validations and the last is the result
    seed: Seed = 0

    @combination("scale")
    def _from_small_to_large(self) -> str | None:
        return "must go from the smaller to the larger" if self.scale[0] > self.scale[1] else None


P = TypeVar("P", LinearProtocol, Ade20kProtocol)


class Protocols(Section):
    linear: LinearProtocol = LinearProtocol()
    knn: KnnProtocol = KnnProtocol()
    ade20k: Ade20kProtocol = Ade20kProtocol()


def read_protocols(overrides: Sequence[str], holdout: bool = False) -> Protocols:
    """Apply overrides such as `linear.steps=100` to the default settings; report all problems at once."""
    document, problems = apply_overrides(Document({}, {(): "--set"}), overrides)
    protocols, wrong = check_recipe(Protocols, document)
    if protocols is None or problems:
        raise RecipeError("--set", problems + wrong)
    if holdout and not protocols.linear.holdout:
        protocols = protocols.model_copy(update={"linear": protocols.linear.model_copy(update={"holdout": HOLDOUT})})
    return protocols


def within(protocol: P, examples: int, limit: int | None) -> P:
    """Shrink a batch that is larger than the examples that `--limit` leaves; the result records it."""
    if limit is None or protocol.batch <= examples:
        return protocol
    return protocol.model_copy(update={"batch": examples})


def written_out(protocol: Section) -> dict[str, Any]:
    """Return every setting as a plain value, and under `changed` those that differ from the default.

    The source of the data does not count as a change.
    """
    used, default = protocol.model_dump(mode="json"), type(protocol)().model_dump(mode="json")
    changed = {
        key: {"default": old, "used": new} for key, old, new in differing_keys(default, used) if key not in PLACES
    }
    return {**used, "changed": changed}


class ProbeTasks(TaskFamily):
    needs = frozenset({FEATURES})
    measures = "features of images"
    tasks = ("linear", "knn", "ade20k")
    default = ("knn",)
    options = ("set", "holdout")

    def check(self, tasks: Sequence[str], options: Mapping[str, Any], data: Path | None, gives: frozenset[str]) -> None:
        read_probe_protocols(tasks, options)

    def measure(self, request: EvaluationRequest) -> TaskResults:
        from lapcli.evaluation.features import backbone_of

        settings = read_probe_settings(request.tasks, request.options, request.data)
        return measure_probes(backbone_of(request.loaded), settings, request)


@dataclass(frozen=True)
class ProbeSettings:
    """The protocols, and the local folder of images, if one was given."""

    protocols: Protocols
    images: Path | None  # instead of the run's own
    is_changed: bool

    @property
    def variant(self) -> str:
        """A hash that tells results of other settings apart; empty for the defaults."""
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
    """Read the settings. `--data` with ADE20K's layout is for `ade20k`, anything else for `linear` and `knn`."""
    from lapcli.evaluation.ade20k import is_ade20k

    protocols = read_probe_protocols(tasks, options)
    is_changed = bool(options.get("set")) or bool(options.get("holdout"))
    if data is not None and "ade20k" in tasks and (is_ade20k(data) or not {"linear", "knn"} & set(tasks)):
        scenes = protocols.ade20k.model_copy(update={"data": str(data), "revision": None})
        return ProbeSettings(protocols.model_copy(update={"ade20k": scenes}), None, is_changed)
    return ProbeSettings(protocols, data, is_changed)


def measure_probes(backbone: "Backbone", settings: ProbeSettings, request: EvaluationRequest) -> TaskResults:
    """Measure the tasks in their order, on the images of the model's own source unless --data names others."""
    from lapcli.data.images.sources import open_images
    from lapcli.evaluation.ade20k import open_ade20k
    from lapcli.evaluation.features import ForwardSettings
    from lapcli.evaluation.image_probes import measure_knn, measure_linear
    from lapcli.evaluation.segmentation import measure_ade20k, window_size

    world, limit, batch, workers = request.world, request.limit, request.images_at_once, request.image_workers
    assert request.loaded.images is not None
    with shown_progress(world.is_main) as progress:
        how = ForwardSettings(world, batch, workers, bf16=compute_policy(world.device).bf16, progress=progress)
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
                # Windows are larger than the other tasks' images; a batch has as many pixels as one of theirs.
                share = (backbone.image / window_size(protocol, backbone.patch)) ** 2
                # No bf16: DINOv3's segmentation computes in float32.
                at_once = ForwardSettings(world, max(1, int(batch * share)), workers, progress=progress)
                scores.append(measure_ade20k(backbone, scenes, protocol, at_once, limit))
    identity = identities[0] if len(identities) == 1 else digest(*identities)
    return TaskResults(scores, "; ".join(descriptions), identity, notes=_notes(scores), variant=settings.variant)


def _images(source: ImageFiles, settings: ProbeSettings, limit: int | None) -> ImageFiles:
    changes: dict[str, Any] = {}
    if settings.images is not None:
        changes = {"train": str(settings.images), "validation": None, "revision": None}
        changes |= {"image_column": None, "label_column": None}
    if limit is not None:
        changes["decoded_gigabytes"] = 0.0  # no cache of decoded images: most of them are not used
    return source.model_copy(update=changes)


def _notes(scores: Sequence[TaskScore]) -> dict[str, str]:
    """Return the notes below the table, by task."""
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


TOP = {"top1": 1, "top5": 5}


class AccuracyTasks(TaskFamily):
    needs = frozenset({CLASSES})
    measures = "classes of images"
    tasks = default = ("top1", "top5")

    def measure(self, request: EvaluationRequest) -> TaskResults:
        """Measure on the run's own validation images, or on all images of --data."""
        import numpy as np

        from lapcli.data.images.image_set import ImageSubset
        from lapcli.data.images.sources import open_held_out
        from lapcli.evaluation.ade20k import is_ade20k
        from lapcli.evaluation.features import evenly_spaced
        from lapcli.measures.accuracy import measure_accuracy

        run, loaded, world = request.run, request.loaded, request.world
        assert run is not None
        assert loaded.classes is not None
        source: Any = loaded.images
        # The folder that the run was trained on keeps its held-out images: all others would be training images.
        is_its_own = request.data is not None and Path(source.train).expanduser().resolve() == request.data.resolve()
        is_scenes = request.data is not None and "ade20k" in request.all_tasks and is_ade20k(request.data)
        if request.data is not None and not is_its_own and not is_scenes:
            source = source.model_copy(update={"train": str(request.data), "validation": None, "revision": None})
        names = run.info.get("classes") or [str(number) for number in range(loaded.classes)]
        images, description = open_held_out(source, names)
        identity = images.identity()
        world.require_same({"data": identity})
        positions = evenly_spaced(len(images), request.limit)
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
        return TaskResults(scores, description, identity)


ACCURACY = AccuracyTasks()
