"""Our GPT as an lm-eval model: all processes share the requests and journal the answers.

lm-eval's own way of distributing documents pads with copies of the last one and fails with fewer documents than
processes. Here each process sends all requests; the work is divided, and every process gets all answers in
order. Prompts, few-shot examples and scores are therefore the same for any number of processes.

Text prompts get <|bos|> before them, as every document has in training; chat prompts carry their tokens. A text that is
longer than the training context loses its beginning, as in lm-eval's own models; chat prompts stay whole.
"""

import platform
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lapcli.data.chat.conversation import Malformed, conversation, render_prompt
from lapcli.data.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from lapcli.evaluation.journal import Journal, line_key
from lapcli.evaluation.likelihood import Question, score
from lapcli.generation.engine import Engine, Event, Sampling
from lapcli.models.gpt import GPT
from lapcli.runtime.errors import DataError, LapError, UsageError
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World

# All ranks wait while rank 0 runs generated code, possibly longer than gloo's default timeout.
_PATIENCE = timedelta(days=7)
T = TypeVar("T")
Answers = Iterator[tuple[int, Any]]  # the number of an item, and its answer


class Workers:
    """All processes of an evaluation."""

    def __init__(self, world: World) -> None:
        self.world = world
        # gloo, because answers are objects on the CPU.
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE) if world.size > 1 else None

    def on_main(self, compute: Callable[[], T]) -> T:
        """Return rank 0's result."""
        return self.gather(lambda: compute() if self.world.is_main else None)[0]

    def gather(self, compute: Callable[[], Any]) -> list[Any]:
        """Return every rank's result. If one process fails, all raise its error, or the others would wait for it."""
        if self._group is None:
            return [compute()]
        found, error = None, None
        try:
            found = compute()
        except Exception as caught:
            if not isinstance(caught, LapError | torch.OutOfMemoryError):
                traceback.print_exc()  # here: only the sentence reaches rank 0
            error = self._told(caught)
        collected: list[Any] = [None] * self.world.size
        dist.all_gather_object(collected, (found, error), group=self._group)
        for _, failure in collected:
            if failure is not None:
                raise failure
        return [each for each, _ in collected]

    def _told(self, error: Exception) -> LapError:
        """Convert the error to one of ours, which every rank can unpickle."""
        if isinstance(error, LapError):
            return (UsageError if isinstance(error, UsageError) else LapError)(str(error))
        return LapError(f"rank {self.world.rank} on {platform.node()}: {type(error).__name__}: {error}")


class Prompt(str):
    """Text that carries its token ids, through copying and pickling.

    lm-eval passes prompts on as text. Tokenising rendered chat would turn a `<|user_end|>` that a question merely
    quotes into the real one; so the token ids travel with the text, which is only for display.
    """

    ids: tuple[int, ...]

    def __new__(cls, text: str, ids: Sequence[int]) -> "Prompt":
        prompt = super().__new__(cls, text)
        prompt.ids = tuple(ids)
        return prompt

    def __reduce__(self) -> tuple[Any, ...]:
        return Prompt, (str(self), self.ids)


