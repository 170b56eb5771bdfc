"""Questions typed at a terminal: with line editing, a history that is kept, and several lines where they are needed."""

import atexit
import contextlib
from collections.abc import Callable
from pathlib import Path

from lapcli.runtime.environment import cache_dir

QUOTES = '"""'
_LONGEST_HISTORY = 1000


def line_reader(history: Path | None = None, read: Callable[[str], str] = input) -> Callable[[str], str]:
    """A replacement of `input`: the arrow keys edit and recall, and what was typed is known next time.

    A line that ends with a backslash goes on with the next one; so does all between two lines of triple quotes.
    """
    _keep_history(history or cache_dir() / "chat_history")

    def read_question(prompt: str) -> str:
        line = read(prompt)
        if line.strip().startswith(QUOTES):
            return _quoted(line.strip().removeprefix(QUOTES), read)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read("  "))
        return "\n".join(lines)

    return read_question


def _quoted(first: str, read: Callable[[str], str]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read("  "))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def _keep_history(file: Path) -> None:
    """Importing readline is what gives `input` its editing; some Pythons have none, and do without."""
    try:
        import readline
    except ImportError:
        return
    with contextlib.suppress(OSError):  # the first time there is none; a history is no reason not to talk
        readline.read_history_file(file)
    readline.set_history_length(_LONGEST_HISTORY)

    def write() -> None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)

    atexit.register(write)
