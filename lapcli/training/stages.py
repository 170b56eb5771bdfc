"""The stages of a chat recipe, one run each: every stage starts from the weights of the one before."""

from pathlib import Path

from rich.console import Console

from lapcli.recipe.chat import STAGES, ChatRecipe, StageName, stage_recipe
from lapcli.recipe.schema import GPTRecipe
from lapcli.runs import INFO, Run, find_run, read_run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.ranks import join_world, leave_world
from lapcli.training.start import train_in_world

#: What a stage can start from.
PRETRAINED = {"language_model"}
STARTS = {"language_model", "chat"}


def start_of(runs_dir: Path, run: str | None) -> Run:
    """The run to start from: the named one, or the newest finished pretrained GPT."""
    return find_run(runs_dir, run, PRETRAINED if run is None else STARTS)


def train_stages(
    recipe: ChatRecipe,
    start: Run,
    *,
    runs_dir: Path,
    name: str,
    only: StageName | None = None,
    fresh: bool = False,
    console: Console,
) -> list[Run]:
    """Trains `<name>-midtrain`, then `<name>-sft`; `only` one of them. Finished ones are left as they are."""
    given = recipe.stages.given()
    if only is not None and only not in given:
        raise UsageError(f"the recipe has no stage {only}; it has {' and '.join(given)}")
    stages = [stage for stage in given if only in (None, stage)]
    if only is not None and start.recipe.objective in PRETRAINED:
        start = _stage_before(only, given, runs_dir, name) or start
    world = join_world(given[stages[0]].train.device)
    runs: list[Run] = []
    try:
        for stage in stages:
            if world.is_main:
                console.print(
                    f"{stage} starts from {start.path}, weights sha256 {start.info['weights_sha256'][:16]}",
                    highlight=False,
                )
            if not isinstance(start.recipe, GPTRecipe):
                raise UsageError(f"{start.path} is no run of a GPT; use --run")
            place = start.name if start.path.parent.resolve() == runs_dir.resolve() else str(start.path.resolve())
            staged = stage_recipe(recipe, stage, start.recipe, place, str(start.info["weights_sha256"]))
            run = train_in_world(world, staged, runs_dir=runs_dir, name=f"{name}-{stage}", fresh=fresh, console=console)
            start = read_run(run.path)
            runs.append(start)
    finally:
        leave_world()
    return runs


def _stage_before(stage: StageName, given: dict, runs_dir: Path, name: str) -> Run | None:
    """The finished run of the recipe's stage before, for `--stage sft` after `--stage midtrain`."""
    earlier = [other for other in STAGES[: STAGES.index(stage)] if other in given]
    if not earlier:
        return None
    path = runs_dir / f"{name}-{earlier[-1]}"
    run = read_run(path) if (path / INFO).exists() else None
    if run is None or not run.is_finished:
        raise UsageError(
            f"{stage} starts from {path}, which is not finished; run --stage {earlier[-1]} first, or leave --stage out"
        )
    return run
