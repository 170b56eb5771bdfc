"""Generated tokens as text for people: whole characters only, and calls of the calculator in brackets."""

import codecs
import unicodedata
from collections.abc import Iterable

from lapcli.data.tokenizer import SPECIAL_TOKENS, Tokenizer


class Transcript:
    """Text as tokens come. A character of several tokens appears with its last one; what steers a terminal never."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {tokenizer.special(name): name for name in SPECIAL_TOKENS}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._awaits_result = False

    def add(self, token: int) -> str:
        """What can be shown now."""
        name = self._special.get(token)
        if name is None:
            return self._without_result() + _harmless(self._decoder.decode(self._tokenizer.decode_bytes([token])))
        text = self._broken_character()
        if name == "<|output_start|>" and self._awaits_result:
            self._awaits_result = False
            return text + " = "
        text += self._without_result()
        if name == "<|python_start|>":
            return text + "[calculator: "
        if name == "<|python_end|>":
            self._awaits_result = True
        return text + ("]" if name == "<|output_end|>" else "")

    def end(self) -> str:
        """What was held back."""
        return self._broken_character() + self._without_result()

    def _without_result(self) -> str:
        awaited, self._awaits_result = self._awaits_result, False
        return " has no result]" if awaited else ""

    def _broken_character(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def transcript(tokens: Iterable[int], tokenizer: Tokenizer) -> str:
    shown = Transcript(tokenizer)
    return "".join([*(shown.add(token) for token in tokens), shown.end()])


def _harmless(text: str) -> str:
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
