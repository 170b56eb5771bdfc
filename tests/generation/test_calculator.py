"""The calculator against Python's own arithmetic, and against what a model could write to harm."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.generation.calculator import calculate

#: Bounded: too long, too deep, too large.
HOSTILE = ["10**10**10", "9" * 400 + "*" + "9" * 90, "*".join(["99999999999999999999"] * 20), "-" * 300 + "1"]
HOSTILE += ["(" * 100_000, "1+" * 100_000 + "1", "'a'*1000000000", "1<<100"]
#: Python, but nothing for a calculator.
OTHERS = """'a'.upper() | 'a'.count | 'a'.count('a').real | 'a'.__class__ | ''.join(['a']) | 'a'.count('a', 0, 1)
'\\x61'.count('a') | __import__('os').system('true') | ().__class__.__base__.__subclasses__() | x+1 | abs(-1)
lambda: 1 | [1]*10 | 1 if 1 else 2 | 1;2 | 1==1 | 5%2 | ~1 | 1j | 1e999 | 0x10 | 1__0 | nan | f'{1}'
open('/etc/passwd').read() | 1///2 | 1/ /2 | 1//(2-2) | 1..2 | 1.2.3 | , | 1/0 | () | (1 | 1) | 1+ | 1 2
$5+1 | ١+١ | 20%"""
HOSTILE += [*OTHERS.replace("\n", " | ").split(" | "), "", " ", "1\n2", "\x00"]


@pytest.mark.parametrize("expression", HOSTILE, ids=lambda text: repr(text[:24]))
def test_hostile_expressions_have_no_result(expression):
    assert calculate(expression) is None  # one that was worked out in full would hang here


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48/2", "24"),
        ("0.2*50", "10"),
        ("1,234,567+1", "1234568"),
        (" ( 1 + 2 ) * -3 ", "-9"),
        ("0.1+0.2", "0.3"),
        ("007+1", "8"),
        ("1/3", "0.3333333333333333"),
        ("'strawberry'.count('r')", "3"),
        ('"a,b".count(",")*2+1', "3"),
    ],
)
def test_results(expression, result):
    assert calculate(expression) == result


leaves = st.integers(0, 10_000).map(str) | st.decimals(0, 1000, places=2, allow_nan=False).map(str)


def combined(inner):
    return st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//"]), inner).map(
        lambda t: f"({t[0]}{t[1]}{t[2]})"
    ) | inner.map(lambda text: f"-{text}")


@settings(max_examples=300, deadline=None)
@given(st.recursive(leaves, combined, max_leaves=8))
def test_as_exact_arithmetic(expression):
    """Python evaluates the same text with its numbers wrapped in Fraction."""
    import ast

    def exact(node):
        if isinstance(node, ast.Constant):
            return Fraction(ast.get_source_segment(expression, node))
        if isinstance(node, ast.UnaryOp):
            return -exact(node.operand)
        left, right = exact(node.left), exact(node.right)
        if isinstance(node.op, ast.Div):
            return left / right
        if isinstance(node.op, ast.FloorDiv):
            return Fraction(math.floor(left / right))
        return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]

    # Python refuses 007 as a number; the calculator reads it as 7.
    try:
        expected = exact(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        assert calculate(expression) is None
        return
    result = calculate(expression)
    assert result is not None
    if expected.denominator == 1:
        assert result == str(expected)
    else:
        assert float(result) == float(expected)