def chat_prompt(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> Prompt:
    """Render messages up to the token after which the assistant answers."""
    try:
        turns = conversation(messages)
    except Malformed as error:
        raise DataError(f"a prompt cannot be rendered as a conversation: {error}") from None
    if not turns or turns[-1].role != "user":
        raise DataError("a prompt cannot be rendered as a conversation: it does not end with the user")
    rendered = "".join(f"<|{turn.role}_start|>{turn.parts[0].text}<|{turn.role}_end|>" for turn in turns)
    # The text equals the decoded tokens.
    return Prompt(f"<|bos|>{rendered}<|assistant_start|>", render_prompt(turns, tokenizer))


DEFAULT_NEW_TOKENS = 256  # lm-eval's
#: Generation settings that `lap` supports.
_UNDERSTOOD = {"until", "do_sample", "temperature", "top_k", "max_gen_toks", "max_tokens", "max_new_tokens"}
_OF_DRAWING = {"top_p", "min_p"}  # a greedy answer is the same with any value


class LapLM(TemplateLM):
    """The model of one task; it has the journal of the task's answers."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        workers: Workers,
        *,
        task: str,
        seed: int,
        batch: int = 16,  # questions in one forward of a process
        journal: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self._model, self._tokenizer, self._workers, self._task, self._seed = model, tokenizer, workers, task, seed
        self._batch, self._folder = batch, journal
        self._progress = progress or (lambda doing, done, total: None)
        self.max_length = model.config.context
        self._special = {tokenizer.special(name) for name in SPECIAL_TOKENS}
        self._known: dict[str, Any] = workers.on_main(Journal(journal).read)
        self.resumed = 0  # documents whose answers were in the journal
        self.truncated = 0  # prompts that lost their beginning

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.bos

    @property
    def max_gen_toks(self) -> int:
        return DEFAULT_NEW_TOKENS

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if isinstance(string, Prompt):
            return list(string.ids)
        ids = self._tokenizer.encode(string)
        # None adds <|bos|>: `TemplateLM` encodes context and full text with None and splits by length.
        return ids if add_special_tokens is False else [self._tokenizer.bos, *ids]

    def apply_chat_template(self, chat_history: list[dict[str, str]], **_: Any) -> Prompt:
        return chat_prompt(chat_history, self._tokenizer)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if isinstance(context, Prompt):
            # Encoded separately as in training, where an answer follows a special token and nothing merges over it.
            return list(context.ids), self.tok_encode(continuation, add_special_tokens=False)
        return super()._encode_pair(context, continuation)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_options: Any
    ) -> list[tuple[float, bool]]:
        groups: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}  # context: continuation: requests
        for number, (_, context, continuation) in enumerate(requests):
            groups.setdefault(tuple(context), {}).setdefault(tuple(continuation), []).append(number)
        for group in groups.values():
            self._check([requests[number][0][1] for numbers in group.values() for number in numbers], list(group))
        items = [
            self._questions(context, list(group), requests[next(iter(group.values()))[0]][0][0])
            for context, group in groups.items()
        ]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for group, likelihoods in zip(groups.values(), self._likelihoods(items), strict=True):
            for numbers, (logprob, is_greedy) in zip(group.values(), likelihoods, strict=True):
                for number in numbers:
                    answers[number] = (logprob, is_greedy)
        return answers

    def _check(self, texts: list[str], continuations: list[tuple[int, ...]]) -> None:
        """Refuse answers that cannot be compared: empty answers, or labels with unequal numbers of tokens."""
        if not all(continuations):
            raise DataError(
                f"{self._task}: one of the answers {', '.join(map(repr, texts))[:80]} merges into the last token "
                "of its prompt; this tokenizer cannot be evaluated on it"
            )
        # In a small vocabulary " A" may be one token and " B" two, whose likelihoods are not comparable.
        letters = {text.strip() for text in texts}
        are_letters = len(letters) > 1 and all(len(letter) == 1 for letter in letters)
        if are_letters and (any(len(each) != 1 for each in continuations) or len(continuations) != len(letters)):
            raise DataError(
                f"{self._task}: not every one of the letters {', '.join(sorted(letters))} is a token of its own in "
                "this tokenizer, so that they cannot be compared; train with a larger tokenizer.vocab"
            )

    def _questions(self, context: tuple[int, ...], continuations: list[tuple[int, ...]], text: str) -> list[Question]:
        longest = len(context) + max(map(len, continuations)) - 1
        if longest <= self.max_length or isinstance(text, Prompt):
            return [Question(context, tuple(continuations))]
        # Continuations of different lengths leave room for different parts of the context, so it cannot be shared.
        self.truncated += 1
        cut = []
        for continuation in continuations:
            continuation = continuation[-self.max_length :]
            room = self.max_length + 1 - len(continuation)  # its last token is predicted, not read
            cut.append(Question(context[-room:], (continuation,)))
        return cut

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        items = []
        for ids in self._tokenizer.encode_batch([request.args[0] for request in requests]):
            if not ids:
                raise DataError(f"{self._task}: an empty document has no likelihood; remove it")
            windows = get_rolling_token_windows(
                ids, prefix_token=self._tokenizer.bos, max_seq_len=self.max_length, context_len=1
            )
            pairs = (make_disjoint_window(window) for window in windows)
            items.append([Question(tuple(context), (tuple(target),)) for context, target in pairs])
        return [sum(logprob for logprob, _ in windows) for windows in self._likelihoods(items)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Generate answers. lm-eval repeats a request for every sample; samples of a request are drawn together."""
        groups: list[tuple[Instance, int]] = []
        for request in requests:
            # lm-eval repeats the same object, and repetitions are adjacent.
            if groups and groups[-1][0] is request:
                groups[-1] = (request, groups[-1][1] + 1)
            else:
                groups.append((request, 1))
        alike: dict[Any, list[int]] = {}
        for number, (request, samples) in enumerate(groups):
            settings = *self._sampling(request.args[1]), samples, isinstance(request.args[0], Prompt)
            alike.setdefault(settings, []).append(number)
        answers: list[list[str]] = [[] for _ in groups]
        for settings, numbers in alike.items():
            items = [self._prompt(groups[number][0].args[0], settings[0].max_tokens) for number in numbers]
            for number, texts in zip(numbers, self._generations(items, *settings), strict=True):
                answers[number] = texts
        return [text for group in answers for text in group]

    def _sampling(self, given: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
        draws = bool(given.get("do_sample")) and float(given.get("temperature", 1.0)) > 0
        if unknown := given.keys() - _UNDERSTOOD - (set() if draws else _OF_DRAWING):
            raise UsageError(
                f"{self._task} asks for generation with {', '.join(sorted(unknown))}, which `lap` does not support; "
                "choose another task"
            )
        until = given.get("until") or []
        tokens = next((given[n] for n in ("max_gen_toks", "max_new_tokens", "max_tokens") if n in given), None)
        return (
            Sampling(
                int(tokens or DEFAULT_NEW_TOKENS),
                float(given.get("temperature", 1.0)) if draws else 0.0,
                given.get("top_k") if draws else None,
                self._seed,
            ),
            tuple([until] if isinstance(until, str) else until),
        )

    def _prompt(self, context: str, new_tokens: int) -> tuple[int, ...]:
        ids = tuple(self.tok_encode(context))
        if isinstance(context, Prompt):
            return ids
        # lm-eval leaves room for the full answer; in a small context, half of it is still used for the prompt.
        room = max(self.max_length - new_tokens, self.max_length // 2)
        self.truncated += len(ids) > room
        return ids[-room:]

    def _answered(
        self,
        items: Sequence[T],
        key: Callable[[T], str],
        cost: Callable[[T], int],
        compute: Callable[[list[T]], Answers],
    ) -> list[Any]:
        """Take answers from the journal; the processes divide the missing answers and journal each."""
        world = self._workers.world
        keys = [key(item) for item in items]
        answers = [self._known.get(each) for each in keys]
        # Distributed from the most expensive item on, so that the processes finish at about the same time.
        missing = sorted((n for n, answer in enumerate(answers) if answer is None), key=lambda n: -cost(items[n]))
        self.resumed += len(answers) - len(missing)
        if not missing:
            return answers
        mine = missing[world.rank :: world.size]

        def work() -> list[Any]:
            found: list[Any] = [None] * len(mine)
            journal = Journal(self._folder, world.rank)
            try:
                for done, (place, answer) in enumerate(compute([items[n] for n in mine]), start=1):
                    found[place] = answer
                    journal.add(keys[mine[place]], answer)
                    self._progress(self._task, done, len(mine))
            finally:
                journal.close()
            return found

        for rank, found in enumerate(self._workers.gather(work)):
            for number, answer in zip(missing[rank :: world.size], found, strict=True):
                answers[number] = answer
        return answers

    def _likelihoods(self, items: Sequence[Sequence[Question]]) -> list[Any]:
        """Return (log-probability, is greedy) for each continuation of each item.

        An item is a document as questions: one, or several if it does not fit into one row.
        """
        return self._answered(
            items, lambda item: line_key("likelihood", item), lambda item: sum(q.length for q in item), self._scored
        )

    def _scored(self, items: Sequence[Sequence[Question]]) -> Answers:
        questions = [(number, part) for number, item in enumerate(items) for part in range(len(item))]
        answers: list[list[Any]] = [[None] * len(item) for item in items]
        for place, likelihoods in score(self._model, [items[n][part] for n, part in questions], self._batch):
            number, part = questions[place]
            answers[number][part] = [[likelihood.logprob, likelihood.is_greedy] for likelihood in likelihoods]
            if None not in answers[number]:
                yield number, [likelihood for each in answers[number] for likelihood in each]

    def _generations(
        self, items: Sequence[tuple[int, ...]], sampling: Sampling, until: tuple[str, ...], samples: int, is_chat: bool
    ) -> list[list[str]]:
        """Return `samples` texts for each prompt's tokens; a string of `until` ends an answer and is not part of it.

        `is_chat`: the calculator is available, and special tokens stay visible.
        """
        settings = [sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed]
        return self._answered(
            items,
            lambda item: line_key("generation", item, settings, samples, until, is_chat),
            len,
            lambda mine: self._generated(mine, sampling, until, samples, is_chat),
        )

    def _generated(
        self, items: list[tuple[int, ...]], sampling: Sampling, until: tuple[str, ...], samples: int, is_chat: bool
    ) -> Answers:
        # The engine counts samples, `batch` counts prompts.
        engine = Engine(self._model, self._tokenizer, batch=self._batch * samples, uses_tools=is_chat)
        tokens: list[list[list[int]]] = [[[] for _ in range(samples)] for _ in items]
        running, ended = [samples] * len(items), list[int]()
        stops = [text.encode() for text in until]

        def is_over(event: Event) -> bool:
            """Return whether the sample is over; also collect its tokens, and note a prompt's last sample."""
            generated = tokens[event.prompt][event.sample]
            if not event.is_end:
                generated.append(event.token)
            # The engine ends a row at max_tokens itself; the test is repeated to notice the last sample of a prompt.
            over = event.is_end or len(generated) >= sampling.max_tokens or self._has_stop(generated, stops)
            running[event.prompt] -= over
            if over and not running[event.prompt]:
                ended.append(event.prompt)
            return over

        for _ in engine.stream(items, sampling, samples, is_over):
            while ended:
                yield ended[-1], [self._text(each, until, is_chat) for each in tokens[ended.pop()]]
        for prompt in ended:
            yield prompt, [self._text(each, until, is_chat) for each in tokens[prompt]]

    def _has_stop(self, tokens: list[int], stops: list[bytes]) -> bool:
        if not stops:
            return False
        # A token has at least one byte, so a stop that the newest token completes lies within this many tokens.
        # Bytes, because a token may end within a character.
        newest = self._tokenizer.decode_bytes(tokens[-max(map(len, stops)) :])
        return any(stop in newest for stop in stops)

    def _text(self, tokens: list[int], until: Sequence[str], is_chat: bool) -> str:
        text = self._tokenizer.decode(tokens if is_chat else [t for t in tokens if t not in self._special])
        for stop in until:
            text = text.split(stop)[0]
        return text
