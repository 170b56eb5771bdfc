"""Samples of one prompt: what a GPT writes next or a chat model answers, as text that comes piece by piece."""

from collections.abc import Iterator
from dataclasses import dataclass

from lapcli.data.chat.conversation import question_and_answer, render_prompt
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.generation.dialogue import Transcript
from lapcli.generation.engine import Engine, Sampling
from lapcli.models.gpt import GPT


@dataclass(frozen=True)
class Piece:
    """Some text of one sample; the last piece of a sample ends it."""

    sample: int
    text: str
    is_last: bool = False


class Sampler:
    """`is_chat`: the prompt is a question, which is asked in the form that the model was fine-tuned on."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, *, is_chat: bool) -> None:
        self._tokenizer, self._is_chat = tokenizer, is_chat
        # One row at a time, so that a sample is complete before the next one begins.
        self._engine = Engine(model, tokenizer, batch=1, uses_tools=is_chat)

    def stream(self, prompt: str, sampling: Sampling, samples: int = 1) -> Iterator[Piece]:
        """The samples one after the other. One ends with its document or answer, or after `max_tokens`."""
        transcripts = [Transcript(self._tokenizer) for _ in range(samples)]
        counts = [0] * samples
        for event in self._engine.stream([self._tokens(prompt)], sampling, samples):
            transcript = transcripts[event.sample]
            counts[event.sample] += 1
            if not event.is_end and (text := transcript.add(event.token)):
                yield Piece(event.sample, text)
            if event.is_end or counts[event.sample] == sampling.max_tokens:
                yield Piece(event.sample, transcript.end(), is_last=True)

    def texts(self, prompt: str, sampling: Sampling, samples: int = 1) -> list[str]:
        """All samples, whole."""
        texts = [""] * samples
        for piece in self.stream(prompt, sampling, samples):
            texts[piece.sample] += piece.text
        return texts

    def _tokens(self, prompt: str) -> list[int]:
        if self._is_chat:
            return render_prompt(question_and_answer(prompt)[:1], self._tokenizer)
        return [self._tokenizer.bos, *self._tokenizer.encode(prompt)]
