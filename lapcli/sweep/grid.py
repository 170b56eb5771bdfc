"""From `--over` to the cells of a grid: values, combinations, and a run name for each.

    --over model.laplacian_heads=0,3,6                     numbers
    --over 'model.laplacian_heads=[0,0,3,3],[3,3,0,0]'     lists with one number a layer
    --over 'model.laplacian_heads=linear(0, 4),4'          schedules

A cell's name depends on its own values alone, so that a grid can grow and its runs keep their names.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lapcli.recipe.reading import Unreadable, plain, read_text
from lapcli.runtime.errors import UsageError

Over = dict[str, list[Any]]
LAPLACIAN_HEADS = "model.laplacian_heads"
_LONGEST_NAME = 110  # of the 128 characters that a run's name may have: chat stages add to it
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def parse_over(options: Sequence[str]) -> Over:
    """What the `--over` options say: the values of each key, in order."""
    over: Over = {}
    for option in options:
        key, sign, text = option.partition("=")
        key = key.strip()
        if not sign or not key or not text.strip():
            raise UsageError(f"--over takes KEY=VALUE,VALUE such as seed=0,1,2, got {option[:80]!r}")
        if key in over:
            raise UsageError(f"--over {key} is given twice; put all its values into one")
        over[key] = [_read(key, part) for part in split_values(text)]
    return over


def split_values(text: str) -> list[str]:
    """The parts between commas that stand in no bracket and in no quotes."""
    parts, open_brackets, quote, start = [], [], "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in _CLOSING:
            open_brackets.append(_CLOSING[sign])
        elif open_brackets and sign == open_brackets[-1]:
            open_brackets.pop()
        elif sign == "," and not open_brackets:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:])]


def _read(key: str, text: str) -> Any:
    """A value as a recipe reads it."""
    try:
        node, problems = read_text(text, lambda line: "--over", under=(key,))
    except Unreadable as error:
        raise UsageError(f"--over {key}: {text[:60]!r} {error.problem.message}") from None
    if problems:
        raise UsageError(f"--over {key}: {problems[0].message}")
    if node is None or not text:
        raise UsageError(f"--over {key} has no value between two commas; write null to mean none")
    return plain(node)


def repeated(values: Sequence[Any]) -> Any | None:
    """A value that stands there twice, written in one way or another."""
    seen = set()
    for value in values:
        known = json.dumps(value, sort_keys=True)
        if known in seen:
            return value
        seen.add(known)
    return None


def combinations(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values; the last key varies fastest."""
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def override(key: str, value: Any) -> str:
    """In the form of `--set`: JSON is read as what it is."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def cell_name(prefix: str, values: Mapping[str, Any]) -> str:
    """`vitb_cifar100-12L-drop_path0.1-seed2`; Laplacian heads are written as in the paper."""
    last = [key.rpartition(".")[2] for key in values]
    parts = [re.sub(r"[^A-Za-z0-9._+-]+", "_", prefix).strip("._+-") or "cell"]
    for key, value in values.items():
        short = key.rpartition(".")[2]
        if key == LAPLACIAN_HEADS:
            parts.append(f"{_text(value)}L")
        else:
            parts.append((key if last.count(short) > 1 else short) + _text(value))
    name = re.sub(r"[^A-Za-z0-9._+-]", "_", "-".join(parts))
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 9]}-{_digest(values)[:8]}"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return "_".join(map(_text, value))
    if isinstance(value, dict):
        return "_".join(key + _text(inner) for key, inner in value.items())
    text = str(value)
    clean = re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")
    # Two paths may differ only in what a name cannot hold.
    is_plain = re.fullmatch(r"[A-Za-z0-9.+-]+|linear\([ 0-9,]*\)", text)
    return clean if is_plain else f"{clean[-40:]}.{_digest(text)[:6]}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
