"""A conversation with a chat model: what was said so far, answers as they come, and the loop of a terminal."""

import re
import sys
from collections.abc import Callable, Iterator

from lapcli.data.chat.conversation import question_and_answer
from lapcli.data.chat.rendering import render
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.generation.engine import Engine
from lapcli.generation.sampling import Sampling
from lapcli.generation.transcript import Transcript
from lapcli.models.gpt import GPT


class Dialogue:
    """Keeps the very tokens of every turn; what no longer fits the context is forgotten turn by turn, oldest first."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self._engine = Engine(model, tokenizer, batch=1)
        self._tokenizer, self._sampling = tokenizer, sampling
        self._longest = model.config.context
        self._exchanges: list[list[int]] = []
        self.forgotten = 0  # exchanges that did not fit

    def clear(self) -> None:
        self._exchanges = []

    def answer(self, question: str) -> Iterator[str]:
        """The answer in pieces of text. An answer that is cut short (by closing this) counts as far as it went."""
        asked = self._user_turn(question)
        prompt = self._prompt(asked)
        said: list[int] = []
        shown = Transcript(self._tokenizer)
        try:
            for event in self._engine.stream([prompt], self._sampling):
                if not event.is_end:
                    said.append(event.token)
                    if text := shown.add(event.token):
                        yield text
            if text := shown.end():
                yield text
        finally:
            self._exchanges.append([*asked, *said, self._tokenizer.special("<|assistant_end|>")])

    def _user_turn(self, question: str) -> list[int]:
        """From <|user_start|> to <|assistant_start|>; a question beyond the context loses its end, not its tokens
        around it."""
        user = question_and_answer(question)[:1]
        tokens = render(user, self._tokenizer).ids.tolist()[1:]
        around = [self._tokenizer.special("<|user_end|>"), self._tokenizer.special("<|assistant_start|>")]
        room = max(1, self._longest - len(around) - 1 - min(self._sampling.max_tokens, self._longest // 2))
        return [*tokens[:-1][:room], *around]

    def _prompt(self, asked: list[int]) -> list[int]:
        room = self._longest - 1 - len(asked) - min(self._sampling.max_tokens, self._longest // 2)
        while self._exchanges and sum(map(len, self._exchanges)) > room:
            self._exchanges.pop(0)
            self.forgotten += 1
        return [self._tokenizer.bos, *(token for exchange in self._exchanges for token in exchange), *asked]


def converse(dialogue: Dialogue, read: Callable[[str], str] = input) -> None:
    """Questions from the terminal until /quit or the end of the input. Ctrl-C stops the answer, not the program."""
    prompt = "\n> " if sys.stdin.isatty() else ""
    forgotten = 0
    while True:
        try:
            question = read(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)
            continue
        if question == "/quit":
            return
        if question == "/clear":
            dialogue.clear()
            print("(forgotten)", file=sys.stderr)
        elif re.fullmatch(r"/\w+", question):
            print(f"(no command {question}; /clear forgets what was said, /quit leaves)", file=sys.stderr)
        elif question:
            _print_answer(dialogue, question)
            if dialogue.forgotten > forgotten:
                forgotten = dialogue.forgotten
                print("(the oldest questions no longer fit the context and are forgotten)", file=sys.stderr)


def _print_answer(dialogue: Dialogue, question: str) -> None:
    pieces = dialogue.answer(question)
    try:
        for text in pieces:
            print(text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" ...", flush=True)
    finally:
        pieces.close()  # type: ignore[attr-defined]
