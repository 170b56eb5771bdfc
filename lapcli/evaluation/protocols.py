"""How frozen features are measured: the settings of `linear`, `knn` and `ade20k`, each of which `--set` can change.

The paper names the measurements and gives no settings; the defaults are those of the DINOv3 evaluation scripts. What
was used is written into every result, together with what differs from the defaults.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field

from lapcli.recipe.checking import check_recipe
from lapcli.recipe.loading import apply_overrides
from lapcli.recipe.reading import Node, RecipeError, plain
from lapcli.recipe.resolved import differing_keys
from lapcli.recipe.section import Count, Fraction, NonNegative, Positive, Section, Size, Text, Whole, combination

#: Short side to 256, then the centre of 224, for images of 224 pixels; the same share for others.
CROP_RATIO = 224 / 256
#: The share of the training images that `--holdout` keeps for choosing the learning rate.
HOLDOUT = 0.1

PLACES = {"data", "revision", "image_column", "label_column"}
Seed = Annotated[Whole, Field(ge=0, lt=2**62)]
Share = Annotated[float, Field(gt=0, le=1)]


class LinearProtocol(Section):
    """A linear classifier on class token and mean patch of the last block, after the final norm."""

    rates: Annotated[list[Positive], Field(min_length=1, max_length=1000)] = Field(
        default_factory=lambda: [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1]
    )  # each is scaled by batch / 256
    batch: Count = 512  # of all processes: 128 on each of the paper's 4 GPUs
    steps: Count = 12_500
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    scale: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = Field(
        default_factory=lambda: [0.08, 1.0], description="two shares of the area, or null for whole images"
    )
    flip: Fraction = 0.5
    crop_ratio: Share = CROP_RATIO  # of the shorter side, when evaluating
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the training images, to choose the rate on; 0: validation
    seed: Seed = 0

    @combination("scale")
    def _from_small_to_large(self) -> str | None:
        return "goes from the smaller share to the larger" if self.scale and self.scale[0] > self.scale[1] else None


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
        return "goes from the smaller to the larger" if self.scale[0] > self.scale[1] else None


P = TypeVar("P", LinearProtocol, Ade20kProtocol)


class Protocols(Section):
    linear: LinearProtocol = LinearProtocol()
    knn: KnnProtocol = KnnProtocol()
    ade20k: Ade20kProtocol = Ade20kProtocol()


def read_protocols(overrides: Sequence[str], holdout: bool = False) -> Protocols:
    """The defaults with `--set linear.steps=100` and the like over them; all problems at once."""
    root, problems = apply_overrides(Node({}, "--set"), overrides)
    problems += check_recipe(Protocols, root)
    if problems:
        raise RecipeError("--set", problems)
    protocols = Protocols.model_validate(plain(root))
    if holdout and not protocols.linear.holdout:
        protocols = protocols.model_copy(update={"linear": protocols.linear.model_copy(update={"holdout": HOLDOUT})})
    return protocols


def within(protocol: P, examples: int, limit: int | None) -> P:
    """A batch that a `--limit` has made too large shrinks to what is left, which the result then says."""
    if limit is None or protocol.batch <= examples:
        return protocol
    return protocol.model_copy(update={"batch": examples})


def written_out(protocol: Section) -> dict[str, Any]:
    """Every setting as plain values, and under `changed` those that are not the default's: name, default, used.

    Where the data come from is no part of how they are measured.
    """
    used, default = protocol.model_dump(mode="json"), type(protocol)().model_dump(mode="json")
    changed = {
        key: {"default": old, "used": new} for key, old, new in differing_keys(default, used) if key not in PLACES
    }
    return {**used, "changed": changed}
