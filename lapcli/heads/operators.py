"""Head operators: a head's output as a function of its values `v` and attention's output `o = P v`.

To add one, write a frozen dataclass that subclasses `Operator`: its fields are the constants that a recipe may set,
numbers with a default, words of `choices`, and the names in `learn`.
Name it in `OPERATORS`, or add it from another package with `extensions.add("operator", ...)`. This file imports torch
only for type checkers, because recipes are checked before torch is imported.

An operator is an epilogue of SDPA and never sees `P`. With a cache it sees the current tokens, and the mean is that of
all cached values, so operators keep no state between tokens.

Shapes: B batch, H the operator's own heads, T query tokens, S key tokens, D head size, C width of the layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from lapcli.runtime.plugins import Registry

if TYPE_CHECKING:
    from torch import Tensor

MEAN, INPUT = "the mean of the visible values", "the layer's input"
LARGEST = 1e3  # of a constant; catches a typo with too many zeros


@dataclass(frozen=True)
class Learned:
    """A parameter of an operator: it starts at `start`, or at random with `deviation`, after all other weights."""

    shape: tuple[int, ...]
    start: float = 0.0
    deviation: float = 0.0


@dataclass(frozen=True)
class HeadState:
    """Further inputs of an operator besides `v` and `o`; inputs not declared in `needs` are None."""

    parameters: Mapping[str, Tensor]
    mean_BHTD: Tensor | None = None
    x_BTC: Tensor | None = None


@dataclass(frozen=True)
class Operator:
    """A head operator with its constants."""

    name: ClassVar[str]
    letter: ClassVar[str]  # in the printed grid of heads
    needs: ClassVar[frozenset[str]] = frozenset()
    learnable: ClassVar[tuple[str, ...]] = ()  # constants that a recipe may name in `learn`: then one per head
    rows_sum_to_zero: ClassVar[bool] = False  # what is constant over the tokens vanishes, such as a bias of the values
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # allowed values of constants that are words

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        raise NotImplementedError

    def parameters(self, heads: int, head_size: int, width: int) -> dict[str, Learned]:
        return {name: Learned((heads,), start=getattr(self, name)) for name in getattr(self, "learn", ())}

    def value(self, name: str, parameters: Mapping[str, Tensor]) -> Any:
        """Return a constant, or its learned values, one per head, shaped to broadcast over T and D."""
        learned = parameters.get(name)
        return getattr(self, name) if learned is None else learned[:, None, None]

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


@dataclass(frozen=True)
class Combination(Operator):
    """An operator `y = a v + b o + c m`, with `m` the mean of the visible values: the matrix `a I + b P + c U`.

    `U` is the uniform matrix over the visible keys: under a causal mask `m` is the cumulative mean.
    """

    def weights(self, parameters: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
        """Return a, b and c: numbers, or the learned values of each head."""
        raise NotImplementedError

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        y_BHTD: Any = None
        for weight, x_BHTD in zip(self.weights(state.parameters), (v_BHTD, o_BHTD, state.mean_BHTD), strict=True):
            if isinstance(weight, float) and weight == 0:
                continue
            # A constant of 1 is not multiplied: `mix` with `alpha: 0, beta: 1` is bitwise attention.
            term_BHTD = x_BHTD if isinstance(weight, float) and weight == 1 else weight * x_BHTD
            y_BHTD = term_BHTD if y_BHTD is None else y_BHTD + term_BHTD
        return 0 * o_BHTD if y_BHTD is None else y_BHTD


@dataclass(frozen=True)
class Laplacian(Combination):
    """The Laplacian head of the paper (equation 3): `y = (I - P) v = v - o`.

    Rows sum to zero: a constant over the tokens vanishes, and so does the first token under a causal mask. Layers that
    have only this operator use `lapcli/heads/laplacian.py`, which applies the same formula to the last heads.
    """

    name = "laplacian"
    letter = "L"
    rows_sum_to_zero = True

    def weights(self, parameters: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
        return 1.0, -1.0, 0.0


@dataclass(frozen=True)
class Mix(Combination):
    """Identity mixing, `y = alpha v + beta o`, and its two ends: attention (0, 1) and the control `value-only` (1, 0).

    The Laplacian head is (1, -1). The output projection absorbs the scale and the sign of a head, so only the ratio of
    alpha to beta matters: with a learned alpha that starts at 0 each head chooses between attention and, up to sign and
    scale, the Laplacian. A head of `value-only` sees only its own values, which shows the effect of `I` in `I - P`.
    """

    name = "mix"
    letter = "M"
    learnable = ("alpha", "beta")

    alpha: float = 0.0
    beta: float = 1.0
    learn: tuple[str, ...] = ()

    def weights(self, parameters: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
        return self.value("alpha", parameters), self.value("beta", parameters), 0.0


@dataclass(frozen=True)
class ValueOnly(Combination):
    """`y = v`: no parameters and no attention; queries and keys of such a head get no gradient."""

    name = "value-only"
    letter = "V"

    def weights(self, parameters: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
        return 1.0, 0.0, 0.0


@dataclass(frozen=True)
class Centered(Combination):
    """Centered self-attention (Ali, Galanti and Wolf, 2023, arXiv 2306.01610): `y = (P - U) v = o - m`.

    Rows sum to zero as those of `I - P` do, but the token's own value has no special weight: the closest relative of
    the Laplacian without parameters, and a control for it.
    """

    name = "centered"
    letter = "C"
    rows_sum_to_zero = True
    needs = frozenset({MEAN})

    def weights(self, parameters: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
        return 0.0, 1.0, -1.0


@dataclass(frozen=True)
class AttnScale(Combination):
    """AttnScale (Wang et al., 2022, arXiv 2203.05962): `y = (U + (1 + s)(P - U)) v = o + s (o - m)`.

    It amplifies the deviation of attention from the mean `m` of the visible values. `strength` s is learned for each
    head and starts at 0, which is plain attention. Under a causal mask `U` is uniform over the tokens so far, our own
    extension.
    """

    name = "attnscale"
    letter = "S"
    needs = frozenset({MEAN})
    learnable = ("strength",)

    strength: float = 0.0
    learn: tuple[str, ...] = ("strength",)

    def weights(self, parameters: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
        strength = self.value("strength", parameters)
        return 0.0, 1 + strength, -strength


@dataclass(frozen=True)
class Shaped(Combination):
    """Shaped attention (Noci et al., 2023, arXiv 2306.17759), as He and Hofmann (2023, arXiv 2311.01906) use it.

        y = (alpha I + beta P - gamma U) v = alpha v + beta o - gamma m

    All three are learned for each head and start at 1: with small logits P is near U, and the head starts near the
    identity. In those papers it replaces the skip connection; here it is a head of an ordinary block.
    """

    name = "shaped"
    letter = "H"
    needs = frozenset({MEAN})
    learnable = ("alpha", "beta", "gamma")

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    learn: tuple[str, ...] = ("alpha", "beta", "gamma")

    def weights(self, parameters: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
        alpha, beta, gamma = (self.value(name, parameters) for name in self.learnable)
        return alpha, beta, -gamma


SMALLEST = 1e-8  # of |v|^2, as modded-nanogpt


@dataclass(frozen=True)
class Exclusive(Operator):
    """Exclusive self-attention (2026, arXiv 2603.09078): `y = o - (o . v / |v|^2) v`.

    The component of the output along the token's own value is removed; under a causal mask the first token's output is
    0. With `gate: tanh` a head learns how much of it to remove, `y = o - tanh(a) (o . v / |v|^2) v`, starting at a = 0,
    which is plain attention (modded-nanogpt's form). The projection is not linear in `v`; |v|^2 is clamped to 1e-8 or
    more.
    """

    name = "exclusive"
    letter = "X"
    choices = {"gate": ("none", "tanh")}  # noqa: RUF012

    gate: str = "none"

    def parameters(self, heads: int, head_size: int, width: int) -> dict[str, Learned]:
        return {"gate": Learned((heads,))} if self.gate == "tanh" else {}

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        length_BHT1 = v_BHTD.square().sum(-1, keepdim=True).clamp(min=SMALLEST)
        along_BHT1 = (o_BHTD * v_BHTD).sum(-1, keepdim=True) / length_BHT1
        if self.gate == "tanh":
            along_BHT1 = along_BHT1 * state.parameters["gate"].tanh()[:, None, None]
        return o_BHTD - along_BHT1 * v_BHTD


@dataclass(frozen=True)
class Gate(Operator):
    """Gated attention (Qiu et al., 2025, arXiv 2505.06708): `y = o * sigmoid(x W)`, x the layer's normed input.

    `form: headwise` has one gate for each head and token (W is C x H), `elementwise` one for each channel of a head as
    well (C x H D). W has no bias and is initialised with a deviation of 0.02, so that gates start near 0.5, not
    at plain attention.
    """

    name = "gate"
    letter = "G"
    needs = frozenset({INPUT})
    choices = {"form": ("headwise", "elementwise")}  # noqa: RUF012

    form: str = "headwise"

    def parameters(self, heads: int, head_size: int, width: int) -> dict[str, Learned]:
        outputs = heads * (head_size if self.form == "elementwise" else 1)
        return {"weight": Learned((outputs, width), deviation=0.02)}

    def apply(self, v_BHTD: Tensor, o_BHTD: Tensor, state: HeadState) -> Tensor:
        assert state.x_BTC is not None
        weight_IC = state.parameters["weight"].to(state.x_BTC.dtype)
        gates_BTI = (state.x_BTC @ weight_IC.mT).sigmoid()  # I: H gates, or H x D
        return o_BHTD * gates_BTI.unflatten(-1, (o_BHTD.shape[1], -1)).transpose(1, 2)


OPERATORS: Registry[type[Operator]] = Registry(
    "operator",
    {
        kind.name: f"{__name__}:{kind.__name__}"
        for kind in (Laplacian, Mix, ValueOnly, Centered, AttnScale, Shaped, Exclusive, Gate)
    },
)
