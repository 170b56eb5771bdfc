"""Lists of words for the spelling tasks: from a file, from the system, or from the built-in text."""

import json
import re
from pathlib import Path

from lapcli.data.text.builtin import builtin_text
from lapcli.data.text.formats import zero_bytes
from lapcli.runtime.errors import DataError

SYSTEM = Path("/usr/share/dict/words")
_WORD = re.compile(r"[a-z]{3,}")


def read_words(path: Path) -> list[str]:
    """One word a line; blanks and CRLF are dropped."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the words of {path} ({error}); name another file as source") from None
    if "\0" in text:
        raise DataError(f"{path} {zero_bytes(text.encode())}")
    words = text.split()
    if not words:
        raise DataError(f"{path} has no words; name another file as source")
    return words


def system_words() -> list[str]:
    if not SYSTEM.is_file():
        raise DataError(f"this system has no {SYSTEM}; use source: builtin, or a file with one word a line")
    return [word for word in read_words(SYSTEM) if _WORD.fullmatch(word)]


def builtin_words() -> list[str]:
    """The words of the built-in text in alphabetical order."""
    found: set[str] = set()
    with builtin_text().open(encoding="utf-8") as lines:
        for line in lines:
            found.update(_WORD.findall(json.loads(line)["text"]))
    return sorted(found)
