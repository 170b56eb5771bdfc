"""Messages between candidate and tests: JSON of at most 8 MB with its length in front, and Python values in it.

Nothing but plain values ever crosses. None, bool, str, float and int are themselves; everything else is a list that
starts with the name of its kind. What arrives is built anew from the standard library's own classes, whatever the
sender claims: a subclass of `list` arrives as a list, so an `__eq__` of its own stays behind. An object of any other
class arrives as an `Opaque`, which equals nothing else. Its truth value is the sender's word: the sender could as well
have answered True or False.

The classes of `collections`, `decimal`, `fractions` and `datetime` are imported when a value of theirs arrives: most
samples have none. Their values hold data alone. The default of a `defaultdict` is kept if it is a built-in class.

Changes that a candidate makes to its arguments do not come back, and neither does the identity of objects.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator

TYPE_CHECKING = False  # importing `typing` would cost as much as starting Python does
if TYPE_CHECKING:
    from typing import Any

LARGEST = 8 << 20  # bytes


class Closed(Exception):
    """The peer has closed the connection."""


class TooLarge(Exception):
    """A message is larger than the limit, or its header says so."""


class Channel:
    """One end of the socket pair. Plain read and write: the filter allows nothing else on a socket."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode("ascii")
        if len(body) > LARGEST:
            raise TooLarge(f"a message of {len(body):,} bytes; at most {LARGEST:,}")
        rest = memoryview(struct.pack(">I", len(body)) + body)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive(self) -> Any:
        (length,) = struct.unpack(">I", self._exactly(4))
        if length > LARGEST:
            raise TooLarge(f"a message of {length:,} bytes; at most {LARGEST:,}")
        return json.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        chunks = []
        while count:
            try:
                chunk = os.read(self._descriptor, min(count, 1 << 20))
            except ConnectionResetError as error:
                raise Closed from error
            if not chunk:
                raise Closed
            chunks.append(chunk)
            count -= len(chunk)
        return b"".join(chunks)


WHOLE_INTS = 8192  # bits; larger ones travel as hex, which is read in linear time and without Python's limit on digits
LONGEST_ITERATOR = 100_000
MOST_FIELDS = 256  # of a named tuple
LONGEST_NAME = 100
_NAMED: dict[tuple[str, ...], Any] = {}  # classes of named tuples that have arrived; making one takes a while
_DEFAULTS = {kind.__name__: kind for kind in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)}


class NotAValue(Exception):
    """The received data is not a packed value."""


class Opaque:
    """Represents an object of a class that only the candidate knows. Equals nothing but itself."""

    def __init__(self, name: str, truth: bool | None) -> None:
        self._name, self._truth = name, truth

    def __bool__(self) -> bool:
        if self._truth is None:
            raise TypeError(f"{self!r} is neither true nor false")
        return self._truth

    def __repr__(self) -> str:
        return f"<{self._name} of the candidate>"


