"""Streams generated text: samples of a prompt, and conversations in a terminal."""

import codecs
import contextlib
import re
import sys
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator

from lapcli.data.chat.conversation import question_and_answer, render, render_prompt
from lapcli.data.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from lapcli.generation.engine import Engine, Sampling
from lapcli.models.gpt import GPT

COMMANDS = "/clear clears the conversation, /quit quits"


#: Display of special tokens: a calculator call reads `[calculator: 6*7][= 42]`. The others are not.
_SHOWN = {"<|python_start|>": "[calculator: ", "<|python_end|>": "]", "<|output_start|>": "[= ", "<|output_end|>": "]"}


class Transcript:
    """Decodes tokens as they arrive. A multi-token character appears with its last token; control characters never."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {tokenizer.special(name): _SHOWN.get(name, "") for name in SPECIAL_TOKENS}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Add a token and return the text that can be shown now."""
        if token in self._special:
            return self.end() + self._special[token]
        text = self._decoder.decode(self._tokenizer.decode_bytes([token]))
        # Control characters could manipulate the terminal.
        return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)

    def end(self) -> str:
        """Return the text held back, which is an incomplete character."""
        return self._decoder.decode(b"", final=True)


def transcript(tokens: Iterable[int], tokenizer: Tokenizer) -> str:
    shown = Transcript(tokenizer)
    return "".join([*(shown.add(token) for token in tokens), shown.end()])


class Dialogue:
    """Keeps the exact tokens of every turn; turns that no longer fit the context are dropped, oldest first."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self._engine = Engine(model, tokenizer, batch=1)
        self._tokenizer, self._sampling = tokenizer, sampling
        self._longest = model.config.context
        self._exchanges: list[list[int]] = []
        self.forgotten = 0  # exchanges that did not fit

    def clear(self) -> None:
        self._exchanges = []

    def answer(self, question: str) -> Generator[str]:
        """Yield the answer in pieces of text. If this is closed early, the partial answer is kept."""
        asked = self._user_turn(question)
        tokens: list[int] = []
        shown = Transcript(self._tokenizer)
        try:
            for event in self._engine.stream([self._prompt(asked)], self._sampling):
                if not event.is_end:
                    tokens.append(event.token)
                    yield shown.add(event.token)
            yield shown.end()
        finally:
            # Closed even if the answer was cut short: every turn of the training data ends with this token.
            self._exchanges.append([*asked, *tokens, self._tokenizer.special("<|assistant_end|>")])

    def _user_turn(self, question: str) -> list[int]:
        """Return the tokens from <|user_start|> to <|assistant_start|>; a question that exceeds the context is
        truncated, but not the special tokens around it."""
        user = question_and_answer(question)[:1]
        # Without <|bos|>, which `_prompt` puts before the oldest exchange.
        tokens = render(user, self._tokenizer).ids.tolist()[1:]
        around = [self._tokenizer.special("<|user_end|>"), self._tokenizer.special("<|assistant_start|>")]
        # A large max_tokens must not crowd out the question: at most half of the context is reserved.
        answer = min(self._sampling.max_tokens, self._longest // 2)
        room = max(1, self._longest - len(around) - 1 - answer)
        return [*tokens[:-1][:room], *around]

    def _prompt(self, asked: list[int]) -> list[int]:
        room = self._longest - 1 - len(asked) - min(self._sampling.max_tokens, self._longest // 2)
        while self._exchanges and sum(map(len, self._exchanges)) > room:
            self._exchanges.pop(0)
            self.forgotten += 1
        return [self._tokenizer.bos, *(token for exchange in self._exchanges for token in exchange), *asked]


def converse(dialogue: Dialogue, read: Callable[[str], str] = input) -> None:
    """Answer questions from the terminal until /quit or the end of input. Ctrl-C stops the answer, not the program."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # missing from some Pythons
            import readline  # noqa: F401  gives `input` line editing and the lines before
    forgotten = 0
    while True:
        try:
            question = read("\n> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D quits)", file=sys.stderr)
            continue
        if question == "/quit":
            return
        if question == "/clear":
            dialogue.clear()
            print("(forgotten)", file=sys.stderr)
        elif re.fullmatch(r"/\w+", question):
            print(f"(no command {question}; {COMMANDS})", file=sys.stderr)
        elif question:
            _print_answer(dialogue, question)
            if dialogue.forgotten > forgotten:
                forgotten = dialogue.forgotten
                print("(the oldest questions no longer fit the context and are forgotten)", file=sys.stderr)


def _print_answer(dialogue: Dialogue, question: str) -> None:
    # Closing runs the `finally` of `answer` at once, which keeps the displayed part.
    with contextlib.closing(dialogue.answer(question)) as pieces:
        try:
            for text in pieces:
                print(text, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" ...", flush=True)


def sample(
    engine: Engine, tokenizer: Tokenizer, prompt: str, sampling: Sampling, samples: int, *, is_chat: bool
) -> Iterator[tuple[int, str, bool]]:
    """Yield (sample, some of its text, whether it ends). It ends with its document or answer, or after `max_tokens`.

    `is_chat`: the prompt is a question, in the format of the fine-tuning.
    """
    if is_chat:
        tokens = render_prompt(question_and_answer(prompt)[:1], tokenizer)
    else:
        tokens = [tokenizer.bos, *tokenizer.encode(prompt)]
    transcripts = [Transcript(tokenizer) for _ in range(samples)]
    counts = [0] * samples
    for event in engine.stream([tokens], sampling, samples):
        shown = transcripts[event.sample]
        counts[event.sample] += 1
        if not event.is_end and (text := shown.add(event.token)):
            yield event.sample, text, False
        if event.is_end or counts[event.sample] == sampling.max_tokens:
            yield event.sample, shown.end(), True
