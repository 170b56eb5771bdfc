"""Which layers a measurement reads, and which classifier it gets."""

import pytest

from lapcli.analysis.measurement import chosen_layers
from lapcli.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("last", [11]),
        ("all", list(range(12))),
        ("3", [3]),
        ("-1", [11]),
        ("0,5,11", [0, 5, 11]),
        ("9-11,2", [2, 9, 10, 11]),
    ],
)
def test_layers_are_selected_by_name(text, expected):
    assert chosen_layers(text, "last", 12) == expected


def test_layers_spread_over_the_depth_end_with_the_last():
    assert chosen_layers(None, "spread", 12) == [1, 3, 5, 7, 9, 11]
    assert chosen_layers(None, "spread", 4) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="layers 0 to 3"):
        chosen_layers("4", "last", 4)
