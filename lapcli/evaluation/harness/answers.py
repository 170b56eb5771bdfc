"""What a generated answer says, and how often so many samples hold a right one."""

import math
import re
from collections.abc import Iterator, Sequence

_NUMBER = re.compile(r"####[ \t]*(-?\$?|\$[ \t]*-?)([0-9][0-9.,]*|\.[0-9][0-9.,]*)")

_PYTHON = {"", "python", "python3", "py"}  # languages of a block
_TRIPLE = r'"""(?:\\.|[^\\])*?"""|' + r"'''(?:\\.|[^\\])*?'''"
# Where a block may open: not in a docstring or a comment of a program without fences, nor ```within``` a line.
_OPENING = re.compile(
    _TRIPLE + r"|^[ \t]*#[^\n]*|`{3,}[^`\n]+`{3,}|(?P<fence>`{3,})(?P<info>[^`\n]*)\n", re.DOTALL | re.MULTILINE
)
# Where it may close: not in a string or a comment of its program.
_CLOSING = re.compile(_TRIPLE + r'|"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'|#[^\n]*|(?P<fence>`{3,})", re.DOTALL)
_FENCE_LINE = re.compile(r"^[ \t]*`{3,}[^`\n]*$", re.MULTILINE)


def final_number(text: str) -> str | None:
    """After the first `####`, without thousands' commas, the dollar sign and the full stop at its end."""
    found = _NUMBER.search(text)
    if found is None:
        return None
    return ("-" if "-" in found[1] else "") + found[2].replace(",", "").rstrip(".")


def python_program(prompt: str, answer: str) -> str:
    """An answer as a program: its first fenced block, else all of it, after the imports at the prompt's head.

    The head of the function is not put before it: the model answers with the whole function. Empty blocks are skipped,
    and blocks of other languages if there is one of Python.
    """
    answer = answer.replace("\r\n", "\n")
    found = list(_blocks(answer))
    blocks = [block for block in found if block[1].strip()]
    if blocks:
        code = next((code for language, code in blocks if language in _PYTHON), blocks[0][1])
    else:
        code = _FENCE_LINE.sub("", answer) if found else answer
    return "\n".join([*_imports(prompt), "", _unindented(code)])


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Language and content of the fenced blocks; the last one may lack its closing fence."""
    place = 0
    while opening := next((m for m in _OPENING.finditer(answer, place) if m["fence"] and _opens(m)), None):
        fences = (m for m in _CLOSING.finditer(answer, opening.end()) if len(m["fence"] or "") >= len(opening["fence"]))
        closing = next(fences, None)
        end, place = closing.span() if closing else (len(answer), len(answer))
        yield opening["info"].strip().partition(" ")[0].lower(), answer[opening.end() : end]


def _opens(fence: re.Match[str]) -> bool:
    """At the beginning of a line with any language, elsewhere only with Python's or none."""
    before = fence.string[: fence.start()].rpartition("\n")[2]
    return not before.strip() or fence["info"].strip().lower() in _PYTHON


def _unindented(code: str) -> str:
    """A block within a list is indented as a whole."""
    code = code.strip("\n")
    indent = code[: len(code) - len(code.lstrip(" \t"))]
    lines = code.split("\n")
    if all(line.startswith(indent) for line in lines if line.strip()):
        code = "\n".join(line.removeprefix(indent) for line in lines)
    return code.strip()


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
