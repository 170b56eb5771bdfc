"""The base of every analysis: a `Measurement` with name, help, options, needs, accumulator, table columns and figure.

Each file in `lapcli/analysis/measurements` holds one, and nothing else has to change to add another. These files import
torch and matplotlib inside functions, never at the top: `--help` and the checks of a command line read their
declarations and must answer at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from lapcli.data.cache import digest
from lapcli.measures.tokens import to_float64
from lapcli.runtime.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Capture, Site

SPREAD = 6  # at most this many layers in a figure that shows some of them

Value = float | int | None  # None: not defined for this input; a note says why


@dataclass
class LayerResult:
    """One measurement of one layer of one model."""

    values: dict[str, Value] = field(default_factory=dict)
    series: dict[str, np.ndarray] = field(default_factory=dict)  # by rank or by head: one number each
    points: dict[str, np.ndarray] = field(default_factory=dict)  # of a scatter plot: N x 2 places, N classes
    words: dict[str, list[str]] = field(default_factory=dict)  # by head, one word each
    pictures: list[Any] = field(default_factory=list)  # only for the figure, not written to files
    notes: list[str] = field(default_factory=list)


class Accumulator(Protocol):
    """Collects what a measurement needs of one layer while the model runs."""

    def result(self) -> LayerResult: ...


class TokenAccumulator(Accumulator, Protocol):
    def update(self, tokens_BTD: Tensor) -> None: ...


@dataclass(frozen=True)
class Option:
    """An option of a measurement, from which `lap analyze` makes an option of the command line."""

    name: str  # in the settings and in the JSON output
    flag: str
    type: Any  # of one value: str, int, bool, Path, a Literal; `| None` where the default is None
    default: Any
    help: str
    metavar: str | None = None
    minimum: int | None = None
    is_repeatable: bool = False  # its value is a tuple
    is_condition: bool = True  # reports do not compare numbers that were measured with different values of it


LAYER = Option(
    "layer", "--layer", str | None, None, "last, all, 3, 0,5,11 or 6-11; from 0, -1 is the last.", is_condition=False
)
TOKENS = Option("tokens", "--tokens", Literal["all", "patch", "class"], "all", "Which tokens of an image.")
NORM = Option("norm", "--norm", Literal["before", "after"] | None, None, "Before or after the model's last norm.")
CLASSES = Option(
    "classes",
    "--classes",
    str | None,
    None,
    "Names or numbers of classes to show.",
    metavar="A,B,C",
    is_condition=False,
)


@dataclass(frozen=True)
class Settings:
    """The values of options; an option without a value has its default."""

    values: Mapping[Option, Any] = field(default_factory=dict)
    seed: int = 0
    subject: Mapping[str, Any] = field(default_factory=dict)  # checkpoint, data, split and limit, unless the default

    @property
    def variant(self) -> str:
        """A folder name that tells results of other settings apart; empty for the default ones."""
        changed = {o.name: v for o, v in self.values.items() if v != o.default and (o.is_condition or o is LAYER)}
        words = [f"{name}-{value}" for name, value in {**changed, **self.subject}.items()]
        plain = [word if re.fullmatch(r"[\w.,-]{1,40}", word) else digest(word)[:8] for word in words]
        return "_".join(plain)

    def __getitem__(self, option: Option) -> Any:
        return self.values.get(option, option.default)

    def only(self, options: Sequence[Option]) -> Settings:
        return Settings({option: self[option] for option in options}, self.seed, self.subject)


class NotApplicable(UsageError):
    """A measurement that is not possible for this model on this data."""


class Measurement:
    """A measurement: a subclass declares it, an instance measures one model.

    `lap analyze NAME` shows `help` and takes `options`; `definition` goes to the output. The measurement is for models
    that give all of `needs` (the names in `recipe/schema.py`). Without --layer it measures `default_layers` (last,
    all or spread); without --norm it takes tokens before or after the model's last norm, as `default_norm` says.
    `columns` are the values in the table of the terminal, with their headings. `counts` are values that describe the
    data and not the model; reports leave them out. `order` is its place in lists.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    definition: ClassVar[str]
    options: ClassVar[tuple[Option, ...]] = (LAYER, TOKENS, NORM)
    needs: ClassVar[frozenset[str]] = frozenset()
    default_layers: ClassVar[str] = "last"
    default_norm: ClassVar[str] = "before"
    columns: ClassVar[Mapping[str, str]]
    counts: ClassVar[frozenset[str]] = frozenset()
    reads_tokens: ClassVar[bool] = True  # else the weights alone, without a forward
    order: ClassVar[int] = 100

    def __init_subclass__(cls) -> None:
        # When the file is imported: a plugin's mistake is found before any model has run.
        missing = [name for name in ("name", "help", "definition", "columns") if not hasattr(cls, name)]
        if missing:
            raise TypeError(f"the measurement {cls.__qualname__} does not declare {', '.join(missing)}")

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        """Raise NotApplicable or UsageError where the model, its data or the settings do not allow the measurement."""
        # `all` takes the options of all measurements; those that this one does not declare mean nothing to it.
        self.model, self.settings = model, settings.only(self.options)
        self.layers = chosen_layers(self.settings[LAYER], self.default_layers, model.anatomy.layers)
        tokens = self.settings[TOKENS]
        if tokens != "all" and model.anatomy.prefix_tokens == 0:
            raise UsageError(f"--tokens {tokens}: this model has no class token, only plain tokens; use --tokens all")
        if tokens == "class" and not model.anatomy.has_class_token:
            raise UsageError("--tokens class: this model has no class token; use --tokens all or patch")

    def listen(self, capture: Capture, layer: int) -> Accumulator:
        """Add listeners for one layer; the accumulator's `result` is called after the capture has run."""
        accumulator = self.token_accumulator()
        capture.on_tokens(self.site(layer), lambda tokens, _: accumulator.update(tokens))
        return accumulator

    def token_accumulator(self) -> TokenAccumulator:
        """Return the accumulator of one layer, if the tokens of `site` are enough; others override `listen`."""
        raise NotImplementedError

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw the figure of all models that are compared; None if there is nothing to show."""
        raise NotImplementedError

    @classmethod
    def check_options(cls, settings: Settings) -> None:
        """Raise UsageError for values that can be refused before a model is opened; must not import torch."""

    @classmethod
    def shown_columns(cls, values: Mapping[str, Value]) -> dict[str, str]:
        """Return the columns of the terminal's table for a result with these values; the files hold all values."""
        return {name: heading for name, heading in cls.columns.items() if name in values}

    @classmethod
    def described_settings(cls, settings: Settings) -> dict[str, Any]:
        """Return the values of the measurement's options, for the output."""
        values = {option.name: _plain(settings[option]) for option in cls.options}
        if "layer" in values:
            values["layer"] = values["layer"] or cls.default_layers
        if "norm" in values:
            values["norm"] = values.pop("norm") or cls.default_norm
        return {**values, "seed": settings.seed, **settings.subject}

    @property
    def norm(self) -> str:
        return self.settings[NORM] or self.default_norm

    def site(self, layer: int) -> Site:
        """Return the output of a block, as --tokens and --norm choose it."""
        from lapcli.measures.capture import Site

        return Site(layer, "output", self.settings[TOKENS], self.norm)

    def classifier_CD(self) -> np.ndarray:
        """Return the weights of the model's classifier, one row for each class of the data."""
        head = self.model.anatomy.classifier
        classes = len(self.model.examples.classes)
        if head is None or head.out_features != classes:
            has = "no classifier" if head is None else f"a classifier of {head.out_features:,} classes"
            raise NotApplicable(f"{self.name}: the model has {has} and the data {classes:,} classes; see --data")
        # Only the number of classes was compared: row c is taken to be class c of the data.
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
            # Nothing before the dash: it is the sign of a negative number.
            ends = (int(first), int(last)) if dash and first else (int(part), int(part))
        except ValueError:
            raise UsageError(f"--layer {wanted[:40]!r}: expected last, all, a number, 0,5,11 or 6-11") from None
        low, high = (end + layers if end < 0 else end for end in ends)
        if not 0 <= low <= high < layers:
            raise UsageError(f"--layer {part.strip()}: the model has layers 0 to {layers - 1}")
        chosen.update(range(low, high + 1))
    return sorted(chosen)


def _plain(value: Any) -> Any:
    return [str(item) for item in value] if isinstance(value, tuple) else value
