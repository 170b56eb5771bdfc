"""Text from a GPT: each prompt is read once, then its samples are decoded together, a token a step, with a cache.

Rows of different prompts and lengths share a batch. A row that is done leaves, and one that waits takes its place, so
that time goes only to rows still running. With a tokenizer, an answer ends at <|assistant_end|> or <|bos|>, and the
calculator answers its calls.

Shapes: B rows, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.generation.row_cache import RowCache
from lapcli.generation.sampling import Sampling, draw, noise_key, uniform
from lapcli.generation.tool_use import ToolUse
from lapcli.models.gpt import GPT, KVCache
from lapcli.runtime.errors import LapError, UsageError

__all__ = ["Completion", "Engine", "Event", "Sampling", "generate"]


class Event(NamedTuple):
    """One token of one sample of one prompt, as it comes."""

    prompt: int
    sample: int
    token: int
    is_forced: bool  # the calculator's, not the model's
    is_end: bool  # the token that ends an answer, which is no part of it


@dataclass
class Completion:
    tokens: list[int] = field(default_factory=list)
    is_forced: list[bool] = field(default_factory=list)
    has_ended: bool = False  # by its own end, not by the number of tokens


@dataclass
class _Row:
    prompt: int
    sample: int
    key: int
    tool: ToolUse | None
    forced: deque[int] = field(default_factory=deque)
    count: int = 0
    token: int = -1
    is_done: bool = False


class _Prefix(NamedTuple):
    prompt: int
    cache: KVCache
    logits_1V: Tensor


class Engine:
    """`batch`: the most rows that are decoded together. Without `uses_tools` nobody answers calls of the calculator."""

    def __init__(
        self, model: GPT, tokenizer: Tokenizer | None = None, batch: int = 32, uses_tools: bool = True
    ) -> None:
        self.model, self.tokenizer, self.batch = model, tokenizer, batch
        self._tool_user = tokenizer if uses_tools else None
        ends = ("<|assistant_end|>", "<|bos|>") if tokenizer else ()
        self._ends = {tokenizer.special(name) for name in ends} if tokenizer else set()

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, samples: int = 1
    ) -> list[list[Completion]]:
        """`samples` completions of every prompt."""
        completions = [[Completion() for _ in range(samples)] for _ in prompts]
        for event in self.stream(prompts, sampling, samples):
            completion = completions[event.prompt][event.sample]
            if event.is_end:
                completion.has_ended = True
            else:
                completion.tokens.append(event.token)
                completion.is_forced.append(event.is_forced)
        return completions

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int = 1,
        is_over: Callable[[Event], bool] | None = None,
    ) -> Iterator[Event]:
        """Every token as it is there. `is_over` is asked after each whether its sample is to end with it."""
        self._check(prompts, sampling)
        weight = self.model.embed.weight
        waiting = deque((p, s) for p in range(len(prompts)) for s in range(samples) if sampling.max_tokens > 0)
        cache = RowCache(self.model.config, min(self.batch, len(waiting)), weight.dtype, weight.device)
        rows: list[_Row] = []
        prefix: _Prefix | None = None
        while waiting or rows:
            while waiting and len(rows) < self.batch:
                number, sample = waiting.popleft()
                if prefix is None or prefix.prompt != number:
                    prefix = self._read(number, prompts[number])
                key = noise_key(prompts[number], sampling.seed, sample)
                row = _Row(number, sample, key, ToolUse(self._tool_user) if self._tool_user else None)
                (token,) = draw(prefix.logits_1V, sampling, [uniform(key, 0)])
                yield self._take(row, token, sampling, is_over)
                if not row.is_done:
                    cache.add(prefix.cache)
                    rows.append(row)
            if not rows:
                continue
            logits_BV = self._decode([row.token for row in rows], cache)
            tokens = draw(logits_BV, sampling, [uniform(row.key, row.count) for row in rows])
            for row, token in zip(rows, tokens, strict=True):
                yield self._take(row, token, sampling, is_over)
            for place in reversed(range(len(rows))):
                if rows[place].is_done:
                    cache.remove(place)
                    rows[place] = rows[-1]
                    rows.pop()

    @torch.inference_mode()
    def _read(self, number: int, prompt: Sequence[int]) -> _Prefix:
        weight = self.model.embed.weight
        cache = KVCache(self.model.config, 1, len(prompt), weight.dtype, weight.device)
        x_1TC = self.model.hidden(torch.tensor([list(prompt)], device=weight.device), cache)
        return _Prefix(number, cache, self._logits(x_1TC))

    @torch.inference_mode()
    def _decode(self, tokens: list[int], cache: RowCache) -> Tensor:
        tokens_B1 = torch.tensor(tokens, device=self.model.embed.weight.device)[:, None]
        return self._logits(self.model.hidden(tokens_B1, cache))

    def _logits(self, x_BTC: Tensor) -> Tensor:
        """Of the last token only."""
        logits_BV = self.model.logits(x_BTC[:, -1])
        if not torch.isfinite(logits_BV).all():
            raise LapError("the model gives logits that are not finite; nothing can be drawn from these weights")
        return logits_BV

    def _take(self, row: _Row, drawn: int, sampling: Sampling, is_over: Callable[[Event], bool] | None) -> Event:
        """The drawn token, unless the calculator has the word."""
        is_forced = bool(row.forced)
        token = row.forced.popleft() if is_forced else drawn
        row.token = token
        row.count += 1
        is_end = token in self._ends
        row.is_done = is_end or row.count >= sampling.max_tokens
        if row.tool is not None and not is_forced:
            row.forced.extend(row.tool.after(token))
        event = Event(row.prompt, row.sample, token, is_forced, is_end)
        if is_over is not None and is_over(event):
            row.is_done = True
        return event

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        longest = max((len(prompt) for prompt in prompts), default=0)
        positions = self.model.config.positions
        if not all(prompts):
            raise UsageError("an empty prompt cannot be continued; begin it with <|bos|>")
        if longest + sampling.max_tokens > positions:
            raise UsageError(
                f"a prompt of {longest:,} tokens and {sampling.max_tokens:,} more go beyond the model's {positions:,} "
                "positions; shorten one of them"
            )


def generate(
    model: GPT, prompt: list[int], max_tokens: int, *, temperature: float = 0.0, top_k: int | None = None, seed: int = 0
) -> list[int]:
    """The tokens that follow one prompt, exactly so many, whatever they are."""
    sampling = Sampling(max_tokens, temperature, top_k, seed)
    return Engine(model).complete([prompt], sampling)[0][0].tokens
