"""The calculator that a chat model can call: numbers, + - * / // ( ), thousands' commas, and 'text'.count('x').

Python parses the expression, and nothing is executed: the tree may contain only these nodes, over exact fractions.
Expressions and numbers are bounded, so that every call is fast. An invalid expression has no result.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST_EXPRESSION = 500  # characters
DEEPEST = 40  # nested signs and right operands
LARGEST = 10**60  # of numerator and denominator
LONGEST_RESULT = 40  # characters

_NUMBER = r"[0-9][0-9,]*\.?[0-9]*|\.[0-9]+"  # [0-9] and not \d, which matches the digits of all scripts
_TOKEN = re.compile(rf"""{_NUMBER}|'[^'\\\n]*'|"[^"\\\n]*"|\.\s*count\b|//|[-+*/()]""")
_OPERATIONS: dict[type, Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),  # rounds down, as in Python
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str | None:
    """Return the calculator's output, or None. Whole numbers are printed as such: 0.2*50 is 10, not 10.0."""
    if len(expression) > LONGEST_EXPRESSION or _TOKEN.sub("", expression).strip():
        return None
    source = " ".join(_without_commas(token) for token in _TOKEN.findall(expression))
    try:
        value = _value(ast.parse(source, mode="eval").body, source, DEEPEST)
    except (SyntaxError, MemoryError, ValueError, ZeroDivisionError):  # MemoryError: too deep for Python's parser
        return None
    text = str(value.numerator) if value.denominator == 1 else repr(float(value))
    return text if len(text) <= LONGEST_RESULT else None


def _without_commas(token: str) -> str:
    """Return a number without commas, and without leading zeros, which Python refuses; other tokens unchanged."""
    return re.sub(r"^0+(?=[0-9])", "", token.replace(",", "")) if re.match(_NUMBER, token) else token


def _value(node: ast.expr, source: str, deepest: int) -> Fraction:
    match node:
        case ast.Call(ast.Attribute(ast.Constant(str(text)), "count"), [ast.Constant(str(counted))]):
            value = Fraction(text.count(counted))
        case ast.Constant(int() | float()):
            value = Fraction(ast.get_source_segment(source, node) or "")  # its digits: the float would be rounded
        case ast.UnaryOp(sign, operand) if deepest:
            value = _OPERATIONS[type(sign)](_value(operand, source, deepest - 1))
        case ast.BinOp(left, sign, right) if deepest:
            value = _OPERATIONS[type(sign)](_value(left, source, deepest), _value(right, source, deepest - 1))
        case _:
            raise ValueError
    if abs(value.numerator) > LARGEST or value.denominator > LARGEST:
        raise ValueError
    return value
