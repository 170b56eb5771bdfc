"""Generation with a GPT: each prompt is read once, then its samples are decoded together, one token per step, with a
KV cache.

Rows of different prompts and lengths share a batch. A finished row is removed, and a waiting row takes its place, so
that no time is spent on finished rows. With a tokenizer, an answer ends at <|assistant_end|> or <|bos|>, and the
calculator answers its calls.

The noise of a draw is a function of (prompt, seed, sample, position) only: not of the batch, the other rows, the
device or the order of the prompts.

Shapes: B rows, V vocabulary, K most likely tokens; in the cache L layers, G key and value heads, S tokens, D head size.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.generation.calculator import calculate
from lapcli.models.gpt import GPT, GPTConfig, KVCache
from lapcli.runtime.devices import has_float64
from lapcli.runtime.errors import LapError, UsageError

_GROWTH = 256  # tokens by which the cache grows at a time


class RowCache(KVCache):
    """A cache whose rows differ in length and are added and removed while the others continue.

    Rows grow by one token per step. While all rows have the same length, slices suffice without a mask.
    """

    def __init__(self, config: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, rows, 0, dtype, device)
        self.lengths: list[int] = []  # of the rows in use, which are the first ones
        self._at: tuple[Tensor, Tensor] | None = None  # row and position of each new token, if lengths differ

    @torch.inference_mode()  # tensors that grew in a step are inference tensors, which only this mode may write
    def add(self, prefix: KVCache) -> None:
        """Append a row with the tokens of the single row of `prefix`."""
        row, length = len(self.lengths), prefix.position
        self._reserve(length + 1)
        self.k_LBGSD[:, row, :, :length] = prefix.k_LBGSD[:, 0, :, :length]
        self.v_LBGSD[:, row, :, :length] = prefix.v_LBGSD[:, 0, :, :length]
        self.lengths.append(length)

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        last = len(self.lengths) - 1
        length = self.lengths.pop()
        # The keys of the removed row stay in memory: later rows overwrite or mask them.
        if row != last:
            self.k_LBGSD[:, row, :, :length] = self.k_LBGSD[:, last, :, :length]
            self.v_LBGSD[:, row, :, :length] = self.v_LBGSD[:, last, :, :length]
            self.lengths[row] = length

    def positions(self, tokens: int) -> slice | Tensor:
        """Return the positions of the new tokens, and prepare the mask that all layers share in this step."""
        if tokens != 1:
            raise ValueError("rows grow by one token at a time")
        self.position = max(self.lengths)
        self._reserve(self.position + 1)
        if min(self.lengths) == self.position:
            self.mask = self._at = None
            return slice(self.position, self.position + 1)
        device = self.k_LBGSD.device
        place_B = torch.tensor(self.lengths, device=device)
        self._at = torch.arange(len(self.lengths), device=device), place_B
        # B x 1 x 1 x S: beyond a row's own tokens there are zeros or the remains of a removed row.
        self.mask = (torch.arange(self.position + 1, device=device) <= place_B[:, None])[:, None, None]
        return place_B[:, None]

    def advance(self, tokens: int) -> None:
        self.lengths = [length + tokens for length in self.lengths]
        self.position = max(self.lengths)

    def insert(self, layer: int, k_BG1D: Tensor, v_BG1D: Tensor) -> tuple[Tensor, Tensor]:
        rows, end = len(self.lengths), self.position + 1
        # Slices are views: writing to them fills the cache.
        k_BGSD, v_BGSD = self.k_LBGSD[layer, :rows, :, :end], self.v_LBGSD[layer, :rows, :, :end]
        if self._at is None:
            k_BGSD[:, :, self.position :] = k_BG1D
            v_BGSD[:, :, self.position :] = v_BG1D
        else:
            row_B, place_B = self._at
            # Index tensors around a slice put their dimension first, so that both sides are B x G x D.
            k_BGSD[row_B, :, place_B] = k_BG1D[:, :, 0]
            v_BGSD[row_B, :, place_B] = v_BG1D[:, :, 0]
        return k_BGSD, v_BGSD

    def _reserve(self, length: int) -> None:
        """Grow the cache with zeros: a masked position contributes 0 times its value, and memory may hold NaN."""
        capacity = self.k_LBGSD.shape[3]
        if length <= capacity:
            return
        shape = list(self.k_LBGSD.shape)
        shape[3] = -(-max(length, capacity + _GROWTH) // _GROWTH) * _GROWTH
        for name in ("k_LBGSD", "v_LBGSD"):
            old: Tensor = getattr(self, name)
            new = torch.zeros(shape, dtype=old.dtype, device=old.device)
            new[:, :, :, :capacity] = old
            setattr(self, name, new)


_MASK = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """Sampling options; temperature 0 takes the most likely token, `top_k` samples among the k most likely."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0


