"""Settings of `linear`, `knn`, `ade20k` and of sampled answers.

The paper names these tasks and gives no settings; the defaults are those of the DINOv3 evaluation scripts, and for
answers nanochat's. `--set` changes them, and every result lists those that differ from the defaults.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from lapcli.recipe.loading import apply_overrides, check_recipe
from lapcli.recipe.reading import Document, RecipeError, differing_keys
from lapcli.recipe.section import Count, Fraction, NonNegative, Positive, Section, Size, Text, Whole, combination
from lapcli.runtime.errors import UsageError

#: Short side to 256, then the centre of 224, for images of 224 pixels; the same share for others.
CROP_RATIO = 224 / 256
Seed = Annotated[Whole, Field(ge=0, lt=2**62)]
Share = Annotated[float, Field(gt=0, le=1)]


class Protocol(Section):
    """The settings of one task."""

    def conditions(self) -> dict[str, Any]:
        """Return the settings that differ from the default; the source of the data does not count as a change."""
        used, default = self.model_dump(mode="json"), type(self)().model_dump(mode="json")
        return {key: new for key, _, new in differing_keys(default, used) if key != "data"}


class LinearProtocol(Protocol):
    """A linear classifier on class token and mean patch of the last block, after the final norm."""

    rates: Annotated[list[Positive], Field(min_length=1, max_length=1000)] = Field(
        default_factory=lambda: [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]
    )  # each is scaled by batch / 256
    batch: Count = 512  # of all processes: 128 on each of the paper's 4 GPUs
    steps: Count = 12_500  # 10 epochs of 1,250 steps in DINOv3's eval/linear.py
    scale: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = Field(
        default_factory=lambda: [0.08, 1.0], description="two shares of the area, or null for whole images"
    )
    flip: Fraction = 0.5
    crop_ratio: Share = CROP_RATIO  # of the shorter side, when evaluating
    seed: Seed = 0

    @combination("scale")
    def _from_small_to_large(self) -> str | None:
        return "must go from the smaller share to the larger" if self.scale and self.scale[0] > self.scale[1] else None


class KnnProtocol(Protocol):
    """A vote of the nearest training images by cosine similarity of the class token, after the final norm."""

    neighbours: Annotated[list[Count], Field(min_length=1, max_length=100)] = Field(
        default_factory=lambda: [10, 20, 100, 200]
    )
    temperature: Positive = 0.07
    crop_ratio: Share = CROP_RATIO


class Ade20kProtocol(Protocol):
    """Batch norm and a 1 x 1 convolution on the patch tokens of the last block, after the final norm."""

    data: Text = "hub:zhoubolei/scene_parse_150"  # or a folder: the official layout, or parquet files
    window: Size = 512  # pixels; the nearest multiple of the patch is taken
    batch: Count = 16  # of all processes
    steps: Count = 40_000
    lr: Positive = 1e-3
    weight_decay: NonNegative = 1e-3
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    scale: Annotated[list[Positive], Field(min_length=2, max_length=2)] = Field(default_factory=lambda: [0.5, 2.0])
    validate_every: Count = 5_000  # the best of these validations and the last is the result
    seed: Seed = 0

    @combination("scale")
    def _from_small_to_large(self) -> str | None:
        return "must go from the smaller to the larger" if self.scale[0] > self.scale[1] else None


class Sampling(Protocol):
    """Answers under the paper's protocol: nanochat's pass@k, and the length of its evaluations."""

    samples: Count = 10
    temperature: NonNegative = 1.0
    top_k: Count = 50
    max_tokens: Count = 512


class Settings(Section):
    linear: LinearProtocol = LinearProtocol()
    knn: KnnProtocol = KnnProtocol()
    ade20k: Ade20kProtocol = Ade20kProtocol()
    sampling: Sampling = Sampling()


def read_settings(overrides: Sequence[str], sections: Sequence[str]) -> Settings:
    """Apply overrides such as `linear.steps=100` to the default settings; report all problems at once.

    `sections`: the sections of the tasks.
    """
    for text in overrides:
        section = text.partition("=")[0].partition(".")[0].strip()
        if section in Settings.model_fields and section not in sections:
            raise UsageError(f"--set {text[:60]}: none of the tasks has the settings section {section}; leave it out")
    document, problems = apply_overrides(Document({}, {(): "--set"}), overrides)
    settings, wrong = check_recipe(Settings, document)
    if settings is None or problems:
        raise RecipeError("--set", problems + wrong)
    return settings
