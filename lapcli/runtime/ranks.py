"""The processes of one run: this rank, its device, and the few collectives of the loop."""

import dataclasses
import os
import platform
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lapcli.runtime.devices import has_float64, use_whole_float32
from lapcli.runtime.environment import STEP_TIMEOUT, inside_torchrun, launcher, stopped_mark
from lapcli.runtime.errors import (
    DataError,
    ExitCode,
    Interrupted,
    LapError,
    UsageError,
    from_peer_error,
    is_out_of_memory,
)
from lapcli.runtime.signals import end_with_parent


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    group: Any = None  # of torch; None: the default one
    is_restarted: bool = False  # the launcher has started ranks before: one of them died, or a machine joined
    timeout: timedelta | None = None  # of a collective; a further group needs it too, or a lost machine hangs it

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def shares(self, count: int, batch: int) -> list[range]:
        """Return the positions among `count` that this process takes, up to `batch` at a time.

        Every process has equally many batches, so that all of them meet in collectives; some last batches are empty.
        """
        # The end is shifted like the start, so that every rank has ceil(count / (size * batch)) batches.
        firsts = range(self.rank * batch, self.rank * batch + count, self.size * batch)
        return [range(min(count, first), min(count, first + batch)) for first in firsts]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(self.group)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; all ranks must call it."""
        return self.sum([float(flag)])[0] > 0

    def means(self, numbers: Sequence[torch.Tensor], flag: bool) -> tuple[list[float], bool]:
        """Return the means over the ranks of numbers on the device, and whether the flag is set on any rank.

        All ranks must call it. It is one collective and one sync for all numbers. A number that is
        non-finite on one rank is non-finite on all.
        """
        dtype = torch.float64 if has_float64(self.device) else torch.float32
        # Not torch.tensor, which would copy from the host and sync.
        up = torch.full((), float(flag), dtype=dtype, device=self.device)
        total = torch.stack([*(x.to(dtype) for x in numbers), up])
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        *sums, flags = total.tolist()  # the only wait
        return [x / self.size for x in sums], flags > 0

    def sum(self, values: list[float]) -> list[float]:
        if self.size == 1:
            return values
        # float64 so that counts of tokens and bytes stay exact.
        dtype = torch.float64 if has_float64(self.device) else torch.float32
        total = torch.tensor(values, dtype=dtype, device=self.device)
        dist.all_reduce(total, group=self.group)
        return [float(x) for x in total.tolist()]

    def from_main(self, value: object) -> object:
        """Return rank 0's value on every rank (a path, an error message: plain values only)."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def from_all(self, value: object) -> list[object]:
        """Return the values of all ranks, in rank order, on every rank (plain values only)."""
        if self.size == 1:
            return [value]
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def require_same(self, identities: Mapping[str, str | None]) -> None:
        """Raise DataError on every rank if any rank's identities, sha256 by name, differ from rank 0's."""
        answers: list[Any] = self.from_all((platform.node(), dict(identities)))
        main_host, main = answers[0]
        for rank, (host, found) in enumerate(answers):
            for name, value in main.items():
                if found.get(name) != value:
                    raise DataError(
                        f"rank {rank} on {host} differs from rank 0 on {main_host} in {name} (sha256 "
                        f"{str(found.get(name))[:16]} instead of {str(value)[:16]}); copy the same files to every "
                        "machine, then run it again"
                    )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make all ranks fail with the message of the first failing rank, so that no rank waits for it.

        The work inside must not use collectives: a rank that fails would skip them.
        """
        error: Exception | None = None
        try:
            yield
        except Interrupted:  # no collective: the signal reaches all ranks
            raise
        except Exception as caught:
            error = caught
        report = None
        if error is not None:
            code = error.exit_code if isinstance(error, LapError) else ExitCode.FAILED
            report = f"rank {self.rank} on {platform.node()}: {error or type(error).__name__}", int(code)
        # A rank without an error answers too: each rank waits for all answers.
        reports = [answer for answer in self.from_all(report) if isinstance(answer, tuple)]
        if error is not None:
            if isinstance(error, LapError):
                error.is_echo = not self.is_main  # rank 0 prints it
            raise error
        if reports:
            message, code = reports[0]
            echo = DataError(message) if code == ExitCode.USAGE else LapError(message)
            echo.is_echo = not self.is_main
            raise echo


@contextmanager
def joined_world(device: str = "auto", step_timeout: float = STEP_TIMEOUT) -> Iterator[World]:
    """Join the other ranks, and leave with them after success.

    After an exception this rank leaves alone (`end_process`): NCCL destroys a group together with the others,
    which wait in another collective.
    """
    try:
        yield join_world(device, step_timeout)
    except RuntimeError as error:
        if is_out_of_memory(error):
            reason = str(error).splitlines()[0]
            advice = "use smaller batches: train.micro_batch of a training, --batch of `lap eval`"
            raise LapError(f"the device is out of memory ({reason}); {advice}") from error
        if (explained := from_peer_error(error)) is None:
            raise
        raise explained from error
    if dist.is_initialized():
        dist.destroy_process_group()


def join_world(device: str = "auto", step_timeout: float = STEP_TIMEOUT) -> World:
    """Join the process group that torchrun set up, or return a world of one process.

    `step_timeout` is the timeout of every collective, in minutes.
    """
    kind = pick_device(device)
    if not inside_torchrun():
        return World(0, 1, torch.device(kind))
    if (parent := launcher()) is not None:
        end_with_parent(parent, signal.SIGKILL)  # no rank outlives its launcher
    chosen = torch.device(kind)
    options: dict[str, Any] = {"backend": "gloo"}
    if kind == "cuda":
        local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= gpus:
            raise UsageError(f"this machine has {gpus} GPUs, none for process {local_rank + 1}")
        chosen = torch.device(kind, local_rank)
        # Collectives of objects use the current device, which would be GPU 0 on every rank.
        torch.cuda.set_device(chosen)
        options = {"backend": "nccl", "device_id": chosen}  # without its device NCCL guesses one, and may hang
    timeout = timedelta(minutes=step_timeout)
    if not dist.is_initialized():
        dist.init_process_group(**options, timeout=timeout)
    return _with_restarts(World(dist.get_rank(), dist.get_world_size(), chosen, timeout=timeout))


def _with_restarts(world: World) -> World:
    """Record whether ranks were started before. torchrun counts only starts after a failure, so a mark counts all."""
    begun = None if (mark := stopped_mark()) is None else mark.with_name("begun")
    is_counted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_restarted = world.any(is_counted or (begun is not None and begun.exists()))
    if begun is not None:  # now that all have looked
        begun.touch()
    return dataclasses.replace(world, is_restarted=is_restarted)


def pick_device(wanted: str) -> str:
    """Return the device type to compute on: `wanted`, or for `auto` the best available. Turns TF32 off."""
    use_whole_float32()
    if wanted in {"auto", "cuda"} and torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise UsageError("train.device is cuda, but torch sees no CUDA device; use --set train.device=cpu")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise UsageError("train.device is mps, but torch sees no Apple GPU; use --set train.device=cpu")
    if wanted == "mps" or (wanted == "auto" and torch.backends.mps.is_available()):
        return "mps"
    return "cpu"
