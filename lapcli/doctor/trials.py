"""Small trainings that checks start: a GPT of two layers on a made-up text, with one or several ranks, one of which may
kill itself at a given step.

A trial is described by a file and trained by `python -m lapcli.doctor.trials FILE`, in a process of its own: settings
of CUDA can be made only once in a process, and a rank that kills itself must not end the command.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lapcli.runtime.devices import prepare_determinism
from lapcli.runtime.environment import end_process
from lapcli.runtime.errors import ExitCode, LapError
from lapcli.runtime.signals import end_with_parent

#: Seconds after which a trial is considered to hang; the first step may compile for minutes.
TRIAL_TIMEOUT = 900.0
#: Seconds between the death of a rank and the killing of the others, which wait for it.
GRACE = 5.0
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran", "round", "and", "round", "it"]


@dataclass(frozen=True)
class TrialTraining:
    """A small training. With `die_before_step`, the process of `die_rank` kills itself when it requests that step's
    batch."""

    folder: str
    name: str
    steps: int
    device: str = "auto"
    deterministic: bool = False
    die_before_step: int | None = None
    die_rank: int = 0
    exchange_bytes: int = 0  # size of a sum over the ranks that is timed before they train
    seed: int = 0
    ranks: int = 1
    keeps: int = 1  # checkpoints, the last ones

    @property
    def run(self) -> Path:
        return Path(self.folder) / "runs" / self.name

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def result_file(self, rank: int) -> Path:
        return Path(self.folder) / f"{self.name}.rank{rank}.json"


def recipe_of(trial: TrialTraining) -> dict[str, Any]:
    """Return a recipe: two micro-batches a step and rank, a checkpoint after every step, validation only at the end."""
    text = Path(trial.folder) / "text.txt"
    if not text.exists():
        lines = [" ".join(WORDS[(i * i + j * (i % 5 + 1)) % len(WORDS)] for j in range(12)) for i in range(600)]
        text.write_text("\n".join(lines), encoding="utf-8")
    return {
        "objective": "language_model",
        "seed": trial.seed,
        "model": {"layers": 2, "width": 64, "heads": 4, "context": 64, "laplacian_heads": 2},
        "tokenizer": {"vocab": 300},
        "data": {"train": str(text), "validation": 0.2},
        "train": {
            "steps": trial.steps,
            "batch": 8 * trial.ranks,
            "micro_batch": 4,
            "device": trial.device,
            "deterministic": trial.deterministic,
            "threads": 1,
        },
        "validation": {"every": None, "tokens": 64, "prompts": []},
        "checkpoint": {"every": 1, "keep": trial.keeps},
    }


def train_trial(
    trial: TrialTraining, kind: Any = None, die: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)
) -> dict[str, Any]:
    """Train in this process, as a rank if torchrun's variables are set; return what was observed."""
    from lapcli.kinds import kind_of
    from lapcli.recipe import BaseRecipe, recipe_from_dict
    from lapcli.runtime.progress import LogConsole
    from lapcli.runtime.ranks import joined_world
    from lapcli.training.train import train_in_world

    recipe = recipe_from_dict(recipe_of(trial))
    assert isinstance(recipe, BaseRecipe)
    if trial.deterministic:
        # Before anything starts CUDA: cuBLAS reads its variable only once.
        prepare_determinism()
    console = LogConsole()
    console.quiet = True
    with joined_world(trial.device) as world:
        seen: dict[str, Any] = {"exchange_seconds": _exchange(trial.exchange_bytes, world)}
        observed = _ObservedKind(kind or kind_of(recipe), trial, die)
        train_in_world(world, observed, recipe, runs_dir=trial.run.parent, name=trial.name, console=console)
        if observed.objective is not None:
            seen |= {"waits": observed.objective.waits, "weights": _weights_hash(observed.objective.model)}
    trial.result_file(world.rank).write_text(json.dumps(seen))
    return seen


