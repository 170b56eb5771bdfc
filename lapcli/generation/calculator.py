"""The calculator that a chat model can call: numbers, + - * / // ( ), thousands' commas, and 'text'.count('x').

It is a parser of our own over exact fractions: nothing is ever executed, whatever the model writes. Expressions,
nesting and numbers are bounded, so that every call is fast. An expression that it does not understand has no result.

    sum      = product (("+" | "-") product)*
    product  = factor (("*" | "/" | "//") factor)*
    factor   = ("+" | "-") factor | number | "(" sum ")" | text ".count(" text ")"
"""

import re
from fractions import Fraction

LONGEST_EXPRESSION = 500  # characters
DEEPEST = 40  # nested parentheses and signs
LARGEST = 10**60  # of numerator and denominator
LONGEST_RESULT = 40  # characters

# [0-9] and not \d, which matches the digits of all scripts; `//` is listed before `/`, or it would never match.
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9][0-9,]*\.?[0-9]*|\.[0-9]+)"
    r"|(?P<text>'[^'\\\n]*'|\"[^\"\\\n]*\")"
    r"|(?P<count>\.\s*count\b)"
    r"|(?P<sign>//|[-+*/()]))"
)


class NoResult(Exception):
    """The expression is invalid or exceeds a bound."""


def calculate(expression: str) -> str | None:
    """Return what the calculator prints, or None. Whole numbers are printed as such: 0.2*50 is 10, not 10.0."""
    try:
        return _printed(_Parser(_tokens(expression)).result())
    except NoResult:
        return None


def _tokens(expression: str) -> list[tuple[str, str]]:
    if len(expression) > LONGEST_EXPRESSION:
        raise NoResult
    expression = expression.rstrip()
    tokens: list[tuple[str, str]] = []
    place = 0
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None or match.lastgroup is None:
            raise NoResult
        tokens.append((match.lastgroup, match[match.lastgroup]))
        place = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    def result(self) -> Fraction:
        value = self._sum()
        if self._place != len(self._tokens):
            raise NoResult
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("sign", "+", "-"):
            right = self._product()
            value = _bounded(value + right if sign == "+" else value - right)
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self._take("sign", "*", "/", "//"):
            right = self._factor()
            if sign != "*" and right == 0:
                raise NoResult
            if sign == "//":  # rounds down, as in Python
                value = _bounded(Fraction(value // right))
            else:
                value = _bounded(value * right if sign == "*" else value / right)
        return value

    def _factor(self) -> Fraction:
        self._depth += 1
        if self._depth > DEEPEST:
            raise NoResult
        value = self._inner()
        self._depth -= 1
        return value

    def _inner(self) -> Fraction:
        if sign := self._take("sign", "+", "-"):
            value = self._factor()
            return -value if sign == "-" else value
        if self._take("sign", "("):
            value = self._sum()
            self._need("sign", ")")
            return value
        if text := self._take("text"):
            self._need("count")
            self._need("sign", "(")
            counted = self._need("text")
            self._need("sign", ")")
            return Fraction(text[1:-1].count(counted[1:-1]))
        return _bounded(Fraction(self._need("number").replace(",", "")))

    def _take(self, kind: str, *among: str) -> str | None:
        """Consume and return the next token if it is of that kind, and one of `among` if given."""
        if self._place == len(self._tokens):
            return None
        actual, text = self._tokens[self._place]
        if actual != kind or (among and text not in among):
            return None
        self._place += 1
        return text

    def _need(self, kind: str, *among: str) -> str:
        text = self._take(kind, *among)
        if text is None:
            raise NoResult
        return text


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) > LARGEST or value.denominator > LARGEST:
        raise NoResult
    return value


def _printed(value: Fraction) -> str:
    """Format as Python does, the shortest decimal that round-trips, but without `.0` after a whole number."""
    text = str(value.numerator) if value.denominator == 1 else repr(float(value))
    if len(text) > LONGEST_RESULT:
        raise NoResult
    return text
