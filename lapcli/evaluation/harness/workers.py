"""The processes of an evaluation: all talk to lm-eval in the same way, and each computes and journals its share of
likelihoods and generations.

lm-eval's own way of distributing documents pads with copies of the last one and fails with fewer documents than
processes. Here each process asks as if it were alone; the requests are divided among all, and everyone gets all answers
in their order. Prompts, few-shot examples and scores are therefore the same for any number of processes.
"""

import platform
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lapcli.data.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from lapcli.evaluation.harness.journal import Journal, line_key
from lapcli.evaluation.harness.likelihood import Question, score
from lapcli.generation.engine import Engine, Event, Sampling
from lapcli.models.gpt import GPT
from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World


@dataclass(frozen=True)
class LikelihoodJob:
    """Likelihoods to compute. An item is a document as questions: one, or several if it does not fit into one row."""

    items: Sequence[Sequence[Question]]
    task: str
    journal: Path | None = None

    def key(self, item: Sequence[Question]) -> str:
        return line_key("likelihood", item)

    def cost(self, item: Sequence[Question]) -> int:
        return sum(question.length for question in item)


@dataclass(frozen=True)
class GenerationJob:
    """Texts to generate. An item is a prompt's tokens; its answer is `samples` texts."""

    items: Sequence[tuple[int, ...]]
    task: str
    sampling: Sampling
    samples: int
    until: tuple[str, ...]  # texts that end an answer and are not part of it
    is_chat: bool  # the calculator is available, and special tokens stay visible
    journal: Path | None = None

    def key(self, item: tuple[int, ...]) -> str:
        sampling = self.sampling
        settings = [sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed]
        return line_key("generation", item, settings, self.samples, self.until, self.is_chat)

    def cost(self, item: tuple[int, ...]) -> int:
        return len(item)


Job = LikelihoodJob | GenerationJob


def share(job: Job, numbers: Sequence[int]) -> Job:
    """Return the job with these of its items."""
    return replace(job, items=[job.items[number] for number in numbers])  # type: ignore[arg-type]


class Worker:
    """Computes jobs on one process. `batch`: questions in one forward."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, batch: int, rank: int, progress: Progress | None) -> None:
        self._model, self._tokenizer, self._batch, self._rank = model, tokenizer, batch, rank
        self._progress = progress or (lambda doing, done, total: None)
        self._special = {tokenizer.special(name) for name in SPECIAL_TOKENS}

    def work(self, job: Job) -> list[Any]:
        journal = Journal(job.journal, self._rank)
        try:
            if isinstance(job, LikelihoodJob):
                return self._likelihoods(job, journal)
            return self._generate(job, journal)
        finally:
            journal.close()

    def _likelihoods(self, job: LikelihoodJob, journal: Journal) -> list[Any]:
        questions = [(number, part) for number, item in enumerate(job.items) for part in range(len(item))]
        answers: list[list[Any]] = [[None] * len(item) for item in job.items]
        missing = [len(item) for item in job.items]
        done = 0
        for place, likelihoods in score(self._model, [job.items[n][part] for n, part in questions], self._batch):
            number, part = questions[place]
            answers[number][part] = [[likelihood.logprob, likelihood.is_greedy] for likelihood in likelihoods]
            missing[number] -= 1
            if not missing[number]:
                answers[number] = [likelihood for each in answers[number] for likelihood in each]
                journal.add(job.key(job.items[number]), answers[number])
                done += 1
                self._progress(job.task, done, len(job.items))
        return answers

    def _generate(self, job: GenerationJob, journal: Journal) -> list[Any]:
        # The engine counts samples, `batch` counts prompts.
        engine = Engine(self._model, self._tokenizer, batch=self._batch * job.samples, uses_tools=job.is_chat)
        tokens: list[list[list[int]]] = [[[] for _ in range(job.samples)] for _ in job.items]
        running = [job.samples] * len(job.items)
        answers: list[Any] = [None] * len(job.items)
        stops = [text.encode() for text in job.until]
        done = 0

        def is_over(event: Event) -> bool:
            """Return whether the sample is over; also collect its tokens, and journal a prompt's answers when its last
            sample ends."""
            nonlocal done
            generated = tokens[event.prompt][event.sample]
            if not event.is_end:
                generated.append(event.token)
            # The engine ends a row at max_tokens itself; the test is repeated to notice the last sample of a prompt.
            over = event.is_end or len(generated) >= job.sampling.max_tokens or self._has_stop(generated, stops)
            if over:
                running[event.prompt] -= 1
                if not running[event.prompt]:
                    answers[event.prompt] = [self._text(each, job) for each in tokens[event.prompt]]
                    journal.add(job.key(job.items[event.prompt]), answers[event.prompt])
                    done += 1
                    self._progress(job.task, done, len(job.items))
            return over

        for _ in engine.stream(job.items, job.sampling, job.samples, is_over):
            pass
        return answers

    def _has_stop(self, tokens: list[int], stops: list[bytes]) -> bool:
        if not stops:
            return False
        # A token has at least one byte, so a stop that the newest token completes lies within this many tokens.
        # Bytes, because a token may end within a character.
        newest = self._tokenizer.decode_bytes(tokens[-max(map(len, stops)) :])
        return any(stop in newest for stop in stops)

    def _text(self, tokens: list[int], job: GenerationJob) -> str:
        if not job.is_chat:
            tokens = [token for token in tokens if token not in self._special]
        text = self._tokenizer.decode(tokens)
        for stop in job.until:
            text = text.split(stop)[0]
        return text


# All ranks wait while rank 0 runs generated code, possibly beyond gloo's default timeout.
_PATIENCE = timedelta(days=7)
T = TypeVar("T")


class Workers:
    """All processes, in each of which `work` answers the items of a job in their order."""

    def __init__(self, world: World, work: Callable[[Job], list[Any]]) -> None:
        self.world, self._work = world, work
        # gloo, because jobs are objects on the CPU.
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE) if world.size > 1 else None

    def do(self, job: Job) -> list[Any]:
        """Return the answers to all items; called on every process with the same job."""
        if self._group is None:
            return self._work(job)
        # Dealt out from the most expensive item on, so that the processes end at about the same time.
        order = sorted(range(len(job.items)), key=lambda number: -job.cost(job.items[number]))  # type: ignore[arg-type]
        mine = order[self.world.rank :: self.world.size]
        answers: list[Any] = [None] * len(job.items)
        for rank, found in enumerate(self._gather(lambda: self._work(share(job, mine)) if mine else [])):
            for number, answer in zip(order[rank :: self.world.size], found, strict=True):
                answers[number] = answer
        return answers

    def on_main(self, compute: Callable[[], T]) -> T:
        """Return what rank 0 computes."""
        if self._group is None:
            return compute()
        return self._gather(lambda: compute() if self.world.is_main else None)[0]

    def _gather(self, compute: Callable[[], Any]) -> list[Any]:
        """Return what each rank computes. If one fails, all raise its error, or the others would wait for it."""
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
        """Return the error as one of ours, which every rank can unpickle."""
        if isinstance(error, LapError):
            return (UsageError if isinstance(error, UsageError) else LapError)(str(error))
        return LapError(f"rank {self.world.rank} on {platform.node()}: {type(error).__name__}: {error}")
