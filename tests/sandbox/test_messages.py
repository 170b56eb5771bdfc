"""Plain values cross unchanged, subclasses as their base types, and forged values not at all."""

import collections
import datetime
import enum
import json
import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.sandbox.inside.messages import NotAValue, pack, unpack

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False) | st.fractions() | st.dates() | st.datetimes()
    | st.times() | st.timedeltas()
)  # fmt: skip
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4), max_leaves=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4).map(collections.OrderedDict)
        | st.dictionaries(HASHABLE, inner, max_size=4).map(lambda pairs: collections.defaultdict(list, pairs))
        | st.lists(HASHABLE, max_size=4).map(collections.Counter)
        | st.lists(inner, max_size=4).map(lambda items: collections.deque(items, 5))
    ),
    max_leaves=12,
)


def crossed(value):
    return unpack(json.loads(json.dumps(pack(value))))


def same(one, other) -> bool:
    """Equal, and of the same types all the way down (1, 1.0 and True are equal in Python)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple, collections.deque)):
        lengths = [getattr(value, "maxlen", None) for value in (one, other)]
        return lengths[0] == lengths[1] and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        defaults = [getattr(value, "default_factory", None) for value in (one, other)]
        alike = defaults[0] is defaults[1] and list(one) == list(other)
        return alike and all(map(same, one.values(), other.values()))
    return one == other and (not isinstance(one, Decimal) or str(one) == str(other))


@settings(max_examples=50)
@given(VALUES)
def test_plain_values_round_trip(value):
    assert same(crossed(value), value)


def test_values_that_json_cannot_express():
    assert math.isnan(crossed(math.nan))
    assert crossed([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert str(crossed(-0.0)) == "-0.0"
    assert crossed(3**20_000) == 3**20_000  # beyond Python's limit on digits
    assert crossed(-(3**20_000)) == -(3**20_000)
    assert crossed("\ud800 \x00") == "\ud800 \x00"
    assert crossed(range(3, 30, 4)) == range(3, 30, 4)
    assert list(crossed(n * n for n in range(4))) == [0, 1, 4, 9]


def test_subclasses_arrive_as_their_base_types():
    """Their methods do not cross: overridden equality and printing have no effect."""

    def liar(kind, **more):
        names = {"__eq__": lambda self, other: True, "__hash__": lambda self: 0, "__str__": lambda self: "7", **more}
        return type("Liar", (kind,), names)

    class Colour(enum.IntEnum):
        RED = 1

    pair = collections.namedtuple("pair", "x y")
    for value, plain in [
        (liar(list)([1, 2]), [1, 2]),
        (liar(int, __int__=lambda self: 7)(3), 3),
        (liar(str)("a"), "a"),
        (Colour.RED, 1),
        (liar(Decimal)("1.50"), Decimal("1.50")),
        (liar(Fraction, numerator=7, denominator=1)(1, 3), Fraction(1, 3)),
        (liar(collections.deque, maxlen=9)([1, 2], 3), collections.deque([1, 2], 3)),
        (liar(collections.OrderedDict, items=lambda self: [])(a=1), collections.OrderedDict(a=1)),
        (liar(collections.Counter)("aab"), collections.Counter("aab")),
        (liar(collections.defaultdict, default_factory=str)(int, a=1), collections.defaultdict(int, a=1)),
        (liar(datetime.date, isoformat=lambda self: "1970-01-01")(2024, 2, 29), datetime.date(2024, 2, 29)),
        (liar(datetime.timedelta, days=0)(1, 2, 3), datetime.timedelta(1, 2, 3)),
        (liar(complex)(1, 2), 1 + 2j),
    ]:
        assert same(crossed(value), plain)
    assert crossed(liar(pair)(1, 2)) == (1, 2)
    assert crossed(liar(pair)(1, 2)) != (1, 3)


def test_other_objects_equal_nothing_and_keep_their_truth_value():
    class Anything:
        def __init__(self, truth):
            self.truth = truth

        def __eq__(self, other):
            return True

        def __bool__(self):
            if self.truth is None:
                raise ValueError("no truth")
            return self.truth

        __hash__ = None

    arrived = crossed(Anything(True))
    assert arrived != 1
    assert arrived != Anything.__name__
    assert arrived != crossed(Anything(True))
    assert arrived
    assert not crossed(Anything(False))
    assert not crossed(collections.UserList())
    with pytest.raises(TypeError):
        bool(crossed(Anything(None)))


@pytest.mark.parametrize(
    "packed",
    [
        [],
        ["list", "text"],
        ["object", []],
        ["__import__", "os"],
        ["dict", {"a": 1}],
        ["Decimal", 5],
        ["defaultdict", [5, []]],
        ["opaque", [5, True]],
        ["namedtuple", ["point", ["__eq__"], [1]]],
        ["namedtuple", ["point", ["x=print(1)"], [1]]],
    ],
)
def test_malformed_values_are_refused(packed):
    with pytest.raises(NotAValue):
        unpack(packed)
