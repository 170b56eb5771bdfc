"""The calculator: results, and hostile input that a model could write."""

import pytest

from lapcli.generation.calculator import calculate

#: Bounded: too long, too deep, too large.
HOSTILE = ["10**10**10", "9" * 400 + "*" + "9" * 90, "*".join(["99999999999999999999"] * 20), "-" * 300 + "1"]
HOSTILE += ["(" * 100_000, "1+" * 100_000 + "1", "'a'*1000000000", "1<<100"]
#: Python, but not calculator input.
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
        ("7//2 - -7//2", "7"),
        ("-(0.25-1)*2/0.5", "3"),
        ("'strawberry'.count('r')", "3"),
        ('"a,b".count(",")*2+1', "3"),
    ],
)
def test_results_of_expressions(expression, result):
    assert calculate(expression) == result
