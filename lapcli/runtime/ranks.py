"""The processes of one run: who we are, on which device, and the few collectives the loop needs."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lapcli.runtime.devices import use_whole_float32
from lapcli.runtime.errors import DataError, ExitCode, Interrupted, LapError, UsageError

TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank; all ranks must ask."""
        return self.sum([float(flag)])[0] > 0

    def sum(self, values: list[float]) -> list[float]:
        if self.size == 1:
            return values
        # float64 so that counts of tokens and bytes stay exact.
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        total = torch.tensor(values, dtype=dtype, device=self.device)
        dist.all_reduce(total)
        return [float(x) for x in total.tolist()]

    def from_main(self, value: object) -> object:
        """What rank 0 has, on every rank (a path, an error message: plain values only)."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def from_all(self, value: object) -> list[object]:
        """What each rank has, in their order, on every rank (plain values only)."""
        if self.size == 1:
            return [value]
        found: list[object] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def require_same(self, identities: Mapping[str, str | None]) -> None:
        """DataError on every rank if one of them has another identity (a sha256, by what it is of) than rank 0."""
        found: list[Any] = self.from_all((platform.node(), dict(identities)))
        hosts, theirs = [host for host, _ in found], [given for _, given in found]
        others = [rank for rank in range(self.size) if theirs[rank] != theirs[0]]
        if not others:
            return
        named = [f"rank {rank} on {hosts[rank]}" for rank in others[:8]]
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        what = [
            f"{name} (sha256 {(theirs[others[0]].get(name) or 'none')[:16]} instead of {(value or 'none')[:16]})"
            for name, value in theirs[0].items()
            if any(theirs[rank].get(name) != value for rank in others)
        ]
        raise DataError(
            f"{', '.join(named)}{more} {'differs' if len(others) == 1 else 'differ'} from rank 0 on {hosts[0]} in "
            f"{' and '.join(what)}; copy the same files to every machine, then run it again"
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Where one rank fails, all of them fail, with its message: none is left waiting for it.

        For work without collectives of its own: a rank that fails would skip them.
        """
        error: Exception | None = None
        try:
            yield
        except Interrupted:  # ends at once: the signal goes to all ranks
            raise
        except Exception as caught:
            error = caught
        mine = None
        if error is not None:
            code = error.exit_code if isinstance(error, LapError) else ExitCode.FAILED
            mine = f"rank {self.rank} on {platform.node()}: {error or type(error).__name__}", int(code)
        said = [found for found in self.from_all(mine) if isinstance(found, tuple)]
        if error is not None:
            if isinstance(error, LapError):
                error.is_echo = not self.is_main  # rank 0 says it
            raise error
        if said:
            message, code = said[0]
            echo = DataError(message) if code == ExitCode.USAGE else LapError(message)
            echo.is_echo = not self.is_main
            raise echo


def inside_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join_world(device: str = "auto") -> World:
    """Joins the process group that torchrun set up, or stands alone."""
    kind = pick_device(device)
    if not inside_torchrun():
        return World(0, 1, torch.device(kind))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        # torchrun's agent keeps its store over a restart, with the addresses of ranks that are dead; a prefix for
        # each attempt keeps the new ranks from waiting for them.
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        attempt = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(dist.get_rank(), dist.get_world_size(), chosen)


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def pick_device(wanted: str) -> str:
    """The kind of device to compute on: `wanted`, or for `auto` the best there is. float32 is whole from here on."""
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


def is_main_process() -> bool:
    """Also after the process group is gone."""
    return os.environ.get("RANK", "0") == "0"
