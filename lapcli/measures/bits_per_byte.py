"""Bits per byte."""

import math

from lapcli.runtime.errors import DataError


def bits_per_byte(nats: float, count: float, text: str) -> float:
    """Convert `nats` over `count` bytes. A text without bytes is an error: 0.0 would be the best possible result."""
    if count <= 0:
        raise DataError(f"{text} has no bytes, so that bits per byte are not defined; hold out other or more text")
    return nats / (math.log(2) * count)
