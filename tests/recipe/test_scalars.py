"""YAML 1.2's core rules, against the cases in which YAML 1.1 surprises."""

import math

import pytest

from lapcli.recipe.scalars import read_plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 0.0003),
        ("1e6", 1_000_000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5E+3", -1500.0),
        ("10_485_760", 10_485_760),
        ("1_000", 1000),
        ("+7", 7),
        ("010", 10),  # not eight
        ("0o10", 8),
        ("0xff", 255),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),  # not ninety
        ("2024-01-01", "2024-01-01"),  # not a date
        ("_1", "_1"),
        ("1__0", "1__0"),
        ("1_000.5", "1_000.5"),
        ("nan", "nan"),
        ("e5", "e5"),
        (".", "."),
        ("٣", "٣"),
        ("6-11", "6-11"),
        ("9" * 200, int("9" * 200)),
        ("9" * 5000, "9" * 5000),  # Python would refuse to read it
    ],
)
def test_plain_words(text: str, value: object) -> None:
    read = read_plain(text)
    assert read == value
    assert type(read) is type(value)


def test_what_is_not_finite_is_read_as_such() -> None:
    assert read_plain(".inf") == read_plain("+.Inf") == read_plain("1e999") == math.inf
    assert read_plain("-.INF") == -math.inf
    assert math.isnan(read_plain(".nan"))  # type: ignore[arg-type]
