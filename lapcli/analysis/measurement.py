"""The base of every analysis: a `Measurement` with name, options, needs, accumulator, table columns and figure.

Each file in `lapcli/analysis/measurements` contains one, listed in `measurements/__init__.py`. These files import torch
and matplotlib inside functions, never at the top: the checks of a command line read their declarations and must be
fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from lapcli.data.files import digest
from lapcli.measures.tokens import to_float64
from lapcli.runtime.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Capture, Site

SPREAD = 6  # at most this many layers in a figure that shows some of them

Value = float | int | None  # None: not defined for this input, such as the cosine of tokens that are all zero


@dataclass
class LayerResult:
    """One measurement of one layer of one model."""

    values: dict[str, Value] = field(default_factory=dict)
    series: dict[str, np.ndarray] = field(default_factory=dict)  # by rank or by head: one number each
    points: dict[str, np.ndarray] = field(default_factory=dict)  # of a scatter plot: N x 2 places, N classes
    words: dict[str, list[str]] = field(default_factory=dict)  # by head, one word each
    pictures: list[Any] = field(default_factory=list)  # only for the figure, not written to files


@dataclass(frozen=True)
class Settings:
    """The options of `lap analyze`: measurement, data and method."""

    checkpoint: str = "last"
    init: bool = False  # also the untrained models
    data: str | None = None  # instead of the run's own
    split: str = "validation"
    limit: int | None = None
    # Options that a measurement can take, by name.
    layer: str | None = None  # None: the measurement's `default_layers`
    classes: str | None = None
    image: Sequence[Path] = ()

    def given(self, *names: str) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(Settings(), name)}

    @property
    def variant(self) -> str:
        """A folder name that identifies non-default settings; empty for the defaults."""
        words = [f"{name}-{value}" for name, value in self.given("layer", *SUBJECT).items()]
        return "_".join(word if re.fullmatch(r"[\w.,-]{1,40}", word) else digest(word)[:8] for word in words)


OPTIONS = {"layer", "classes", "image"}  # of measurements
SUBJECT = ("checkpoint", "data", "split", "limit")


class NotApplicable(UsageError):
    """The measurement does not apply to this model and data."""


class Measurement:
    """A measurement: a subclass declares it, an instance measures one model.

    `lap analyze NAME` accepts the `Settings` listed in `options`; `definition` goes to the output. It
    applies to models that provide all of `needs` (the names in `recipe/schema.py`). Without --layer it measures
    `default_layers` (last, all or spread), of tokens before or after the model's last norm, as `norm` says. `columns`
    are the values in the table of the terminal, with their headings. `counts` are values that describe the data and not
    the model; reports leave them out.
    """

    name: ClassVar[str]
    definition: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ("layer",)
    needs: ClassVar[frozenset[str]] = frozenset()
    default_layers: ClassVar[str] = "last"
    norm: ClassVar[Literal["before", "after"]] = "before"
    columns: ClassVar[Mapping[str, str]]
    counts: ClassVar[frozenset[str]] = frozenset()
    reads_tokens: ClassVar[bool] = True  # else the weights alone, without a forward

    def __init_subclass__(cls) -> None:
        # Checked at import: an error in a plugin is found before any model runs.
        missing = [name for name in ("name", "definition", "columns") if not hasattr(cls, name)]
        if missing:
            raise TypeError(f"the measurement {cls.__qualname__} does not declare {', '.join(missing)}")

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        """Raise NotApplicable or UsageError if the model, its data or the settings do not allow the measurement."""
        self.model, self.settings = model, settings
        self.layers = chosen_layers(self.settings.layer, self.default_layers, model.anatomy.layers)

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        """Add listeners for one layer; return the function that gives its result after the capture has run."""
        raise NotImplementedError

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw the figure of all models that are compared; None if there is nothing to show."""
        raise NotImplementedError

    @classmethod
    def shown_columns(cls, values: Mapping[str, Value]) -> dict[str, str]:
        """Return the columns of the terminal's table for a result with these values; the files hold all values."""
        return {name: heading for name, heading in cls.columns.items() if name in values}

    @classmethod
    def described_settings(cls, settings: Settings) -> dict[str, Any]:
        """Return the values of the measurement's options, for the output."""
        values = {name: getattr(settings, name) for name in cls.options}
        values |= {"layer": settings.layer or cls.default_layers}
        values |= {name: [str(item) for item in value] for name, value in values.items() if isinstance(value, tuple)}
        return {**values, "norm": cls.norm, **settings.given(*SUBJECT)}

    def site(self, layer: int) -> Site:
        """Return the output of a block."""
        from lapcli.measures.capture import Site

        return Site(layer, "output", norm=self.norm)

    def classifier_CD(self) -> np.ndarray:
        """Return the weights of the model's classifier, one row for each class of the data."""
        head = self.model.anatomy.classifier
        classes = len(self.model.examples.classes)
        if head is None or head.out_features != classes:
            has = "no classifier" if head is None else f"a classifier of {head.out_features:,} classes"
            raise NotApplicable(f"{self.name}: the model has {has} and the data {classes:,} classes; see --data")
        # Only the class counts were compared: row c is assumed to be class c of the data.
        return to_float64(head.weight).cpu().numpy()


def chosen_layers(text: str | None, default: str, layers: int) -> list[int]:
    """Parse `last`, `all`, `3`, `0,5,11` or `6-11`; counted from 0, negative from the end."""
    wanted = text or default
    if wanted == "all":
        return list(range(layers))
    if wanted == "last":
        return [layers - 1]
    if wanted == "spread":  # evenly, the last included
        step = max(1, -(-layers // SPREAD))
        return list(range(layers - 1, -1, -step))[::-1]
    chosen: set[int] = set()
    for part in wanted.split(","):
        first, dash, last = part.strip().rpartition("-")
        try:
            # No digits before the dash: it is the sign of a negative number.
            ends = (int(first), int(last)) if dash and first else (int(part), int(part))
        except ValueError:
            raise UsageError(f"--layer {wanted[:40]!r}: expected last, all, a number, 0,5,11 or 6-11") from None
        low, high = (end + layers if end < 0 else end for end in ends)
        if not 0 <= low <= high < layers:
            raise UsageError(f"--layer {part.strip()}: the model has layers 0 to {layers - 1}")
        chosen.update(range(low, high + 1))
    return sorted(chosen)
