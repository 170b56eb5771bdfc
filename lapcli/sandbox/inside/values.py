"""Python values as JSON, so that nothing but plain values ever crosses between candidate and tests.

None, bool, str, float and int are themselves; everything else is a list that starts with the name of its kind. What
arrives is built anew from built-in types, whatever the sender claims: a subclass of `list` arrives as a list, so an
`__eq__` of its own stays behind. An object of any other class arrives as something that equals nothing.

Changes that a candidate makes to its arguments do not come back, and neither does the identity of objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

TYPE_CHECKING = False  # importing `typing` would cost as much as starting Python does
if TYPE_CHECKING:
    from typing import Any

WHOLE_INTS = 8192  # bits; larger ones travel as hex, which is read in linear time and without Python's limit on digits
LONGEST_ITERATOR = 100_000


class NotAValue(Exception):
    """What arrived is no value in this form."""


class Opaque:
    """Stands for an object of a class that only the candidate knows. Equals nothing but itself."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name} of the candidate>"


def pack(value: Any) -> Any:
    """The value for `json.dumps`. Subclasses are flattened through the methods of the built-in class."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if whole.bit_length() <= WHOLE_INTS else ["int", hex(whole)]
    if isinstance(value, float):
        return float.__float__(value)
    for kind, flat in _FLAT.items():
        if isinstance(value, kind):
            return [kind.__name__, flat(value)]
    if isinstance(value, Iterator):
        items = list(itertools.islice(value, LONGEST_ITERATOR + 1))
        if len(items) <= LONGEST_ITERATOR:
            return ["iterator", [pack(item) for item in items]]
    return ["opaque", str(type(value).__name__)[:100]]


def _items(of: Callable[[Any], Iterator[Any]]) -> Callable[[Any], list[Any]]:
    return lambda value: [pack(item) for item in of(value)]


_FLAT: dict[type, Callable[[Any], Any]] = {
    list: _items(list.__iter__),
    tuple: _items(tuple.__iter__),
    set: _items(set.__iter__),
    frozenset: _items(frozenset.__iter__),
    dict: lambda value: [[pack(key), pack(item)] for key, item in dict.items(value)],
    bytes: bytes.hex,
    bytearray: bytearray.hex,
    complex: lambda value: [complex.real.__get__(value), complex.imag.__get__(value)],
    range: lambda value: [value.start, value.stop, value.step],
}


def unpack(packed: Any) -> Any:
    """The value, from what `json.loads` gave. Trusts nothing; raises `NotAValue` or what Python raises on the way."""
    if packed is None or type(packed) in {bool, str, int, float}:
        return packed
    if type(packed) is not list or len(packed) != 2 or type(packed[0]) is not str:
        raise NotAValue("not a value")
    build = _BUILD.get(packed[0])
    if build is None:
        raise NotAValue("no such kind of value")
    return build(packed[1])


def _list(packed: Any) -> list[Any]:
    if type(packed) is not list:
        raise NotAValue("not a list")
    return [unpack(item) for item in packed]


def _dict(packed: Any) -> dict[Any, Any]:
    if type(packed) is not list or not all(type(pair) is list and len(pair) == 2 for pair in packed):
        raise NotAValue("not pairs of key and value")
    return {unpack(key): unpack(value) for key, value in packed}


def _numbers(packed: Any, kinds: set[type], count: int) -> list[Any]:
    if type(packed) is not list or len(packed) != count or not all(type(item) in kinds for item in packed):
        raise NotAValue("not numbers")
    return packed


def _text(packed: Any) -> str:
    if type(packed) is not str:
        raise NotAValue("not a text")
    return packed


_BUILD: dict[str, Callable[[Any], Any]] = {
    "list": _list,
    "tuple": lambda packed: tuple(_list(packed)),
    "set": lambda packed: set(_list(packed)),
    "frozenset": lambda packed: frozenset(_list(packed)),
    "dict": _dict,
    "iterator": lambda packed: iter(_list(packed)),
    "bytes": lambda packed: bytes.fromhex(_text(packed)),
    "bytearray": lambda packed: bytearray.fromhex(_text(packed)),
    "complex": lambda packed: complex(*_numbers(packed, {float}, 2)),
    "range": lambda packed: range(*_numbers(packed, {int}, 3)),
    "int": lambda packed: int(_text(packed), 16),
    "opaque": lambda packed: Opaque(_text(packed)[:100]),
}
