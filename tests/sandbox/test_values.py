"""Values cross as what they are, subclasses as what they are made of, and lies not at all."""

import collections
import enum
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.sandbox.inside.values import NotAValue, pack, unpack

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False)
)  # fmt: skip
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4), max_leaves=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
    max_leaves=12,
)


def crossed(value):
    return unpack(json.loads(json.dumps(pack(value))))


def same(one, other) -> bool:
    """Equal, and of the same types all the way down (1, 1.0 and True are equal in Python)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return one == other


@settings(max_examples=50)
@given(VALUES)
def test_plain_values_arrive_as_they_left(value):
    assert same(crossed(value), value)


def test_values_that_json_has_trouble_with():
    assert math.isnan(crossed(math.nan))
    assert crossed([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert str(crossed(-0.0)) == "-0.0"
    assert crossed(3**20_000) == 3**20_000  # beyond Python's limit on digits
    assert crossed(-(3**20_000)) == -(3**20_000)
    assert crossed("\ud800 \x00") == "\ud800 \x00"
    assert crossed(range(3, 30, 4)) == range(3, 30, 4)
    assert list(crossed(n * n for n in range(4))) == [0, 1, 4, 9]


def test_subclasses_arrive_as_what_they_are_made_of():
    class Always(list):
        def __eq__(self, other):
            return True

        __hash__ = None

    class Number(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

        def __int__(self):
            return 7

    class Colour(enum.IntEnum):
        RED = 1

    point = collections.namedtuple("point", "x y")
    assert crossed(collections.Counter("aab")) == {"a": 2, "b": 1}
    for value, plain in [
        (Always([1, 2]), [1, 2]),
        (Number(3), 3),
        (Colour.RED, 1),
        (point(1, 2), (1, 2)),
        (collections.OrderedDict(a=1), {"a": 1}),
    ]:
        assert same(crossed(value), plain)


def test_other_objects_equal_nothing():
    class Anything:
        def __eq__(self, other):
            return True

        __hash__ = None

    arrived = crossed(Anything())
    assert arrived != 1
    assert arrived != Anything.__name__
    assert arrived != crossed(Anything())


@pytest.mark.parametrize(
    "packed",
    [
        [],
        {},
        {"list": []},
        ["list"],
        ["list", [], []],
        ["list", "text"],
        ["tuple", 3],
        ["object", []],
        ["__import__", "os"],
        [["list", []], []],
        ["dict", [[1]]],
        ["dict", {"a": 1}],
        ["range", [1, 2]],
        ["range", ["1", 2, 3]],
        ["complex", [1.0, "2"]],
        ["bytes", 5],
        ["int", 5],
        ["iterator", None],
    ],
)
def test_what_is_no_value_is_refused(packed):
    with pytest.raises(NotAValue):
        unpack(packed)


@pytest.mark.parametrize("packed", [["set", [["list", []]]], ["dict", [[["list", []], 1]]], ["range", [1, 2, 0]]])
def test_values_that_cannot_exist_are_errors(packed):
    with pytest.raises((TypeError, ValueError)):
        unpack(packed)
