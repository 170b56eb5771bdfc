"""The processes of an evaluation: rank 0 talks to lm-eval, the others answer what it hands out.

lm-eval's own way of sharing documents pads with copies of the last one and fails with fewer documents than processes.
Here it sees one process; its requests are dealt out, and the answers come back in their order. Prompts, few-shot
examples and scores are therefore the same for any number of processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.ranks import World

# Others wait while rank 0 builds prompts or runs generated code.
_PATIENCE = timedelta(days=7)


class Job(Protocol):
    """What a worker can do; `items` are shared out."""

    @property
    def items(self) -> Sequence[Any]: ...

    def share(self, numbers: Sequence[int]) -> "Job":
        """The job with these of its items."""


@dataclass(frozen=True)
class _Stop:
    error: str | None
    is_usage: bool = False


Work = Callable[[Any], list[Any]]


class Crew:
    """`work` answers a job's items in their order."""

    def __init__(self, world: World, work: Work) -> None:
        self._world, self._work = world, work
        self._group: Any = dist.new_group(backend="gloo", timeout=_PATIENCE) if world.size > 1 else None

    def do(self, job: Job, cost: Callable[[Any], float]) -> list[Any]:
        """On rank 0: the answers to all items."""
        if self._group is None:
            return self._work(job)
        order = sorted(range(len(job.items)), key=lambda number: (-cost(job.items[number]), number))
        shares = [order[rank :: self._world.size] for rank in range(self._world.size)]
        self._hand_out([job.share(numbers) for numbers in shares])
        collected: list[Any] = [None] * self._world.size
        dist.gather_object(_tried(self._work, job.share(shares[0])), collected, group=self._group)
        answers: list[Any] = [None] * len(job.items)
        for numbers, (found, error) in zip(shares, collected, strict=True):
            if error is not None:
                raise error
            for number, answer in zip(numbers, found, strict=True):
                answers[number] = answer
        return answers

    def serve(self) -> None:
        """On the other ranks, until rank 0 is done; fails if it fails."""
        while True:
            (given,) = self._receive()
            if isinstance(given, _Stop):
                if given.error is not None:
                    raise (UsageError if given.is_usage else LapError)(given.error)
                return
            dist.gather_object(_tried(self._work, given), group=self._group)

    def stop(self, error: BaseException | None = None) -> None:
        """On rank 0, however it ends."""
        if self._group is not None:
            stop = _Stop(None if error is None else str(error), isinstance(error, UsageError))
            self._hand_out([stop] * self._world.size)

    def _hand_out(self, shares: list[Any]) -> None:
        dist.scatter_object_list([None], shares, group=self._group)

    def _receive(self) -> list[Any]:
        received: list[Any] = [None]
        dist.scatter_object_list(received, group=self._group)
        return received


def _tried(work: Work, job: Job) -> tuple[list[Any], LapError | None]:
    """An error travels to rank 0 with the answers: a rank that just ended would leave the others waiting."""
    try:
        return (work(job) if job.items else []), None
    except LapError as error:
        return [], error
