"""Settings of `linear`, `knn` and `ade20k`.

The paper names these tasks and gives no settings; the defaults are those of the DINOv3 evaluation scripts. `--set`
changes them, and every result lists the settings that were used and which of them differ from the defaults.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field

from lapcli.recipe.checking import check_recipe
from lapcli.recipe.loading import apply_overrides
from lapcli.recipe.reading import Document, RecipeError
from lapcli.recipe.resolved import differing_keys
from lapcli.recipe.section import Count, Fraction, NonNegative, Positive, Section, Size, Text, Whole, combination
from lapcli.runtime.errors import UsageError

#: Short side to 256, then the centre of 224, for images of 224 pixels; the same share for others.
CROP_RATIO = 224 / 256
#: Settings that say where the data is, which are no differences from the default protocol.
PLACES = {"data", "revision", "image_column", "label_column"}
Seed = Annotated[Whole, Field(ge=0, lt=2**62)]
Share = Annotated[float, Field(gt=0, le=1)]


class Protocol(Section):
    """The settings of one task."""

    def conditions(self) -> dict[str, Any]:
        """Return the settings that differ from the default; the source of the data does not count as a change."""
        used, default = self.model_dump(mode="json"), type(self)().model_dump(mode="json")
        return {key: new for key, _, new in differing_keys(default, used) if key not in PLACES}

    def within(self, examples: int, limit: int | None) -> Self:
        """Shrink a batch that is larger than the examples that `--limit` leaves; the result records it."""
        fits = limit is None or self.batch <= examples  # type: ignore[attr-defined]
        return self if fits else self.model_copy(update={"batch": examples})


class LinearProtocol(Protocol):
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


class KnnProtocol(Protocol):
    """Votes of the nearest training images by cosine similarity of the class token, after the final norm."""

    neighbours: Annotated[list[Count], Field(min_length=1, max_length=100)] = Field(
        default_factory=lambda: [10, 20, 100, 200]
    )
    temperature: Positive = 0.07
    crop_ratio: Share = CROP_RATIO


class Ade20kProtocol(Protocol):
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


class ProbeSettings(Section):
    linear: LinearProtocol = LinearProtocol()
    knn: KnnProtocol = KnnProtocol()
    ade20k: Ade20kProtocol = Ade20kProtocol()


def read_probe_settings(overrides: Sequence[str], tasks: Sequence[str] = ("linear", "knn", "ade20k")) -> ProbeSettings:
    """Apply overrides such as `linear.steps=100` to the default settings; report all problems at once."""
    for text in overrides:
        task = text.partition("=")[0].partition(".")[0].strip()
        if task in ProbeSettings.model_fields and task not in tasks:
            raise UsageError(f"--set {text[:60]}: {task} is not among the tasks; add it to --tasks or leave it out")
    document, problems = apply_overrides(Document({}, {(): "--set"}), overrides)
    settings, wrong = check_recipe(ProbeSettings, document)
    if settings is None or problems:
        raise RecipeError("--set", problems + wrong)
    return settings
