"""Chat training in stages: each stage is a run of its own that starts from the weights of the one before."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.kinds.kind import CHAT, LANGUAGE, Fetched, Kind, LoadedModel, PlanFacts, Start, TrainingStep
from lapcli.kinds.language_model import gpt_training_step, load_gpt, token_facts
from lapcli.recipe import load_recipe
from lapcli.recipe.chat import STAGES, ChatRecipe, ChatStageRecipe, StageName, stage_recipe
from lapcli.recipe.schema import BaseRecipe, GPTRecipe, Source
from lapcli.runs import CHECKPOINTS, INFO, TOKENIZER, Run, find_run, read_run
from lapcli.runtime.determinism import prepare_determinism
from lapcli.runtime.environment import STEP_TIMEOUT
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.progress import Progress, shown_progress

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from lapcli.objectives.objective import BatchPlan
    from lapcli.runtime.devices import ComputePolicy
    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint

#: What a stage can start from.
PRETRAINED = {"language_model"}
STARTS = {"language_model", "chat"}


class ChatKind(Kind):
    name = "chat"
    recipe = ChatStageRecipe
    recipe_file = ChatRecipe
    gives = frozenset({LANGUAGE, CHAT})
    metrics = ("validation_loss", "validation_bits_per_byte")
    data_identity_has_seed = True  # the order of conversations is a part of it

    def start(self, recipe: ChatStageRecipe, world: "World", run: Run) -> Start:
        from lapcli.data.text.tokenizer import Tokenizer
        from lapcli.objectives.chat import Chat, prepare_chat
        from lapcli.training import checkpoint

        before = folder_of(recipe.start.run, run.path.parent)
        weights = _weights_with(before / CHECKPOINTS, recipe.start.weights_sha256)
        if weights is None and checkpoint.newest(run.checkpoints, warn=lambda text: None) is None:
            raise DataError(
                f"{run.path} starts from weights with the sha256 {recipe.start.weights_sha256[:16]} of {before}, which "
                "no longer has a whole checkpoint with them; train it again, then use --fresh"
            )
        has_own = "tokenizer_sha256" in run.info  # otherwise it was stopped before its first step
        source = run if has_own else read_run(before)
        tokenizer = Tokenizer.from_file(source.path / TOKENIZER)
        source.check_tokenizer(tokenizer.sha256)
        if tokenizer.vocab_size != recipe.tokenizer.vocab:
            raise DataError(
                f"{source.path / TOKENIZER} has {tokenizer.vocab_size:,} tokens, its model {recipe.tokenizer.vocab:,}"
            )
        with shown_progress(world.is_main) as progress:
            data = prepare_chat(recipe, tokenizer, progress)
        if world.is_main and not has_own:
            tokenizer.save(run.path / TOKENIZER)
        facts = {
            "started_from": {"run": recipe.start.run, "weights_sha256": recipe.start.weights_sha256},
            "data": data.description,
            "data_sha256": data.train.identity,
            "held_out_sha256": data.validation.identity if data.validation else None,
            "rows_without_target": data.train.dropped,
            "cut_rows": data.train.cut,
            "cut_share": data.train.cut / len(data.train),
            "malformed_rows": sum(part.rows.malformed for part in data.train.parts),
            "tokenizer_sha256": tokenizer.sha256,
        }
        objective = Chat(recipe, data, world)
        if weights is not None:
            checkpoint.load_weights(weights, objective.model, objective.weights_metadata()["laplacian_heads"])
        return Start(objective, facts, [data.description, *data.train.malformed_examples()])

    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        return load_gpt(run, checkpoint, device, self.gives, float32=float32)

    def fetch(self, recipe: ChatRecipe, progress: Progress) -> Fetched:
        """Every data set of every mixture, each once."""
        from lapcli.data.chat.mixture import fetch_data_sets

        rows = fetch_data_sets(recipe, progress)
        lines = []
        for row in rows:
            size = f"{row['bytes'] / 1e6:,.1f} MB" if row["bytes"] else "generated"
            lines.append(f"{row['name']:<24}{row['rows']:>10,} rows   {size:<12}{row['source']}")
        return Fetched(rows, lines)

    def data_of(self, run: Run) -> tuple[Run, Source]:
        """The text that the model was pretrained on: a chat stage is measured on the same."""
        from lapcli.kinds import kind_of

        recipe: Any = run.recipe
        before = read_run(folder_of(recipe.start.run, run.path.parent))
        return kind_of(before.recipe).data_of(before)

    def load_with_data(self, path: Path, overrides: Sequence[str], data: Path) -> ChatRecipe:
        return load_chat_recipe(path, overrides, data)

    def run_recipes(self, recipe: ChatRecipe, runs_dir: Path, run: str | None) -> dict[str, BaseRecipe]:
        start = start_of(runs_dir, run)
        weights_sha256 = str(start.info.get("weights_sha256", "0" * 64))
        return {
            stage: stage_recipe(recipe, stage, _gpt_recipe(start), start.name, weights_sha256)
            for stage in recipe.stages.given()
        }

    def training_step(self, recipe: ChatStageRecipe, device: "torch.device", policy: "ComputePolicy") -> TrainingStep:
        return gpt_training_step(recipe, device, policy, any_length=recipe.batching == "padded")

    def plan_facts(self, recipe: ChatStageRecipe, batches: "BatchPlan") -> PlanFacts:
        from lapcli.data.chat.mixture import count_stage

        counts = count_stage(recipe.stage, recipe)
        facts = token_facts(recipe, counts.steps)
        if recipe.batching == "padded":
            longest = (
                f"at most: rows are padded to the longest of a micro-batch, here to {recipe.model.context:,} tokens"
            )
            facts |= {"example": "conversations", "lines": {**facts["lines"], "length": longest}}
        missing = [count.name for count in (*counts.train, *counts.validation) if count.available is None]
        if missing:
            facts |= {"download": f"{', '.join(missing)}, whose size only the hub knows", "download_bytes": None}
        return PlanFacts(
            steps=counts.steps,
            epochs=None if recipe.train.steps else recipe.train.epochs,
            data=counts.to_text(),
            **facts,
        )


def load_chat_recipe(
    path: Path, overrides: Sequence[str] = (), data: Path | None = None, seed: int | None = None
) -> ChatRecipe:
    """A recipe with stages; `data` is a folder with copies of its data sets."""
    from lapcli.data.chat.data_sets import with_local_data

    loaded = load_recipe(path, overrides, seed)
    if not isinstance(loaded, ChatRecipe):
        raise UsageError(f"{path} has no stages; it is trained by `lap train {path}`")
    return loaded if data is None else with_local_data(loaded, data)


def folder_of(run: str, runs_dir: Path) -> Path:
    """A run is recorded by its name where it stands beside the new one, else by its path."""
    return runs_dir / run if (runs_dir / run).exists() else Path(run)


def _weights_with(checkpoints: Path, sha256: str) -> Path | None:
    """The whole weights with that hash, newest checkpoint first."""
    from lapcli.training import checkpoint

    for step in reversed(checkpoint.steps_in(checkpoints)):
        path = checkpoints / f"step-{step:06d}"
        if checkpoint.find_damage(path) is None:
            whole = checkpoint.Checkpoint.read(path)
            if whole.weights_sha256 == sha256:
                return whole.weights
    return None


def start_of(runs_dir: Path, run: str | None) -> Run:
    """The run to start from: the named one, or the newest finished pretrained GPT."""
    return find_run(runs_dir, run, PRETRAINED if run is None else STARTS)


def _gpt_recipe(run: Run) -> GPTRecipe:
    if not isinstance(run.recipe, GPTRecipe):
        raise UsageError(f"{run.path} is not a run of a GPT; name one with --run")
    return run.recipe


def train_stages(
    recipe: ChatRecipe,
    start: Run,
    *,
    runs_dir: Path,
    name: str,
    only: StageName | None = None,
    fresh: bool = False,
    step_timeout: float = STEP_TIMEOUT,
    console: "Console",
) -> list[Run]:
    """Trains `<name>-midtrain`, then `<name>-sft`; with `only`, one of them. Finished ones are left as they are."""
    from lapcli.runtime.ranks import join_world, leave_world
    from lapcli.training.start import train_in_world

    given = recipe.stages.given()
    if only is not None and only not in given:
        raise UsageError(f"the recipe has no stage {only}; it has {' and '.join(given)}")
    stages = [stage for stage in given if only in (None, stage)]
    if only is not None and start.recipe.objective in PRETRAINED:
        start = _stage_before(only, given, runs_dir, name) or start
    if any(given[stage].train.deterministic for stage in stages):
        prepare_determinism()
    world = join_world(given[stages[0]].train.device, step_timeout)
    runs: list[Run] = []
    try:
        with world.together():
            later = [stage for stage in stages[1:] if fresh or not _is_finished(runs_dir / f"{name}-{stage}")]
            _check_stages(recipe, later, start, world)
        for stage in stages:
            if world.is_main:
                console.print(
                    f"{stage} starts from {start.path}, weights sha256 {start.info['weights_sha256'][:16]}",
                    highlight=False,
                )
            if start.path.resolve() == (runs_dir / f"{name}-{stage}").resolve():
                raise UsageError(f"{start.path} cannot start from itself; choose another --name or --run")
            place = start.name if start.path.parent.resolve() == runs_dir.resolve() else str(start.path.resolve())
            staged = stage_recipe(recipe, stage, _gpt_recipe(start), place, str(start.info["weights_sha256"]))
            run = train_in_world(
                world, KIND, staged, runs_dir=runs_dir, name=f"{name}-{stage}", fresh=fresh, console=console
            )
            start = read_run(run.path)
            runs.append(start)
    finally:
        leave_world()
    return runs


def _check_stages(recipe: ChatRecipe, stages: list[StageName], start: Run, world: "World") -> None:
    """Data, batches and prompts of stages whose turn comes later: a missing file is found now, not after days."""
    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.objectives.chat import plan_stage, prepare_chat

    if not stages:
        return
    tokenizer = Tokenizer.from_file(start.path / TOKENIZER)
    for stage in stages:
        staged = stage_recipe(recipe, stage, _gpt_recipe(start), start.name, str(start.info["weights_sha256"]))
        with shown_progress(world.is_main) as progress:
            data = prepare_chat(staged, tokenizer, progress)
        try:
            plan_stage(staged, data, world)
        except UsageError as error:
            raise type(error)(f"stage {stage}: {error}") from None


def _is_finished(path: Path) -> bool:
    return (path / INFO).exists() and read_run(path).is_finished


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


KIND = ChatKind()
