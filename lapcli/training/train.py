"""From a recipe to a finished run: world, run, objective, loop, results."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lapcli.checkpoint import steps_in
from lapcli.objectives import objective_of
from lapcli.objectives.objective import Objective
from lapcli.objectives.weights import initial_weights, load_initial, with_sha256
from lapcli.recipe import recipe_hash
from lapcli.recipe.schema import BaseRecipe
from lapcli.result_rows import add_rows, row
from lapcli.runs import Run, discard_untrained, open_run, read_run, unlock, write_summary
from lapcli.runtime.devices import deterministic, prefer_attention_kernels, prepare_determinism
from lapcli.runtime.environment import STEP_TIMEOUT, usable_cores
from lapcli.runtime.errors import DataError, Diverged, ExitCode, Interrupted, LapError, UsageError, is_out_of_memory
from lapcli.runtime.files import check_room
from lapcli.runtime.progress import LogConsole
from lapcli.runtime.ranks import World, joined_world
from lapcli.runtime.signals import stop_at_once
from lapcli.training.loop import Loop
from lapcli.training.optimizers import state_bytes

_DEFAULT_THREADS = torch.get_num_threads()  # torch's own default: one for each physical core


def train_recipe(
    recipe: BaseRecipe,
    *,
    runs_dir: Path,
    name: str,
    fresh: bool = False,
    step_timeout: float = STEP_TIMEOUT,
    console: LogConsole,
) -> Run:
    """Train the run of that name to the end; a finished run is returned unchanged."""
    # Before the ranks join, which may start CUDA: cuBLAS and Inductor read their variables once.
    if recipe.train.deterministic:
        prepare_determinism()
    with joined_world(recipe.train.device, step_timeout) as world:
        return train_in_world(world, recipe, runs_dir=runs_dir, name=name, fresh=fresh, console=console)


def train_in_world(
    world: World, recipe: BaseRecipe, *, runs_dir: Path, name: str, fresh: bool = False, console: LogConsole
) -> Run:
    """Train a run with processes that have already joined and may train several runs in sequence."""
    if recipe.train.deterministic and world.device.type == "mps":
        raise UsageError("train.deterministic: Apple GPUs have no deterministic algorithms; use --set train.device=cpu")
    # Ranks that are restarted after a failure resume the run that they began with --fresh.
    fresh = fresh and not world.is_restarted
    with world.together():
        recipe = with_sha256(recipe, runs_dir / name, fresh)
    world.require_same({"recipe": recipe_hash(recipe)})  # another learning rate would train along unnoticed
    run: Run | None = None
    try:
        with world.together():
            if world.is_main:  # it holds the lock
                run = open_run(runs_dir, name, recipe, fresh, console.warn)
        with world.together():
            run = run or read_run(runs_dir / name)
        if not run.is_finished:
            _train(recipe, run, world, console)
        return run
    except BaseException as error:
        if run is not None and world.is_main and not isinstance(error, Diverged):  # a result, even in the first step
            discard_untrained(run)
        raise
    finally:
        if run is not None:
            unlock(run)


def _train(recipe: BaseRecipe, run: Run, world: World, console: LogConsole) -> None:
    objective: Objective[Any] = objective_of(recipe)(recipe)

    def report(**changes: Any) -> None:
        if world.is_main:
            run.update(**changes)

    try:
        with _threads(recipe, run, world), stop_at_once():  # signals: before the first step and after the last
            facts = _prepare(objective, recipe, run, world)
            parameters = sum(p.numel() for p in objective.model.parameters())
            is_cuda, batches = world.device.type == "cuda", objective.batches
            device = torch.cuda.get_device_name(world.device) if is_cuda else world.device.type
            report(
                status="running",
                failure=None,
                steps=objective.steps,
                world_size=world.size,
                threads=torch.get_num_threads(),
                device=f"{world.size} x {device}",
                parameters=parameters,
                **facts,
            )
            if world.is_main:
                console.print(
                    f"{run.path}: {objective.steps} steps of {objective.units_per_step:,} {objective.unit} "
                    f"({batches.processes} x {batches.micro_batch} x {batches.accumulation} accumulated), "
                    f"{parameters:,} parameters, on {world.size} x {device}"
                )
                for note in objective.notes:
                    console.print(note)
                console.print("setting up the optimizer and validating before the first step ...")
            loop = Loop(objective, recipe, run, world, console)
            is_deterministic = recipe.train.deterministic
            # The settings are restored for the samples at the end.
            with deterministic(is_deterministic), prefer_attention_kernels(world.device, is_deterministic):
                loop.train()
            with loop.gathered_weights(), world.together():
                if world.is_main:
                    _finish(run, loop)
    except (Interrupted, KeyboardInterrupt):
        with suppress(OSError):
            report(status="interrupted")
        raise
    except Exception as error:
        explained = _explained(error, recipe, objective, world)
        with suppress(OSError):  # on a full disk the first error is the one to report
            report(status="failed", failure=str(explained), diverged=isinstance(error, Diverged))
        if explained is not error:
            raise explained from error
        raise
    finally:
        objective.close()


def _prepare(objective: Objective[Any], recipe: BaseRecipe, run: Run, world: World) -> dict[str, Any]:
    """Prepare the data and build the model with its initial weights; return facts for `run.json`."""
    with world.together():
        if run.info.get("step", 0) == 0:  # a run that was started with such a schedule may be resumed
            for key, reason in recipe.schedule_problems():
                raise UsageError(f"{key} {reason}")
        initial = initial_weights(recipe, run)
        facts = objective.prepare(world, run, initial)
        original, saved = run.info.get("data_sha256"), steps_in(run.checkpoints)
        if saved and original not in (None, facts["data_sha256"]):
            raise DataError(
                f"the data of {run.path} has changed since it began (sha256 {original[:16]} then, "
                f"{facts['data_sha256'][:16]} now); restore it, or use --fresh or --name for a new run"
            )
        objective.build(world.device)
        if world.is_main:
            more = checkpoints_held(recipe, objective, objective.steps) - len(saved)
            what = f"the checkpoints of {run.name}"
            check_room(run.path, checkpoint_bytes(objective) * more, what, "lower checkpoint.keep")
        if initial is not None:
            objective.notes = [*load_initial(initial, objective.model, recipe), *objective.notes]
    identities = {"data": "data_sha256", "held-out data": "held_out_sha256", "tokenizer": "tokenizer_sha256"}
    # A collective: in `together` a rank that failed would skip it.
    world.require_same({what: facts.get(key) for what, key in identities.items()})
    return facts


def disk_bytes(recipe: BaseRecipe) -> int:
    """Return the maximum size of a run's checkpoints in bytes; no data is read."""
    objective = objective_of(recipe)(recipe)
    objective.build(torch.device("meta"))
    return checkpoint_bytes(objective) * checkpoints_held(recipe, objective, recipe.train.steps)


