"""From a recipe to a finished run: opens the run directory, builds the objective, trains, and writes the results."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from lapcli.objectives.objective import Closable, Objective
from lapcli.recipe import differing_keys, recipe_to_dict
from lapcli.recipe.schema import BaseRecipe
from lapcli.runs import Run, discard_untrained, open_run, plugins_of, read_run, unlock, write_summary
from lapcli.runtime.attention_kernels import prefer_attention_kernels
from lapcli.runtime.devices import deterministic, peak_memory, prepare_determinism
from lapcli.runtime.environment import STEP_TIMEOUT
from lapcli.runtime.errors import DataError, Diverged, ExitCode, Interrupted, LapError, UsageError, is_out_of_memory
from lapcli.runtime.machine import usable_cores
from lapcli.runtime.progress import LogConsole
from lapcli.runtime.ranks import World, is_restarted, joined_world
from lapcli.runtime.signals import stop_at_once
from lapcli.training.checkpoint import steps_in
from lapcli.training.loop import Loop

_DEFAULT_THREADS = torch.get_num_threads()  # torch's own default: one for each physical core


class PreparedTraining(Protocol):
    """What a kind of training prepares: its objective, facts about its data for `run.json`, and lines for the log."""

    @property
    def objective(self) -> Objective: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    @property
    def notes(self) -> list[str]: ...


class StartableKind(Protocol):
    """The part of a kind of training that starting a run needs."""

    def pinned(self, recipe: Any, path: Path, fresh: bool) -> Any: ...

    def start(self, recipe: Any, world: World, run: Run) -> PreparedTraining: ...


def train_recipe(
    kind: StartableKind,
    recipe: BaseRecipe,
    *,
    runs_dir: Path,
    name: str,
    fresh: bool = False,
    step_timeout: float = STEP_TIMEOUT,
    console: LogConsole,
) -> Run:
    """Train the run of that name to its end; a finished one is returned unchanged."""
    # Before the ranks join, which may start CUDA: cuBLAS and Inductor read their variables once.
    if recipe.train.deterministic:
        prepare_determinism()
    with joined_world(recipe.train.device, step_timeout) as world:
        return train_in_world(world, kind, recipe, runs_dir=runs_dir, name=name, fresh=fresh, console=console)


def train_in_world(
    world: World,
    kind: StartableKind,
    recipe: BaseRecipe,
    *,
    runs_dir: Path,
    name: str,
    fresh: bool = False,
    console: LogConsole,
) -> Run:
    """Train a run with processes that have joined already, which may train several runs one after the other."""
    if recipe.train.deterministic and world.device.type == "mps":
        raise UsageError("train.deterministic: Apple GPUs have no deterministic algorithms; use --set train.device=cpu")
    # Ranks that are started again after one died resume the run that they began with --fresh.
    fresh = fresh and not world.any(is_restarted())
    with world.together():
        recipe = kind.pinned(recipe, runs_dir / name, fresh)
    _refuse_other_recipes(world, recipe)
    run = _open_together(world, runs_dir, name, recipe, fresh, console)
    try:
        if not run.is_finished:
            _train(kind, recipe, run, world, console)
    except BaseException as error:
        if world.is_main and not isinstance(error, Diverged):  # which is a result, even in the first step
            discard_untrained(run)
        raise
    finally:
        unlock(run)
    return run


#: Keys that may differ between the machines of one run.
_OF_A_MACHINE = ("data.workers", "train.init_from.source", "train.init_from.weights")


def _refuse_other_recipes(world: World, recipe: BaseRecipe) -> None:
    """Refuse ranks with different recipes: those with another learning rate or start would train along unnoticed."""
    main_recipe: Any
    main_recipe, *others = world.from_all(recipe_to_dict(recipe))
    for rank, other_recipe in enumerate(others, start=1):
        differing = [row for row in differing_keys(main_recipe, other_recipe) if row[0] not in _OF_A_MACHINE]  # type: ignore[arg-type]
        if differing:
            key, main_value, other_value = differing[0]
            more = f" and {len(differing) - 1} more keys" if len(differing) > 1 else ""
            raise UsageError(
                f"rank {rank} has another recipe than rank 0: {key} is {other_value} instead of {main_value}{more}; "
                "start every machine with the same command and the same recipe"
            )


def _train(kind: StartableKind, recipe: BaseRecipe, run: Run, world: World, console: LogConsole) -> None:
    objective: Objective | None = None

    def report(**changes: Any) -> None:
        if world.is_main:
            run.update(**changes)

    try:
        with _threads(recipe, run, world), stop_at_once():  # signals: before the first step and after the last
            plugins = _current_plugins(recipe, run, console if world.is_main else None)
            with world.together():
                _refuse_misfits(recipe, run)
                start = kind.start(recipe, world, run)
                objective, facts = start.objective, start.facts
                _refuse_other_data(run, facts)
            world.require_same(_identities(facts))  # a collective: in `together` a rank that failed would skip it
            parameters = sum(p.numel() for p in objective.model.parameters())
            report(
                status="running",
                failure=None,
                steps=objective.steps,
                world_size=world.size,
                threads=torch.get_num_threads(),
                device=_device_name(world),
                parameters=parameters,
                flops_per_step=objective.flops_per_step,
                **plugins,
                **facts,
            )
            if world.is_main:
                batches = objective.batches
                console.print(
                    f"{run.path}: {objective.steps} steps of {objective.units_per_step:,} {objective.unit} "
                    f"({batches.processes} x {batches.micro_batch} x {batches.accumulation} accumulated), "
                    f"{parameters:,} parameters, on {_device_name(world)}"
                )
                for note in start.notes:
                    console.print(note)
                console.print("setting up the optimizer and validating before the first step ...")
            loop = Loop(objective, recipe, run, world, console)
            is_deterministic = recipe.train.deterministic
            with (  # the settings are restored for the samples at the end
                _named_rank(world),
                deterministic(is_deterministic),
                prefer_attention_kernels(world.device, is_deterministic),
            ):
                loop.train()
            with world.together():
                if world.is_main:
                    _finish(run, loop, _peak_memory(run, world))
    except (Interrupted, KeyboardInterrupt):
        with suppress(OSError):
            report(status="interrupted", peak_memory=_peak_memory(run, world))
        raise
    except Exception as error:
        explained = _out_of_memory(error, recipe, objective) or error
        with suppress(OSError):  # on a full disk the first error is the one to report
            report(status="failed", failure=str(explained), diverged=isinstance(error, Diverged))
        if explained is not error:
            raise explained from error
        raise
    finally:
        if isinstance(objective, Closable):
            objective.close()


def _out_of_memory(error: Exception, recipe: BaseRecipe, objective: Objective | None) -> LapError | None:
    """Explain that a device has no memory left, with the micro-batch to try; None for other errors."""
    if not is_out_of_memory(error) or objective is None:
        return None
    reason, size = str(error).splitlines()[0], objective.batches.micro_batch
    stage = getattr(recipe, "stage", None)  # of `lap sft`
    key = f"stages.{stage}.train.micro_batch" if stage else "train.micro_batch"
    smaller = f"run the same command with --set {key}={size // 2}" if size > 1 else "use a smaller model or context"
    return LapError(f"micro-batches of {size} do not fit into the memory of the device ({reason}); {smaller}")


def _current_plugins(recipe: BaseRecipe, run: Run, console: LogConsole | None) -> dict[str, Any]:
    """Return the packages that the run uses, for `run.json`; warn about one whose version has changed."""
    before = {(plugin["sort"], plugin["name"]): plugin for plugin in run.info.get("plugins", [])}
    current: list[dict[str, Any]] = []
    for plugin in plugins_of(recipe):
        old = before.get((plugin["sort"], plugin["name"]), plugin)
        earlier = old.get("earlier_versions", [])
        if old["version"] != plugin["version"]:
            earlier = [*earlier, old["version"]]
            if console is not None:
                console.warn(
                    f"{run.path} was trained with {old['package']} {old['version']} and is "
                    f"resumed with {plugin['package']} {plugin['version']}: the results may differ"
                )
        current.append({**plugin, **({"earlier_versions": earlier} if earlier else {})})
    return {"plugins": current} if current else {}


@contextmanager
def _named_rank(world: World) -> Iterator[None]:
    """Add the rank to an error about data that only this rank reads; rank 0 does not see it and cannot report it."""
    try:
        yield
    except DataError as error:
        if world.is_main or error.is_echo:
            raise
        named = LapError(f"rank {world.rank}: {error}")
        named.exit_code = ExitCode.USAGE
        raise named from error


def _refuse_other_data(run: Run, facts: dict[str, Any]) -> None:
    """Refuse to resume a run with other data than it was started with."""
    original = run.info.get("data_sha256")
    if steps_in(run.checkpoints) and original not in (None, facts["data_sha256"]):
        raise DataError(
            f"the data of {run.path} has changed since it began (sha256 {original[:16]} then, "
            f"{facts['data_sha256'][:16]} now); restore it, or use --fresh or --name for a new run"
        )


def _refuse_misfits(recipe: BaseRecipe, run: Run) -> None:
    """Refuse a schedule that does not fit into the run, unless the run was already started with it."""
    for key, reason in recipe.schedule_problems() if run.info.get("step", 0) == 0 else []:
        raise UsageError(f"{key} {reason}")


def _identities(facts: dict[str, Any]) -> dict[str, str | None]:
    """Return the hashes that must be the same on every rank, which could have other data or another tokenizer."""
    return {
        "data": facts["data_sha256"],
        "held-out data": facts.get("held_out_sha256"),
        "tokenizer": facts.get("tokenizer_sha256"),
    }


def _finish(run: Run, loop: Loop, peak_memory: int | None) -> None:
    """Compute and write the results of the final weights, which are saved already; then the run is finished."""
    steps = loop.objective.steps
    start, end = loop.validated.get(0, {}), loop.validated.get(steps, {})
    best = None if "metrics_lost" in run.info else loop.best_step()  # of lost validations one may have been better
    best_values = {} if best is None else {"best_step": best, "best": loop.validated[best]}
    summary = {"start": start, "end": end, **best_values, **loop.objective.finish(run.path)}
    write_summary(run, summary)  # before the status: a finished run without a summary counts as incomplete
    run.update(status="finished", step=steps, peak_memory=peak_memory)


def _open_together(
    world: World, runs_dir: Path, name: str, recipe: BaseRecipe, fresh: bool, console: LogConsole
) -> Run:
    """Create or open the run on rank 0, which holds its lock; if one rank fails, all ranks do."""
    run: Run | None = None
    try:
        with world.together():
            if world.is_main:
                run = open_run(runs_dir, name, recipe, fresh, console.warn)
        with world.together():
            return run or read_run(runs_dir / name)
    except BaseException:
        if run is not None:
            discard_untrained(run)
        raise


@contextmanager
def _threads(recipe: BaseRecipe, run: Run, world: World) -> Iterator[None]:
    """Train with the recipe's number of threads, else the run's earlier one, else OMP_NUM_THREADS, else a fraction of
    the cores. It affects rounding, so it never depends on what this process has set before, and is restored."""
    # Another number of processes changes the bits anyway, and each process's share of the cores.
    before = run.info.get("threads") if run.info.get("world_size") == world.size else None
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = recipe.train.threads or before or (int(given) if given.isdecimal() else 0)
    if not threads:
        threads = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))
        threads = min(threads, _DEFAULT_THREADS)
    process_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(process_threads)


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return f"{world.size} x {torch.cuda.get_device_name(world.device)}"
    return f"{world.size} x {world.device.type}"


def _peak_memory(run: Run, world: World) -> int | None:
    """Return the peak memory of rank 0's GPU or process in bytes; a resumed run keeps the larger number."""
    current = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else peak_memory()
    known = [value for value in (current, run.info.get("peak_memory")) if value]
    return max(known, default=None)
