"""What a measurement hands back for one layer: numbers for the table, series and points for the figure, and remarks."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Value = float | int | None  # None: not defined for this input, with a note that says why


@dataclass
class Found:
    values: dict[str, Value] = field(default_factory=dict)
    series: dict[str, np.ndarray] = field(default_factory=dict)  # by rank or by head: one number each
    points: dict[str, np.ndarray] = field(default_factory=dict)  # of a picture: N x 2 places, N classes, ...
    pictures: list[Any] = field(default_factory=list)  # for the figure alone
    notes: list[str] = field(default_factory=list)


def share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
