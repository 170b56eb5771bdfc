"""Which heads of which layer are Laplacian: the head plan.

A recipe's `model.laplacian_heads` is one of

    5                              five in every layer (the paper's form)
    [0, 0, 3, 3]                   one number a layer
    linear(0, 10)                  from 0 in the first layer to 10 in the last, rounded to whole heads
    {layers: 6-11, heads: 12}      twelve in layers 6 to 11 (counted from 0), none elsewhere

The *last* `k` heads of a layer are the Laplacian ones. No torch in here, so that a recipe is checked at once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HeadSpec = int | Sequence[int] | str | Mapping[str, Any]

_LINEAR = re.compile(r"linear\(\s*(\d{1,6})\s*,\s*(\d{1,6})\s*\)")
_RANGE = re.compile(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?")


@dataclass(frozen=True)
class HeadPlan:
    """The number of Laplacian heads of each layer, out of `heads`."""

    per_layer: tuple[int, ...]
    heads: int

    @property
    def total(self) -> int:
        return sum(self.per_layer)

    def grid(self) -> str:
        """A row a layer, a letter a head: `A` attention, `L` Laplacian; equal neighbours share a row."""
        rows: list[str] = []
        first = 0
        for layer, k in enumerate(self.per_layer):
            if layer + 1 < len(self.per_layer) and self.per_layer[layer + 1] == k:
                continue
            name = f"layer {first}" if first == layer else f"layers {first}-{layer}"
            rows.append(f"{name:<14}" + " ".join("A" * (self.heads - k) + "L" * k))
            first = layer + 1
        return "\n".join(rows)

    def __str__(self) -> str:
        """The shortest form that a recipe accepts: `5` or `[0, 0, 3, 3]`; what the weights' metadata carries."""
        return str(self.per_layer[0]) if len(set(self.per_layer)) == 1 else str(list(self.per_layer))


def head_plan(spec: HeadSpec, layers: int, heads: int) -> HeadPlan:
    """Reads any form of `laplacian_heads`; raises ValueError with what is expected."""
    if isinstance(spec, bool):
        raise ValueError("expected a number of heads, not true or false")
    if isinstance(spec, int):
        per_layer = [spec] * layers
    elif isinstance(spec, str):
        per_layer = _linear(spec, layers)
    elif isinstance(spec, Mapping):
        per_layer = _layer_range(spec, layers)
    elif isinstance(spec, list | tuple):
        per_layer = list(spec)
        if len(per_layer) != layers:
            raise ValueError(f"a list needs one number for each of the {layers} layers, got {len(per_layer)}")
    else:
        raise ValueError(_expected(spec))
    for layer, k in enumerate(per_layer):
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= heads:
            raise ValueError(f"layer {layer} has {heads} heads, so 0 to {heads} can be Laplacian, got {k!r}")
    return HeadPlan(tuple(per_layer), heads)


def _expected(spec: object) -> str:
    return f"expected a number, a list, `linear(a, b)` or {{layers:, heads:}}, got {repr(spec)[:60]}"


def _linear(spec: str, layers: int) -> list[int]:
    match = _LINEAR.fullmatch(spec.strip())
    if not match:
        raise ValueError(_expected(spec))
    start, end = int(match[1]), int(match[2])
    if layers == 1:
        return [start]
    # Half-way cases go up (Python's round would take them to the even neighbour, uneven over layers).
    return [(2 * (start * (layers - 1 - i) + end * i) + layers - 1) // (2 * (layers - 1)) for i in range(layers)]


def _layer_range(spec: Mapping[str, Any], layers: int) -> list[int]:
    if set(spec) != {"layers", "heads"}:
        raise ValueError(f"expected the keys layers and heads, got {sorted(map(str, spec))}")
    chosen = _chosen_layers(spec["layers"], layers)
    return [spec["heads"] if layer in chosen else 0 for layer in range(layers)]


def _chosen_layers(value: Any, layers: int) -> set[int]:
    """`6-11`, `3`, `0, 4-7` or a list of numbers."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [str(part) for part in value]
    else:
        parts = str(value).split(",")
    chosen: set[int] = set()
    for part in parts:
        match = _RANGE.fullmatch(part.strip())
        if not match:
            raise ValueError(f"layers: expected numbers or ranges such as 6-11, got {str(value)[:60]!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < layers:
            raise ValueError(f"layers: {part.strip()} is not within the {layers} layers 0 to {layers - 1}")
        chosen.update(range(first, last + 1))
    return chosen
