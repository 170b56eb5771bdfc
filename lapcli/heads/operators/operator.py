"""The interface of head operators: a head's output as a function of its values `v` and of attention's, `o = P v`.

To add one, write a frozen dataclass that subclasses `Operator`: its fields are the constants that a recipe may set,
numbers with a default, words of `choices`, and the names in `learn`.
Name it in `OPERATORS`, or add it from another package with `extensions.add("operator", ...)`. These files import torch
only for type checkers, because recipes are checked before torch is imported.

An operator is an epilogue of SDPA and never sees `P`. With a cache it sees the current tokens, and the mean is that of
all cached values, so no operator has state of its own between tokens.

Shapes: B batch, H the operator's own heads, T query tokens, S key tokens, D head size, C width of the layer.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from lapcli.runtime.plugins import Registry

if TYPE_CHECKING:
    from torch import Tensor

MEAN, FIRST_VALUES, INPUT = "the mean of the visible values", "the first layer's values", "the layer's input"
LARGEST = 1e3  # of a constant; catches a typo with too many zeros


@dataclass(frozen=True)
class Learnt:
    """A parameter of an operator: it starts at `start`, or is drawn with `deviation` after all other weights."""

    shape: tuple[int, ...]
    start: float = 0.0
    deviation: float = 0.0


@dataclass(frozen=True)
class HeadState:
    """Further inputs of an operator besides `v` and `o`; those that it does not declare in `needs` are None."""

    parameters: Mapping[str, Tensor]
    mean_BHTD: Tensor | None = None
    first_v_BHTD: Tensor | None = None  # None in the first layer, whose values are `v` itself
    x_BTC: Tensor | None = None


@dataclass(frozen=True)
class Dense:
    """The inputs with all matrices written out, from which `Operator.dense` defines the operator for tests.

    `I_TS` has its ones at the query tokens' places among the keys, `U_BHTS` is 1 / n over the n visible keys.
    """

    P_BHTS: Tensor
    I_TS: Tensor
    U_BHTS: Tensor
    v_BHSD: Tensor
    first_v_BHSD: Tensor  # in the first layer `v_BHSD`
    x_BTC: Tensor
    parameters: Mapping[str, Tensor]


@dataclass(frozen=True)
class Operator:
    """A head operator with its constants."""

    name: ClassVar[str]
    letter: ClassVar[str]  # in the printed grid of heads
    needs: ClassVar[frozenset[str]] = frozenset()
    learnable: ClassVar[tuple[str, ...]] = ()  # constants that a recipe may name in `learn`: then one per head
    rows_sum_to_zero: ClassVar[bool] = False  # what is constant over the tokens vanishes, such as a bias of the values
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # allowed values of constants that are words

    def __init_subclass__(cls) -> None:
        # When the file is imported: a plugin's mistake is found before a recipe names the operator.
        base: Any = Operator
        missing = [name for name in ("name", "letter") if not hasattr(cls, name)]
        missing += [name for name in ("apply", "flops") if getattr(cls, name) is getattr(base, name)]
        if missing:
            raise TypeError(f"the operator {cls.__qualname__} does not declare {', '.join(missing)}")
        problem = None if len(cls.letter) == 1 else f"letter {cls.letter!r} is not one character"
        for name, annotation in inspect.get_annotations(cls).items():
            if "ClassVar" in str(annotation):
                continue
            value = getattr(cls, name, None)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None:
                problem = f"constant {name} has no default"
            elif name in ("heads", "layers"):
                problem = f"constant {name} would hide the key of recipes; give it another name"
            elif not is_number and name != "learn" and value not in cls.choices.get(name, ()):
                problem = f"constant {name} is neither a number nor a word of its `choices`"
        if problem:
            raise TypeError(f"the operator {cls.__qualname__}: {problem}")

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        raise NotImplementedError

    def dense(self, dense: Dense) -> Tensor:
        """Compute the definition with the T x S matrices."""
        raise NotImplementedError

    def flops(self, head_size: int, width: int) -> int:
        """Return the FLOPs per token and head in the forward, beyond those of plain attention."""
        raise NotImplementedError

    def parameters(self, heads: int, head_size: int, width: int) -> dict[str, Learnt]:
        return {name: Learnt((heads,), start=getattr(self, name)) for name in getattr(self, "learn", ())}

    def value(self, name: str, parameters: Mapping[str, Tensor]) -> Any:
        """Return a constant, or its learnt values, one per head, shaped to broadcast over T and D."""
        learnt = parameters.get(name)
        return getattr(self, name) if learnt is None else learnt[:, None, None]

    @property
    def adds_parameters(self) -> bool:
        return bool(self.parameters(1, 1, 1))

    def constants(self) -> dict[str, Any]:
        """Return all constants in the form of a recipe, for the metadata of the weights."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def build_operator(name: str, constants: Mapping[str, Any]) -> Operator:
    """Build the operator of that name; ValueError if a constant is unknown or out of range."""
    kind = OPERATORS[name]
    known = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in constants.items():
        if key not in known:
            near = get_close_matches(str(key), ["heads", "layers", *known], 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(['heads', 'layers', *known])}"
            raise ValueError(f"{name} has no constant {str(key)[:40]!r}; {hint}")
        values[key] = _checked(kind, key, value)
    return kind(**values)


def _checked(kind: type[Operator], key: str, value: Any) -> Any:
    got = f"got {repr(value)[:60]}"
    if key == "learn":
        names = value if isinstance(value, list | tuple) else [value]
        if any(name not in kind.learnable for name in names) or len(set(names)) != len(names):
            raise ValueError(f"{kind.name} learns any of {', '.join(kind.learnable)}, {got}")
        return tuple(names)
    if key in kind.choices:
        if value not in kind.choices[key]:
            raise ValueError(f"{key} of {kind.name} is {' or '.join(kind.choices[key])}, {got}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} of {kind.name} is a number, {got}")
    if abs(value) > LARGEST:
        raise ValueError(f"{key} of {kind.name} is between -{LARGEST:g} and {LARGEST:g}, {got}")
    return float(value)


_HERE = "lapcli.heads.operators"
OPERATORS: Registry[type[Operator]] = Registry(
    "operator",
    {
        "attention": f"{_HERE}.identity_mixing:Attention",
        "laplacian": f"{_HERE}.laplacian:Laplacian",
        "mix": f"{_HERE}.identity_mixing:Mix",
        "value-only": f"{_HERE}.identity_mixing:ValueOnly",
        "centered": f"{_HERE}.centered:Centered",
        "attnscale": f"{_HERE}.attnscale:AttnScale",
        "shaped": f"{_HERE}.shaped:Shaped",
        "neutreno": f"{_HERE}.neutreno:NeuTRENO",
        "exclusive": f"{_HERE}.exclusive:Exclusive",
        "gate": f"{_HERE}.gate:Gate",
    },
)