def pack(value: Any) -> Any:
    """Return the value in a form for `json.dumps`.

    Subclasses are flattened through the methods of the library's own class, so that none of the candidate's own
    methods is asked for the content.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if number.bit_length() <= WHOLE_INTS else ["int", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    # Classes are compared by name, so that no module has to be imported just to rule its classes out.
    for kind in type(value).__mro__:
        name = (kind.__module__, kind.__qualname__)
        if name in _FLAT:
            return _FLAT[name](kind, value)
    if isinstance(value, Iterator):
        items = list(itertools.islice(value, LONGEST_ITERATOR + 1))
        if len(items) <= LONGEST_ITERATOR:
            return ["iterator", [pack(item) for item in items]]
    return ["opaque", [str(type(value).__name__)[:LONGEST_NAME], _truth(value)]]


def _truth(value: Any) -> bool | None:
    try:
        return bool(value)
    except Exception:
        return None


def _items(kind: Any, value: Any) -> Any:
    """Pack a collection. Views of an OrderedDict arrive as those of a dict in the same order."""
    return [kind.__name__.removeprefix("o"), [pack(item) for item in kind.__iter__(value)]]


def _pairs(kind: Any, value: Any) -> Any:
    return [kind.__name__, [[pack(key), pack(item)] for key, item in kind.items(value)]]


def _tuple(kind: Any, value: Any) -> Any:
    """Pack a tuple, with its fields if it is a named one and their names are valid."""
    items = [pack(item) for item in tuple.__iter__(value)]
    fields = getattr(type(value), "_fields", None)
    if isinstance(fields, tuple) and len(fields) == len(items) <= MOST_FIELDS and all(map(_is_field, fields)):
        name = type(value).__name__
        return ["namedtuple", [name if _is_field(name) else "named", list(fields), items]]
    return ["tuple", items]


def _is_field(name: Any) -> bool:
    """Return whether this can name a field: an identifier without a leading underscore, as `namedtuple` requires."""
    is_text = type(name) is str and name.isascii() and len(name) <= LONGEST_NAME
    return is_text and name.isidentifier() and not name.startswith("_")


def _defaultdict(kind: Any, value: Any) -> Any:
    default = kind.default_factory.__get__(value)
    name = getattr(default, "__name__", None) if isinstance(default, type) else None
    known = name if _DEFAULTS.get(name or "") is default else None
    return ["defaultdict", [known, _pairs(kind, value)[1]]]


_FLAT: dict[tuple[str, str], Callable[[Any, Any], Any]] = {
    ("builtins", "list"): _items,
    ("builtins", "tuple"): _tuple,
    ("builtins", "set"): _items,
    ("builtins", "frozenset"): _items,
    ("builtins", "dict"): _pairs,
    ("builtins", "dict_keys"): _items,
    ("builtins", "dict_values"): _items,
    ("builtins", "dict_items"): _items,
    ("builtins", "odict_keys"): _items,
    ("builtins", "odict_values"): _items,
    ("builtins", "odict_items"): _items,
    ("builtins", "bytes"): lambda kind, value: ["bytes", kind.hex(value)],
    ("builtins", "bytearray"): lambda kind, value: ["bytearray", kind.hex(value)],
    ("builtins", "complex"): lambda kind, value: ["complex", [kind.real.__get__(value), kind.imag.__get__(value)]],
    ("builtins", "range"): lambda kind, value: ["range", [pack(n) for n in (value.start, value.stop, value.step)]],
    ("collections", "OrderedDict"): _pairs,
    ("collections", "Counter"): _pairs,
    ("collections", "defaultdict"): _defaultdict,
    ("collections", "deque"): lambda kind, value: ["deque", [kind.maxlen.__get__(value), _items(kind, value)[1]]],
    ("decimal", "Decimal"): lambda kind, value: ["Decimal", kind.__str__(value)],
    ("fractions", "Fraction"): lambda kind, value: [
        "Fraction",
        [pack(kind.numerator.__get__(value)), pack(kind.denominator.__get__(value))],
    ],
    ("datetime", "date"): lambda kind, value: ["date", kind.isoformat(value)],
    ("datetime", "datetime"): lambda kind, value: ["datetime", kind.isoformat(value)],
    ("datetime", "time"): lambda kind, value: ["time", kind.isoformat(value)],
    ("datetime", "timedelta"): lambda kind, value: [
        "timedelta",
        [kind.days.__get__(value), kind.seconds.__get__(value), kind.microseconds.__get__(value)],
    ],
}


def unpack(packed: Any) -> Any:
    """Build the value from what `json.loads` gave. Trust nothing; raise `NotAValue` or what Python itself raises."""
    if packed is None or type(packed) in {bool, str, int, float}:
        return packed
    if type(packed) is not list or len(packed) != 2 or type(packed[0]) is not str:
        raise NotAValue("not a value")
    build = _BUILD.get(packed[0])
    if build is None:
        raise NotAValue("no such kind of value")
    return build(packed[1])


def _built_list(packed: Any) -> list[Any]:
    if type(packed) is not list:
        raise NotAValue("not a list")
    return [unpack(item) for item in packed]


def _built_pairs(packed: Any) -> list[tuple[Any, Any]]:
    if type(packed) is not list or not all(type(pair) is list and len(pair) == 2 for pair in packed):
        raise NotAValue("not pairs of key and value")
    return [(unpack(key), unpack(value)) for key, value in packed]


def _numbers(packed: Any, kind: type, count: int) -> list[Any]:
    numbers = _built_list(packed)
    if len(numbers) != count or not all(type(number) is kind for number in numbers):
        raise NotAValue("not numbers")
    return numbers


def _text(packed: Any) -> str:
    if type(packed) is not str:
        raise NotAValue("not a text")
    return packed


def _parts(packed: Any, count: int) -> list[Any]:
    if type(packed) is not list or len(packed) != count:
        raise NotAValue("not all of its parts")
    return packed


def _opaque(packed: Any) -> Opaque:
    name, truth = _parts(packed, 2)
    if truth is not None and type(truth) is not bool:
        raise NotAValue("not a truth")
    return Opaque(_text(name)[:LONGEST_NAME], truth)


def _namedtuple(packed: Any) -> Any:
    """Build a named tuple. `collections.namedtuple` evaluates source text made of the names, so that only plain
    identifiers may pass."""
    from collections import namedtuple

    name, fields, items = _parts(packed, 3)
    if type(fields) is not list or len(fields) > MOST_FIELDS or not all(map(_is_field, [name, *fields])):
        raise NotAValue("not the names of fields")
    key = (name, *fields)
    if key not in _NAMED:
        _NAMED[key] = namedtuple(name, fields)
    return _NAMED[key]._make(_built_list(items))


def _built_defaultdict(packed: Any) -> Any:
    from collections import defaultdict

    default, pairs = _parts(packed, 2)
    return defaultdict(None if default is None else _DEFAULTS[_text(default)], _built_pairs(pairs))


def _deque(packed: Any) -> Any:
    from collections import deque

    longest, items = _parts(packed, 2)
    if longest is not None and type(longest) is not int:
        raise NotAValue("not a length")
    return deque(_built_list(items), longest)


def _of(module: str, name: str, build: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Return `build` with a class of the standard library, imported when the first such value arrives."""
    return lambda packed: build(getattr(__import__(module), name), packed)


