"""The head plan: the operator of each head in each layer.

A recipe's `model.laplacian_heads` is one of

    5                              five in every layer (the paper's form)
    [0, 0, 3, 3]                   one number per layer
    linear(0, 10)                  from 0 in the first layer to 10 in the last, rounded to whole heads
    {layers: 6-11, heads: 12}      twelve in layers 6 to 11 (counted from 0), none elsewhere

and short for `model.operators: {laplacian: 5}`, which names any operators of `lapcli/heads/operators`:

    {laplacian: 3, exclusive: 2}                            three and two in every layer, the rest is attention
    {mix: {heads: all, alpha: 0.0, learn: [alpha]}}         with its constants
    {centered: "linear(0, 4)", exclusive: {layers: 6-11, heads: 2}}   the comma needs the quotes within braces
    [{}, {laplacian: 4}, {laplacian: 2, gate: 2}]           one mapping per layer

The *last* heads of a layer are claimed first: `{laplacian: 3, exclusive: 2}` makes the last three Laplacian and the two
before them exclusive. This module does not import torch, so that a recipe is checked without delay.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lapcli.heads.operators import OPERATORS, Operator, build_operator
from lapcli.runtime.errors import UsageError

HeadSpec = int | str | Mapping[str, Any] | Sequence[int] | Sequence[Mapping[str, Any]]

_LINEAR = re.compile(r"linear\(\s*(\d{1,6})\s*,\s*(\d{1,6})\s*\)")
_RANGE = re.compile(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?")


class HeadClaim(NamedTuple):
    """An operator and its number of heads in a layer."""

    operator: Operator
    heads: int


LayerClaims = tuple[HeadClaim, ...]  # the first claim takes the last heads


@dataclass(frozen=True)
class HeadPlan:
    """The operators that claim heads in each layer, out of `heads`; unclaimed heads are plain attention."""

    layers: tuple[LayerClaims, ...]
    heads: int

    @property
    def per_layer(self) -> tuple[int, ...]:
        """The number of Laplacian heads of each layer."""
        return tuple(sum(n for operator, n in claims if operator.name == "laplacian") for claims in self.layers)

    @property
    def total(self) -> int:
        return sum(self.per_layer)

    @property
    def is_laplacian(self) -> bool:
        """Whether every head is Laplacian or plain attention, as with `laplacian_heads`."""
        return all(len(claims) <= 1 and all(op.name == "laplacian" for op, _ in claims) for claims in self.layers)

    @property
    def is_plain(self) -> bool:
        """Whether every head is plain attention."""
        return not any(self.layers)

    def counts(self) -> dict[str, int]:
        """Count the heads of each operator over all layers, without plain attention."""
        counts: dict[str, int] = {}
        for claim in (claim for layer in self.layers for claim in layer):
            counts[claim.operator.name] = counts.get(claim.operator.name, 0) + claim.heads
        return counts

    def letters(self, layer: int) -> str:
        """Return a letter for each head of a layer: `A` attention, `L` Laplacian, others by their operator."""
        claimed = "".join(claim.operator.letter * claim.heads for claim in reversed(self.layers[layer]))
        return claimed.rjust(self.heads, "A")

    def operator_names(self, layer: int) -> list[str]:
        """Return the name of the operator of each head of a layer."""
        names = [claim.operator.name for claim in reversed(self.layers[layer]) for _ in range(claim.heads)]
        return ["attention"] * (self.heads - len(names)) + names

    def grid(self) -> str:
        """Format the plan with a row per layer and a letter per head; equal neighbours share a row."""
        return "\n".join(f"{name:<14}" + " ".join(self.letters(layer)) for name, layer in self._stretches())

    def _stretches(self) -> Iterator[tuple[str, int]]:
        """Yield `layers 2-5` and the last layer for each stretch of equal layers."""
        first, layers = 0, self.layers
        for layer, claims in enumerate(layers):
            if layer + 1 < len(layers) and layers[layer + 1] == claims:
                continue
            yield f"layer {first}" if first == layer else f"layers {first}-{layer}", layer
            first = layer + 1

    def label(self) -> str:
        """Return `3` for a plan of Laplacian heads only; else the operators with heads and non-default constants.

        Different plans have different labels. If layers differ, the layers with operators are named.
        """
        if self.is_laplacian:
            return str(self)
        by_layer = {name: ", ".join(map(_claim_label, self.layers[layer])) for name, layer in self._stretches()}
        if len(by_layer) == 1:
            return next(iter(by_layer.values()))
        return "; ".join(f"{name}: {claims}" for name, claims in by_layer.items() if claims)

    def recipe_keys(self) -> dict[str, Any]:
        """Return the keys of a recipe's model section that give this plan."""
        if self.is_laplacian:
            return {"laplacian_heads": list(self.per_layer), "operators": None}
        return {"laplacian_heads": 0, "operators": [_layer_spec(claims) for claims in self.layers]}

    def __str__(self) -> str:
        """Return the shortest form that a recipe accepts, which is stored in the weights' metadata.

        `5` or `[0, 0, 3, 3]` for Laplacian heads only; else operators with all constants as JSON.
        """
        if self.is_laplacian:
            return str(self.per_layer[0]) if len(set(self.per_layer)) == 1 else str(list(self.per_layer))
        specs = [_layer_spec(claims) for claims in self.layers]
        return json.dumps(specs[0] if all(spec == specs[0] for spec in specs) else specs)