def _exchange(size: int, world: Any) -> float | None:
    """Return the seconds of the fastest of five sums over the ranks, after one to warm up."""
    if not size or world.size == 1:
        return None
    import torch
    import torch.distributed as dist

    values = torch.ones(size // 4, device=world.device)
    seconds = []
    for _ in range(6):
        world.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        float(values[0])  # waits for the GPU
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _weights_hash(model: Any) -> str:
    sha256 = hashlib.sha256()
    for parameter in model.state_dict().values():
        # numpy has no bf16; float32 holds it exactly.
        sha256.update(parameter.detach().float().cpu().numpy().tobytes())
    return sha256.hexdigest()


class _ObservedKind:
    """A kind whose objective counts the host's waits in the third step, and kills its process if the trial says so."""

    def __init__(self, kind: Any, trial: TrialTraining, die: Callable[[], None]) -> None:
        self._kind, self._trial, self._die = kind, trial, die
        self.objective: _Observed | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def start(self, recipe: Any, world: Any, run: Any) -> Any:
        from lapcli.kinds import TrainingStart

        start = self._kind.start(recipe, world, run)
        dies_before = self._trial.die_before_step if world.rank == self._trial.die_rank else None
        self.objective = _Observed(start.objective, dies_before, self._die, world.device)
        return TrainingStart(self.objective, start.facts, start.notes)


class _Observed:
    COUNTED = 2  # the third step: the first one compiles, the second still creates optimizer states

    def __init__(self, objective: Any, dies_before: int | None, die: Callable[[], None], device: Any) -> None:
        self._objective, self._dies_before, self._die, self._device = objective, dies_before, die, device
        self._counter: Any = None
        self.waits: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def batch(self, step: int, micro_step: int) -> Any:
        if step == self._dies_before:
            self._die()
        if step == self.COUNTED and micro_step == 0:
            from lapcli.runtime.counting import HostWaits

            self._counter = HostWaits(self._device).__enter__()
        return self._objective.batch(step, micro_step)

    def after_step(self, step: int) -> None:
        self._objective.after_step(step)
        if self._counter is not None and step == self.COUNTED:
            self._counter.__exit__(None, None, None)
            # The right side is evaluated first, while the counter is still there.
            self._counter, self.waits = None, len(self._counter)


@dataclass(frozen=True)
class TrialOutcome:
    """How the ranks of a trial ended: exit codes, what each observed, and the last line of the first that failed."""

    codes: list[int]
    seen: list[dict[str, Any]]
    said: str

    def failure(self) -> str | None:
        failed = [(rank, code) for rank, code in enumerate(self.codes) if code]
        if not failed:
            return None
        rank, code = failed[0]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} {how}" + (f" ({self.said})" if self.said else "")


def start_trial(trial: TrialTraining, hang: float = TRIAL_TIMEOUT) -> TrialOutcome:
    """Train with `trial.ranks` processes and wait for them; once one dies the others get a few seconds."""
    folder, ranks = Path(trial.folder), trial.ranks
    file = folder / f"{trial.name}.trial.json"
    file.write_text(json.dumps(asdict(trial)))
    logs = [folder / f"{trial.name}.rank{rank}.log" for rank in range(ranks)]
    for rank in range(ranks):
        trial.result_file(rank).unlink(missing_ok=True)
    command = [sys.executable, "-m", "lapcli.doctor.trials", str(file)]
    environments = _rank_environments(ranks)
    children = []
    for log, environment in zip(logs, environments, strict=True):
        with log.open("w") as opened:
            # The tokens of the trial stay out of the user's cache and are removed with the folder.
            cache = {"LAP_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
            environment = {**os.environ, **cache, **environment}
            children.append(subprocess.Popen(command, env=environment, stdout=opened, stderr=opened))
    _wait_for_all(children, hang)
    codes = [child.returncode for child in children]
    failed = [rank for rank, code in enumerate(codes) if code]
    lines = logs[failed[0]].read_text(errors="replace").strip().splitlines() if failed else []
    files = [trial.result_file(rank) for rank in range(ranks)]
    return TrialOutcome(
        codes, [json.loads(x.read_text()) if x.exists() else {} for x in files], lines[-1] if lines else ""
    )


def _rank_environments(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as free:  # port 0: the system chooses one that is free
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    world["MASTER_PORT"] = str(port)
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _wait_for_all(children: Sequence[subprocess.Popen[Any]], hang: float) -> None:
    deadline = time.monotonic() + hang
    try:
        while any(child.poll() is None for child in children):
            # Only codes other than 0 count: a rank that finished does not hurry the others.
            if any(child.poll() for child in children):
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def main() -> None:
    end_with_parent(os.getppid(), signal.SIGKILL)

    trial = TrialTraining(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        train_trial(trial)
    except LapError as error:
        print(error, file=sys.stderr)
        end_process(error.exit_code)
    except Exception:
        traceback.print_exc()
        end_process(ExitCode.FAILED)


if __name__ == "__main__":
    main()
