"""Chat training in stages: each stage is a separate run that starts from the weights of the previous stage."""

from pathlib import Path

from lapcli.objectives.chat import Chat
from lapcli.objectives.weights import open_weights
from lapcli.recipe.chat import ChatRecipe, ChatStageRecipe, StageName, stage_recipe
from lapcli.recipe.schema import RUN, GPTModel, InitFrom, TokenizerSection
from lapcli.runs import INFO, Run, read_run
from lapcli.runtime.devices import prepare_determinism
from lapcli.runtime.environment import STEP_TIMEOUT
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import LogConsole, shown_progress
from lapcli.runtime.ranks import joined_world
from lapcli.training.train import train_in_world


class StageStart:
    """A stage's initial weights, with the model and tokenizer that it inherits."""

    def __init__(self, given: InitFrom, runs_dir: Path) -> None:
        self.given, source = given, open_weights(given, runs_dir)
        self.tokenizer = source.tokenizer()
        self._model = GPTModel(**source.model)

    def recipe(self, recipe: ChatRecipe, stage: StageName) -> ChatStageRecipe:
        section = TokenizerSection(vocab=self.tokenizer.vocab_size)
        return stage_recipe(recipe, stage, self._model, section, self.given)


def from_run(run: Run, runs_dir: Path) -> InitFrom:
    """Return a run as the source of weights: by name if it is in `runs_dir`, else by path."""
    beside = run.path.parent.resolve() == runs_dir.resolve()
    source = f"{RUN}{run.name}" if beside else str(run.path.resolve())
    return InitFrom(source=source, sha256=run.info.get("weights_sha256"))


def stage_recipes(recipe: ChatRecipe, given: InitFrom, runs_dir: Path) -> dict[str, ChatStageRecipe]:
    """Return the recipes of all stages for plans, as if each stage started from those weights."""
    start = StageStart(given, runs_dir)
    return {stage: start.recipe(recipe, stage) for stage in recipe.stages.given()}


def train_stages(
    recipe: ChatRecipe,
    start_from: Run | InitFrom,
    *,
    runs_dir: Path,
    name: str,
    fresh: bool = False,
    step_timeout: float = STEP_TIMEOUT,
    console: LogConsole,
) -> list[Run]:
    """Train `<name>-midtrain`, then `<name>-sft`, or the recipe's only stage. Finished ones are skipped."""
    sections = recipe.stages.given()
    stages = list(sections)
    given = from_run(start_from, runs_dir) if isinstance(start_from, Run) else start_from
    if any(section.train.deterministic for section in sections.values()):
        prepare_determinism()  # before joining, which may start CUDA
    runs: list[Run] = []
    with joined_world(sections[stages[0]].train.device, step_timeout) as world:
        with world.together():
            start = StageStart(given, runs_dir)
            # Data, batches and prompts of later stages, so that a missing file is reported now instead of after days.
            for stage in stages[1:]:
                path = runs_dir / f"{name}-{stage}"
                if not fresh and (path / INFO).exists() and read_run(path).is_finished:
                    continue
                try:
                    with shown_progress(world.is_main) as progress:
                        Chat(start.recipe(recipe, stage)).use(start.tokenizer, world, progress)
                except UsageError as error:
                    raise type(error)(f"stage {stage}: {error}") from None
        for stage in stages:
            if world.is_main:
                console.print(f"{stage} starts from {start.given.source}")
            if start.given.source in (f"{RUN}{name}-{stage}", str((runs_dir / f"{name}-{stage}").resolve())):
                raise UsageError(f"{name}-{stage} cannot start from itself; choose another --name or --run")
            run = train_in_world(
                world,
                start.recipe(recipe, stage),
                runs_dir=runs_dir,
                name=f"{name}-{stage}",
                fresh=fresh,
                console=console,
            )
            # Read again: only rank 0's copy is updated, and the next stage's recipe has the sha256 of the weights.
            runs.append(read_run(run.path))
            if stage != stages[-1]:
                start = StageStart(from_run(runs[-1], runs_dir), runs_dir)
    return runs
