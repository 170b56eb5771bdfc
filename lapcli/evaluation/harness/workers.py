"""The processes of an evaluation: rank 0 talks to lm-eval and hands out jobs, every process computes its share of
likelihoods and generations and journals the answers.

lm-eval's own way of distributing documents pads with copies of the last one and fails with fewer documents than
processes. Here it sees one process; its requests are divided among the workers, and the answers come back in their
order. Prompts, few-shot examples and scores are therefore the same for any number of processes.
"""

import platform
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

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

PARTS = 1000  # ticks of a progress bar that spans several jobs


@dataclass(frozen=True)
class LikelihoodJob:
    """Likelihoods to compute. An item is a document as questions: one, or several if it does not fit into one row."""

    items: Sequence[Sequence[Question]]
    task: str
    journal: Path | None = None
    part: tuple[float, float] = (0.0, 1.0)  # of the task, for the progress bar

    def key(self, item: Sequence[Question]) -> str:
        return line_key("likelihood", item)

    def share(self, numbers: Sequence[int]) -> "LikelihoodJob":
        return replace(self, items=[self.items[number] for number in numbers])


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

    def share(self, numbers: Sequence[int]) -> "GenerationJob":
        return replace(self, items=[self.items[number] for number in numbers])


class Worker:
    """Computes jobs on one process. `batch`: questions in one forward."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, batch: int, rank: int, progress: Progress | None) -> None:
        self._model, self._tokenizer, self._batch, self._rank = model, tokenizer, batch, rank
        self._progress = progress or (lambda doing, done, total: None)
        self._special = {tokenizer.special(name) for name in SPECIAL_TOKENS}

    def work(self, job: LikelihoodJob | GenerationJob) -> list[Any]:
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
                begin, end = job.part
                self._progress(job.task, round(PARTS * (begin + (end - begin) * done / len(job.items))), PARTS)
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


# The other ranks wait while rank 0 builds prompts or runs generated code, possibly beyond gloo's default timeout.
_PATIENCE = timedelta(days=7)


class Job(Protocol):
    """Work whose `items` can be divided among processes."""

    @property
    def items(self) -> Sequence[Any]: ...

    def share(self, numbers: Sequence[int]) -> "Job":
        """Return the job with these of its items."""


@dataclass(frozen=True)
class _Stop:
    error: LapError | None


Work = Callable[[Any], list[Any]]


class Workers:
    """The processes of an evaluation; `work` answers a job's items in their order."""

    def __init__(self, world: World, work: Work) -> None:
        self._world, self._work = world, work
        # All ranks have to create it, also those that only serve. gloo, because jobs are objects on the CPU.
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE) if world.size > 1 else None
        self._is_out = False  # a job, whose answers are not yet gathered

    def do(self, job: Job, cost: Callable[[Any], float]) -> list[Any]:
        """Return the answers to all items; called on rank 0."""
        if self._group is None:
            return self._work(job)
        # Dealt out from the most expensive item on, so that the processes end at about the same time.
        order = sorted(range(len(job.items)), key=lambda number: (-cost(job.items[number]), number))
        shares = [order[rank :: self._world.size] for rank in range(self._world.size)]
        self._is_out = True
        self._hand_out([job.share(numbers) for numbers in shares])
        collected: list[Any] = [None] * self._world.size
        dist.gather_object(self._try(job.share(shares[0])), collected, group=self._group)
        self._is_out = False
        answers: list[Any] = [None] * len(job.items)
        for numbers, (its_answers, error) in zip(shares, collected, strict=True):
            if error is not None:
                raise error
            for number, answer in zip(numbers, its_answers, strict=True):
                answers[number] = answer
        return answers

    def serve(self) -> None:
        """Answer jobs until rank 0 is done, and raise rank 0's error if it fails; called on the other ranks."""
        while True:
            (message,) = self._receive()
            if isinstance(message, _Stop):
                if message.error is not None:
                    message.error.is_echo = True
                    raise message.error
                return
            dist.gather_object(self._try(message), group=self._group)

    def stop(self, error: BaseException | None = None) -> None:
        """Release the other ranks; called on rank 0 when it is done or has failed."""
        # While a job is out they wait in the gather, not for a message: they end when this process does.
        if self._group is not None and not self._is_out:
            self._hand_out([_Stop(None if error is None else self._told(error))] * self._world.size)

    def _try(self, job: Job) -> tuple[list[Any], LapError | None]:
        """Do a job; an error is returned to rank 0, because a rank that just exited would leave the others waiting."""
        try:
            return (self._work(job) if job.items else []), None
        except Exception as error:
            if not isinstance(error, LapError | torch.OutOfMemoryError):
                traceback.print_exc()  # here: only the sentence reaches rank 0
            return [], self._told(error)

    def _told(self, error: BaseException) -> LapError:
        """Return the error as one of ours, which every rank can unpickle."""
        if isinstance(error, LapError):
            return (UsageError if isinstance(error, UsageError) else LapError)(str(error))
        return LapError(f"rank {self._world.rank} on {platform.node()}: {type(error).__name__}: {error}")

    def _hand_out(self, shares: list[Any]) -> None:
        dist.scatter_object_list([None], shares, group=self._group)

    def _receive(self) -> list[Any]:
        received: list[Any] = [None]
        dist.scatter_object_list(received, group=self._group)
        return received