def checkpoint_bytes(objective: Objective[Any]) -> int:
    weights = sum(tensor.nbytes for tensor in objective.model.state_dict().values())
    return weights + state_bytes(objective.parameter_groups())


def checkpoints_held(recipe: BaseRecipe, objective: Objective[Any], steps: int | None) -> int:
    """Return the maximum number of a run's checkpoints: a new one is written before an old one is removed."""
    has_best = objective.best_metric is not None
    most = recipe.checkpoint.keep + has_best + 1
    if steps is None:
        return most
    saved_every = [recipe.checkpoint.every, recipe.validation.every if has_best else None]
    return min(most, 1 + sum(steps // every for every in saved_every if every))


def _explained(error: Exception, recipe: BaseRecipe, objective: Objective[Any], world: World) -> Exception:
    """Add what a user needs to know to some errors; return others as they are."""
    if isinstance(error, DataError) and not world.is_main and not error.is_echo:
        # For data that only this rank reads: rank 0 does not see the error and cannot report it.
        named = LapError(f"rank {world.rank}: {error}")
        named.exit_code = ExitCode.USAGE
        return named
    if not is_out_of_memory(error) or not hasattr(objective, "batches"):
        return error
    reason, size = str(error).splitlines()[0], objective.batches.micro_batch
    stage = getattr(recipe, "stage", None)  # of `lap sft`
    key = f"stages.{stage}.train.micro_batch" if stage else "train.micro_batch"
    smaller = f"run the same command with --set {key}={size // 2}" if size > 1 else "use a smaller model or context"
    return LapError(f"micro-batches of {size} do not fit into the memory of the device ({reason}); {smaller}")


def _finish(run: Run, loop: Loop) -> None:
    """Compute and write the results of the final weights, which are already saved; then the run is finished."""
    steps = loop.objective.steps
    start, end = loop.validated.get(0, {}), loop.validated.get(steps, {})
    best = loop.best_step()
    best_values = {} if best is None else {"best_step": best, "best": loop.validated[best]}
    summary = {"start": start, "end": end, **best_values, **loop.module(loop.objective.finish)}
    write_summary(run, summary)  # before the status: a finished run without a summary counts as incomplete
    rows: list[dict[str, Any]] = []
    data: dict[str, Any] = {"split": "validation", **{key: run.info.get(key) for key in ("data", "data_sha256")}}
    for step in {0, best or 0, steps} & loop.validated.keys():
        weights = run.info["weights_sha256"] if step == steps else None
        for name, value in loop.validated[step].items():
            unit, direction = run.recipe.metrics.get(name, (None, None))
            known = {"unit": unit, "direction": direction, "step": step, "weights_sha256": weights, **data}
            rows.append(row("validation", name.removeprefix("validation_"), value, **known))
    add_rows(run, rows)
    run.update(status="finished", step=steps, best_step=best)


@contextmanager
def _threads(recipe: BaseRecipe, run: Run, world: World) -> Iterator[None]:
    """Train with the recipe's number of threads, else the run's earlier one, else OMP_NUM_THREADS, else a fraction of
    the cores. It affects rounding, so it never depends on this process's earlier setting, and is restored."""
    # Another number of processes changes the bits anyway, and the cores per process.
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
