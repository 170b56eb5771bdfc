"""Generated tokens as text for people: whole characters only, and calls of the calculator in brackets."""

import codecs
import unicodedata
from collections.abc import Iterable
from typing import Literal

from lapcli.data.text.tokenizer import SPECIAL_TOKENS, Tokenizer


class Transcript:
    """Text as tokens come. A character of several tokens appears with its last one; what steers a terminal never."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {tokenizer.special(name): name for name in SPECIAL_TOKENS}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._call: Literal["none", "expression", "called", "result"] = "none"

    def add(self, token: int) -> str:
        """What can be shown now."""
        name = self._special.get(token)
        if name is None:
            closed = self._close() if self._call == "called" else ""
            return closed + _harmless(self._decoder.decode(self._tokenizer.decode_bytes([token])))
        text = self._broken_character()
        if name == "<|python_end|>" and self._call == "expression":
            self._call = "called"
        elif name == "<|output_start|>" and self._call == "called":
            self._call = "result"
            text += " = "
        elif name == "<|output_end|>" and self._call == "result":
            self._call = "none"
            text += "]"
        else:
            text += self._close()
            if name == "<|python_start|>":
                self._call = "expression"
                text += "[calculator: "
        return text

    def end(self) -> str:
        """What was held back."""
        return self._broken_character() + self._close()

    def _close(self) -> str:
        """A call that comes to nothing: not understood, or cut off."""
        endings = {"none": "", "expression": " ...]", "called": " has no result]", "result": " ...]"}
        ending, self._call = endings[self._call], "none"
        return ending

    def _broken_character(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def transcript(tokens: Iterable[int], tokenizer: Tokenizer) -> str:
    shown = Transcript(tokenizer)
    return "".join([*(shown.add(token) for token in tokens), shown.end()])


def _harmless(text: str) -> str:
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
