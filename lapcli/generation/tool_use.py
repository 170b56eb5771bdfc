"""Calls of the calculator within generated tokens: what is between <|python_start|> and <|python_end|> is evaluated,
and the result is to follow as <|output_start|> result <|output_end|>."""

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.generation.calculator import calculate


class ToolUse:
    """The state of one row."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = (tokenizer.special(name) for name in ("<|python_start|>", "<|python_end|>"))
        self._expression: list[int] | None = None

    def after(self, token: int) -> list[int]:
        """The tokens that must come next, if any."""
        if token == self._start:
            self._expression = []
        elif token == self._end and self._expression is not None:
            result = calculate(self._tokenizer.decode(self._expression))
            self._expression = None
            if result is not None:
                start, end = (self._tokenizer.special(name) for name in ("<|output_start|>", "<|output_end|>"))
                return [start, *self._tokenizer.encode(result), end]
        elif self._expression is not None:
            self._expression.append(token)
        return []
