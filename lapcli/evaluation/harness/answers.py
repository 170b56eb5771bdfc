"""What a generated answer says, and how often so many samples hold a right one."""

import math
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def final_number(text: str) -> str | None:
    """After the first `#### `, without thousands' commas."""
    found = _NUMBER.search(text)
    return found[1].replace(",", "") if found else None


def python_program(prompt: str, answer: str) -> str:
    """An answer as a program: its first fenced block, else all of it, after the imports at the prompt's head.

    The head of the function is not put before it: the model answers with the whole function.
    """
    fenced = _FENCED.search(answer)
    code = fenced[1] if fenced else answer
    return "\n".join([*_imports(prompt), "", code.strip()])


def _imports(prompt: str) -> list[str]:
    imports = []
    for line in prompt.splitlines():
        stripped = line.strip()
        if stripped.startswith(("import ", "from ")):
            imports.append(stripped)
        elif stripped and not stripped.startswith("#"):
            break
    return imports


def pass_at(k: int, passed: Sequence[bool]) -> float:
    """The unbiased estimate from n samples, c of them right: 1 - C(n - c, k) / C(n, k); any() for k = n."""
    n, c = len(passed), sum(passed)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