def noise_key(prompt: Sequence[int], seed: int, sample: int) -> int:
    # Not hash(), which is salted in each process.
    text = f"{seed} {sample} {' '.join(map(str, prompt))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def uniform(key: int, position: int) -> float:
    """Return a number in [0, 1): the position-th of the splitmix64 generator that starts at `key`."""
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / 2**53


def draw(logits_BV: Tensor, sampling: Sampling, noise: Sequence[float]) -> list[int]:
    """Draw one token per row, by inverting the cumulative probabilities at the row's noise."""
    if sampling.temperature == 0:
        return [int(id_) for id_ in logits_BV.argmax(dim=-1).tolist()]
    ids_BK: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[1]:
        logits_BV, ids_BK = logits_BV.topk(sampling.top_k)
    if not has_float64(logits_BV.device):
        logits_BV = logits_BV.cpu()
    # The last sum may differ from 1 by rounding, so it scales the noise.
    cumulated_BV = (logits_BV.double() / sampling.temperature).softmax(-1).cumsum(-1)
    u_B = torch.tensor(noise, dtype=torch.float64, device=logits_BV.device) * cumulated_BV[:, -1]
    # right=True: noise of 0 must not choose a first token of probability 0. Noise may round up to the last sum: clamp.
    drawn_B = torch.searchsorted(cumulated_BV, u_B[:, None], right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    if ids_BK is not None:
        drawn_B = ids_BK.gather(1, drawn_B[:, None].to(ids_BK.device))[:, 0]
    return [int(id_) for id_ in drawn_B.tolist()]


class Event(NamedTuple):
    """One token of one sample of one prompt."""

    prompt: int
    sample: int
    token: int
    is_end: bool  # the token that ends an answer and is not part of it


@dataclass
class _Row:
    prompt: int
    sample: int
    key: int
    call: list[int] | None = None  # tokens of the expression that the calculator is about to be given
    forced: deque[int] = field(default_factory=deque)  # the calculator's answer, still to come
    count: int = 0
    token: int = -1
    is_done: bool = False


class Engine:
    """Generates samples; at most `batch` rows are decoded together. `uses_tools`: the calculator answers calls."""

    def __init__(
        self, model: GPT, tokenizer: Tokenizer | None = None, batch: int = 32, uses_tools: bool = True
    ) -> None:
        self.model, self.tokenizer, self.batch = model, tokenizer, batch
        self._uses_tools = uses_tools and tokenizer is not None
        # <|bos|> also ends an answer: in training it begins the next document.
        self._ends = {tokenizer.special(name) for name in ("<|assistant_end|>", "<|bos|>")} if tokenizer else set()

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling, samples: int = 1) -> list[list[list[int]]]:
        """Return the tokens of `samples` completions of every prompt."""
        completions: list[list[list[int]]] = [[[] for _ in range(samples)] for _ in prompts]
        for event in self.stream(prompts, sampling, samples):
            if not event.is_end:
                completions[event.prompt][event.sample].append(event.token)
        return completions

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        samples: int = 1,
        is_over: Callable[[Event], bool] | None = None,
    ) -> Iterator[Event]:
        """Yield every token as soon as it is sampled. `is_over` decides after each whether its sample ends with it."""
        longest, positions = max((len(prompt) for prompt in prompts), default=0), self.model.config.positions
        if not all(prompts):
            raise UsageError("an empty prompt cannot be continued; begin it with <|bos|>")
        if longest + sampling.max_tokens > positions:
            raise UsageError(
                f"a prompt of {longest:,} tokens and {sampling.max_tokens:,} more go beyond the model's {positions:,} "
                "positions; shorten one of them"
            )
        weight = self.model.embed.weight
        waiting = deque((p, s) for p in range(len(prompts)) for s in range(samples) if sampling.max_tokens > 0)
        cache = RowCache(self.model.config, min(self.batch, len(waiting)), weight.dtype, weight.device)
        rows: list[_Row] = []
        # The samples of a prompt are adjacent in `waiting`, so that one prefix is enough.
        read = -1
        while waiting or rows:
            while waiting and len(rows) < self.batch:
                number, sample = waiting.popleft()
                if number != read:
                    prompt = list(prompts[number])
                    prefix = KVCache(self.model.config, 1, len(prompt), weight.dtype, weight.device)
                    read, logits_1V = number, self._logits([prompt], prefix)
                row = _Row(number, sample, noise_key(prompts[number], sampling.seed, sample))
                # A separate first token per sample: nanochat of 2025 shared it between samples, which lowers pass@k.
                (token,) = draw(logits_1V, sampling, [uniform(row.key, 0)])
                yield self._take(row, token, sampling, is_over)
                if not row.is_done:
                    cache.add(prefix)
                    rows.append(row)
            if not rows:
                continue
            logits_BV = self._logits([[row.token] for row in rows], cache)
            tokens = draw(logits_BV, sampling, [uniform(row.key, row.count) for row in rows])
            for row, token in zip(rows, tokens, strict=True):
                yield self._take(row, token, sampling, is_over)
            for place in reversed(range(len(rows))):  # backwards, because the last row replaces a removed one
                if rows[place].is_done:
                    cache.remove(place)
                    rows[place] = rows[-1]
                    rows.pop()

    @torch.inference_mode()
    def _logits(self, tokens: list[list[int]], cache: KVCache) -> Tensor:
        """Compute the logits of the last token of each row."""
        x_BTC = self.model.hidden(torch.tensor(tokens, device=self.model.embed.weight.device), cache)
        logits_BV = self.model.logits(x_BTC[:, -1])
        if not torch.isfinite(logits_BV).all():
            raise LapError("the model's logits are not finite; these weights cannot be sampled from")
        return logits_BV

    def _take(self, row: _Row, drawn: int, sampling: Sampling, is_over: Callable[[Event], bool] | None) -> Event:
        """Append the sampled token or, while the calculator answers, the next token of its answer."""
        is_forced = bool(row.forced)
        # The draw is dropped, not saved for later: noise belongs to a position, even if its token is forced.
        token = row.forced.popleft() if is_forced else drawn
        row.token = token
        row.count += 1
        is_end = token in self._ends
        # Forced tokens count towards max_tokens, as in nanochat.
        row.is_done = is_end or row.count >= sampling.max_tokens
        # The calculator's output is not searched for calls.
        if self._uses_tools and not is_forced and self.tokenizer is not None:
            tokenizer = self.tokenizer
            if token == tokenizer.special("<|python_start|>"):
                row.call = []
            elif row.call is not None and token == tokenizer.special("<|python_end|>"):
                result, row.call = calculate(tokenizer.decode(row.call)), None
                # Without a result nothing is forced and the model continues, as in nanochat's engine.py.
                if result is not None:
                    start, end = (tokenizer.special(name) for name in ("<|output_start|>", "<|output_end|>"))
                    row.forced.extend([start, *tokenizer.encode(result), end])
            elif row.call is not None:
                row.call.append(token)
        event = Event(row.prompt, row.sample, token, is_end)
        if is_over is not None and is_over(event):
            row.is_done = True
        return event
