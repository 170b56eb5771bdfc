"""How a plain word in a recipe is read: the core schema of YAML 1.2, with underscores in whole numbers.

PyYAML follows YAML 1.1, where `3e-4` is text, `no` is false, `010` is eight, `1:30` is ninety and `2024-01-01` a date.
"""

import re

Scalar = None | bool | int | float | str

_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# ASCII: \d would also take the digits of every other script.
_WHOLE = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

# Longer ones stay text, which no number key accepts: Python refuses to read integers beyond 4,300 digits, and a
# whole number must still fit a float.
_LONGEST_NUMBER = 200


def read_plain(text: str) -> Scalar:
    """The value of an unquoted word."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _WHOLE.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text