_BUILD: dict[str, Callable[[Any], Any]] = {
    "list": _built_list,
    "tuple": lambda packed: tuple(_built_list(packed)),
    "set": lambda packed: set(_built_list(packed)),
    "frozenset": lambda packed: frozenset(_built_list(packed)),
    "dict": lambda packed: dict(_built_pairs(packed)),
    "dict_keys": lambda packed: dict.fromkeys(_built_list(packed)).keys(),
    "dict_values": lambda packed: dict(enumerate(_built_list(packed))).values(),
    "dict_items": lambda packed: dict(_built_list(packed)).items(),
    "iterator": lambda packed: iter(_built_list(packed)),
    "bytes": lambda packed: bytes.fromhex(_text(packed)),
    "bytearray": lambda packed: bytearray.fromhex(_text(packed)),
    "complex": lambda packed: complex(*_numbers(packed, float, 2)),
    "range": lambda packed: range(*_numbers(packed, int, 3)),
    "int": lambda packed: int(_text(packed), 16),
    "namedtuple": _namedtuple,
    "OrderedDict": _of("collections", "OrderedDict", lambda kind, packed: kind(_built_pairs(packed))),
    "Counter": _of("collections", "Counter", lambda kind, packed: kind(dict(_built_pairs(packed)))),
    "defaultdict": _built_defaultdict,
    "deque": _deque,
    "Decimal": _of("decimal", "Decimal", lambda kind, packed: kind(_text(packed))),
    "Fraction": _of("fractions", "Fraction", lambda kind, packed: kind(*_numbers(packed, int, 2))),
    "date": _of("datetime", "date", lambda kind, packed: kind.fromisoformat(_text(packed))),
    "datetime": _of("datetime", "datetime", lambda kind, packed: kind.fromisoformat(_text(packed))),
    "time": _of("datetime", "time", lambda kind, packed: kind.fromisoformat(_text(packed))),
    "timedelta": _of("datetime", "timedelta", lambda kind, packed: kind(*_numbers(packed, int, 3))),
    "opaque": _opaque,
}