def _layer_spec(claims: LayerClaims) -> dict[str, Any]:
    return {
        operator.name: {"heads": heads, **constants} if (constants := operator.constants()) else heads
        for operator, heads in claims
    }


def _claim_label(claim: HeadClaim) -> str:
    constants, defaults = claim.operator.constants(), type(claim.operator)().constants()
    words = [
        f"{key} {'+'.join(value) or 'nothing'}" if isinstance(value, list) else f"{key} {value}"
        for key, value in constants.items()
        if value != defaults[key]
    ]
    return f"{claim.heads} {claim.operator.name}" + (f" ({', '.join(words)})" if words else "")


def plan_of_layers(layers: Iterable[Sequence[HeadClaim]], heads: int) -> HeadPlan:
    """Build the plan of each layer's claims, without those of 0 heads."""
    return HeadPlan(tuple(tuple(claim for claim in claims if claim.heads) for claims in layers), heads)


def head_plan(spec: HeadSpec, layers: int, heads: int) -> HeadPlan:
    """Parse any form of `operators` or `laplacian_heads`; ValueError says what is expected.

    A mapping names operators unless it is a layer range, {layers:, heads:}.
    """
    claimed: list[list[HeadClaim]]
    if isinstance(spec, list | tuple) and any(isinstance(layer, Mapping) for layer in spec):
        if len(spec) != layers or not all(isinstance(layer, Mapping) for layer in spec):
            raise ValueError(f"a list needs one mapping for each of the {layers} layers, got {len(spec)} items")
        for number, layer in enumerate(spec):
            for name, value in layer.items():
                options = value if isinstance(value, Mapping) else {"heads": value}
                count = options.get("heads")
                if "layers" in options or not (isinstance(count, int) or count == "all"):
                    raise ValueError(f"{name} of layer {number}: expected a number or all, got {repr(value)[:60]}")
        claimed = [_claims(layer, [number], heads)[0] for number, layer in enumerate(spec)]
    else:
        is_mapping = isinstance(spec, Mapping) and set(spec) != {"layers", "heads"}
        claimed = _claims(spec if is_mapping else {"laplacian": spec}, range(layers), heads)  # type: ignore[arg-type]
    for layer, claims in enumerate(claimed):
        if sum(claim.heads for claim in claims) > heads:
            words = " and ".join(f"{claim.operator.name} {claim.heads}" for claim in claims if claim.heads)
            raise ValueError(f"layer {layer} has {heads} heads, too few for {words}")
    return plan_of_layers(claimed, heads)


def _claims(spec: Mapping[str, Any], layers: Sequence[int], heads: int) -> list[list[HeadClaim]]:
    """Return the claims of each layer, from a mapping of operators."""
    claimed: list[list[HeadClaim]] = [[] for _ in layers]
    for name, value in spec.items():
        if name not in OPERATORS:
            try:  # for the registry's message with the nearest name
                OPERATORS[str(name)]
            except UsageError as error:
                raise ValueError(str(error)) from None
        options = dict(value) if isinstance(value, Mapping) else {"heads": value}
        if "heads" not in options:
            raise ValueError(f"{name} needs a number of heads, such as {{{name}: {{heads: 2}}}}")
        try:
            counts = _counts(options.pop("heads"), len(layers), heads)
            if "layers" in options:
                chosen = _chosen_layers(options.pop("layers"), len(layers))
                counts = [k if layer in chosen else 0 for layer, k in enumerate(counts)]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        operator = build_operator(name, options)
        for layer, k, claims in zip(layers, counts, claimed, strict=True):
            if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= heads:
                shown = "Laplacian" if name == "laplacian" else name
                raise ValueError(f"layer {layer} has {heads} heads, so 0 to {heads} can be {shown}, got {repr(k)[:60]}")
            claims.append(HeadClaim(operator, k))
    return claimed


def _counts(value: Any, layers: int, heads: int) -> list[Any]:
    if value == "all":
        return [heads] * layers
    if isinstance(value, str):
        return _linear(value, layers)
    if isinstance(value, list | tuple):
        if len(value) != layers:
            raise ValueError(f"a list needs one number for each of the {layers} layers, got {len(value)}")
        return list(value)
    return [value] * layers


def _linear(spec: str, layers: int) -> list[int]:
    match = _LINEAR.fullmatch(spec.strip())
    if match is None and re.fullmatch(r"linear\(\s*\d+", spec.strip()):  # YAML splits {mix: linear(0, 4)} at its comma
        raise ValueError('within braces write it in quotes, "linear(a, b)"')
    if match is None:
        raise ValueError(f"expected a number, a list, `linear(a, b)` or {{layers:, heads:}}, got {repr(spec)[:60]}")
    start, end = int(match[1]), int(match[2])
    if layers == 1:
        return [start]
    # Halves round up; Python's round would go to the even neighbour, with uneven steps over the layers.
    return [(2 * (start * (layers - 1 - i) + end * i) + layers - 1) // (2 * (layers - 1)) for i in range(layers)]


def _chosen_layers(value: Any, layers: int) -> range:
    """Parse `6-11` or `3`."""
    match = _RANGE.fullmatch(str(value).strip())
    if not match:
        raise ValueError(f"layers: expected a number or a range such as 6-11, got {str(value)[:60]!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < layers:
        raise ValueError(f"layers: {str(value).strip()} is not within the {layers} layers 0 to {layers - 1}")
    return range(first, last + 1)
