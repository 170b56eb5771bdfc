"""Chat training in stages: each stage is a run of its own that starts from the weights of the one before."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lapcli.kinds.kind import (
    CHAT,
    LANGUAGE,
    RUN,
    Fetched,
    Kind,
    LoadedModel,
    PlanFacts,
    TrainingStart,
    TrainingStep,
    with_initial_weights,
)
from lapcli.kinds.language_model import gpt_training_step, load_gpt, token_facts
from lapcli.recipe import find_recipe, load_recipe
from lapcli.recipe.chat import STAGES, ChatRecipe, ChatStageRecipe, PretrainedGPT, StageName, stage_recipe
from lapcli.recipe.schema import (
    UNKNOWN,
    AnyRecipe,
    BaseRecipe,
    GPTModel,
    GPTRecipe,
    InitFrom,
    Source,
    TextSource,
    TokenizerSection,
)
from lapcli.runs import CHECKPOINTS, INFO, TOKENIZER, Run, find_run, named_run, read_run
from lapcli.runtime.devices import prepare_determinism
from lapcli.runtime.environment import STEP_TIMEOUT
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.progress import LogConsole, Progress, shown_progress

if TYPE_CHECKING:
    import torch

    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.objectives.objective import BatchPlan
    from lapcli.runtime.devices import ComputePolicy
    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint

#: Objectives of the runs that a stage can start from, without and with --run.
PRETRAINED = {"language_model"}
STARTS = {"language_model", "chat"}


class ChatKind(Kind):
    name = "chat"
    recipe = ChatStageRecipe
    recipe_file = ChatRecipe
    gives = frozenset({LANGUAGE, CHAT})
    metrics = ("validation_loss", "validation_bits_per_byte")
    data_identity_has_seed = True  # it includes the order of conversations

    def start(self, recipe: ChatStageRecipe, world: "World", run: Run) -> TrainingStart:
        from lapcli.kinds.initial_weights import find_initial_weights
        from lapcli.objectives.chat import Chat, prepare_chat
        from lapcli.training import checkpoint

        initial, weights = find_initial_weights(recipe, run), None
        if initial is not None:
            tokenizer = initial.tokenizer(recipe)
        else:
            weights, tokenizer = _start_of_stage(recipe, run)
        with shown_progress(world.is_main) as progress:
            data = prepare_chat(recipe, tokenizer, progress)
        if world.is_main and "tokenizer_sha256" not in run.info:
            tokenizer.save(run.path / TOKENIZER)
        facts = {
            **({"started_from": recipe.start.model_dump()} if recipe.start else {}),
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
        notes = [data.description, *data.train.malformed_examples()]
        return with_initial_weights(objective, facts, notes, initial, recipe)

    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        return load_gpt(run, checkpoint, device, self.gives, float32=float32)

    def paper_recipe(self, recipe: ChatStageRecipe) -> tuple[str, AnyRecipe]:
        paper, base = load_recipe(find_recipe("chat561m")), load_recipe(find_recipe("gpt561m"))
        assert isinstance(paper, ChatRecipe)
        assert isinstance(base, GPTRecipe)
        staged = stage_recipe(paper, recipe.stage, base, None, "")
        return "chat561m", staged.model_copy(update={"start": recipe.start})

    def fetch(self, recipe: ChatRecipe, progress: Progress) -> Fetched:
        """Download every data set of every mixture, each once."""
        from lapcli.data.chat.mixture import fetch_data_sets

        rows = fetch_data_sets(recipe, progress)
        lines = []
        for row in rows:
            size = f"{row['bytes'] / 1e6:,.1f} MB" if row["bytes"] else "generated"
            lines.append(f"{row['name']:<24}{row['rows']:>10,} rows   {size:<12}{row['source']}")
        return Fetched(rows, lines)

    def data_of(self, run: Run) -> tuple[Run, Source]:
        """Return the text that the model was pretrained on, on which a chat stage is measured too."""
        from lapcli.kinds import kind_of

        recipe: Any = run.recipe
        init_from = recipe.train.init_from
        if recipe.start is not None:
            before = read_run(folder_of(recipe.start.run, run.path.parent))
        elif init_from is not None and init_from.source.startswith(RUN):
            before = named_run(run.path.parent, init_from.source.removeprefix(RUN).partition("@")[0])
        elif init_from is not None and (Path(init_from.source).expanduser() / INFO).is_file():
            before = read_run(Path(init_from.source).expanduser())
        else:
            return run, TextSource(train=UNKNOWN)
        return kind_of(before.recipe).data_of(before)

    def load_with_data(self, path: Path, overrides: Sequence[str], data: Path) -> ChatRecipe:
        return load_chat_recipe(path, overrides, data)

    def run_recipes(self, recipe: ChatRecipe, runs_dir: Path, run: str | None) -> dict[str, BaseRecipe]:
        init_from = None if run is not None else init_from_of(recipe)
        first = stage_start(init_from, runs_dir) if init_from is not None else StageStart.of(start_of(runs_dir, run))
        return {stage: first.recipe(recipe, stage, runs_dir) for stage in recipe.stages.given()}

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
    """Load a recipe with stages; `data` is a folder with copies of its data sets."""
    from lapcli.data.chat.formats import with_local_data

    loaded = load_recipe(path, overrides, seed)
    if not isinstance(loaded, ChatRecipe):
        raise UsageError(f"{path} has no stages; it is trained by `lap train {path}`")
    return loaded if data is None else with_local_data(loaded, data)


def folder_of(run: str, runs_dir: Path) -> Path:
    """Return the folder of a recorded run: recorded by its name if it is in `runs_dir`, else by its path."""
    return runs_dir / run if (runs_dir / run).exists() else Path(run)


def _start_of_stage(recipe: ChatStageRecipe, run: Run) -> "tuple[Path | None, Tokenizer]":
    """Return weights and tokenizer of the run that the stage starts from; weights are None if a resume needs none."""
    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.training import checkpoint

    if recipe.start is None:
        raise UsageError(f"{run.path} was imported and cannot be trained; use `lap sft RECIPE --run {run.name}`")
    before = folder_of(recipe.start.run, run.path.parent)
    weights = _weights_with(before / CHECKPOINTS, recipe.start.weights_sha256)
    if weights is None and checkpoint.newest(run.checkpoints, warn=lambda text: None) is None:
        raise DataError(
            f"{run.path} starts from weights with the sha256 {recipe.start.weights_sha256[:16]} of {before}, which "
            "no longer has an intact checkpoint with them; train it again, then use --fresh"
        )
    # A run that was stopped before its first step has no tokenizer yet.
    source = run if "tokenizer_sha256" in run.info else read_run(before)
    tokenizer = Tokenizer.from_file(source.path / TOKENIZER)
    source.check_tokenizer(tokenizer.sha256)
    if tokenizer.vocab_size != recipe.tokenizer.vocab:
        raise DataError(
            f"{source.path / TOKENIZER} has {tokenizer.vocab_size:,} tokens, its model {recipe.tokenizer.vocab:,}"
        )
    return weights, tokenizer


def _weights_with(checkpoints: Path, sha256: str) -> Path | None:
    """Return the intact weights with that hash, of the newest checkpoint that has them."""
    from lapcli.training import checkpoint

    for step in reversed(checkpoint.steps_in(checkpoints)):
        path = checkpoints / f"step-{step:06d}"
        with suppress(DataError):
            if (intact := checkpoint.read(path)).weights_sha256 == sha256:
                return intact.weights
    return None


def start_of(runs_dir: Path, run: str | None) -> Run:
    """Return the run to start from: the named one, or the newest finished pretrained GPT."""
    return find_run(runs_dir, run, PRETRAINED if run is None else STARTS)


def stage_of(run: Run, stage: str, runs_dir: Path) -> Run:
    """Return the run of that stage: the run itself, or the one that `lap sft` trained from it."""
    if isinstance(run.recipe, ChatStageRecipe) and run.recipe.stage == stage:
        return run
    path = runs_dir / f"{run.name}-{stage}"
    if run.recipe.objective not in PRETRAINED or not (path / INFO).is_file():
        raise UsageError(
            f"there is no {stage} stage of {run.name} ({path}); train it with `lap sft`, or name it: --run"
        )
    return read_run(path)


class _Shape(NamedTuple):
    """A `PretrainedGPT` without a run."""

    model: GPTModel
    tokenizer: TokenizerSection


@dataclass(frozen=True)
class StageStart:
    """The start of a stage: a finished run, or the weights of `train.init_from`."""

    shown: str
    gpt: PretrainedGPT
    tokenizer: "Callable[[], Tokenizer]"
    run: Run | None = None
    init_from: InitFrom | None = None

    @classmethod
    def of(cls, run: Run) -> "StageStart":
        from lapcli.data.text.tokenizer import Tokenizer

        if not isinstance(run.recipe, GPTRecipe):
            raise UsageError(f"{run.path} is not a run of a GPT; name one with --run")
        shown = f"{run.path}, weights sha256 {str(run.info.get('weights_sha256'))[:16]}"
        return cls(shown, run.recipe, lambda: Tokenizer.from_file(run.path / TOKENIZER), run)

    def recipe(self, recipe: ChatRecipe, stage: StageName, runs_dir: Path) -> ChatStageRecipe:
        if self.run is None:
            return stage_recipe(recipe, stage, self.gpt, None, "", self.init_from)
        beside = self.run.path.parent.resolve() == runs_dir.resolve()
        place = self.run.name if beside else str(self.run.path.resolve())
        return stage_recipe(recipe, stage, self.gpt, place, str(self.run.info.get("weights_sha256", "0" * 64)))


def init_from_of(recipe: ChatRecipe) -> InitFrom | None:
    """Return `train.init_from` of the first stage, if the recipe has one."""
    return next(iter(recipe.stages.given().values())).train.init_from


def stage_start(given: InitFrom, runs_dir: Path, begun: Path | None = None) -> StageStart:
    """Return weights of any source as a start; if a stage was `begun` with them, its run replaces the source."""
    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.kinds.weight_sources import find_source

    if begun is not None and (begun / INFO).is_file() and (begun / TOKENIZER).is_file():
        run = read_run(begun)
        before = run.recipe.train.init_from
        if isinstance(run.recipe, GPTRecipe) and before is not None and before.source == given.source:
            return StageStart(given.source, run.recipe, lambda: Tokenizer.from_file(begun / TOKENIZER), None, given)
    source = find_source(given, runs_dir)
    if source.tokenizer is None:
        raise UsageError(
            f"{source.shown} is not a GPT with its tokenizer; if it is one of nanochat's, import it with `lap import "
            f"{given.source} --to NAME --tokenizer FILE`"
        )
    tokenizer = source.tokenizer()
    model = GPTModel(**source.model)
    return StageStart(
        source.shown, _Shape(model, TokenizerSection(vocab=tokenizer.vocab_size)), lambda: tokenizer, None, given
    )


def train_stages(
    recipe: ChatRecipe,
    start: Run | InitFrom,
    *,
    runs_dir: Path,
    name: str,
    only: StageName | None = None,
    fresh: bool = False,
    step_timeout: float = STEP_TIMEOUT,
    console: LogConsole,
) -> list[Run]:
    """Train `<name>-midtrain`, then `<name>-sft`; with `only`, one of them. Finished ones are skipped."""
    from lapcli.runtime.ranks import joined_world
    from lapcli.training.train import train_in_world

    given = recipe.stages.given()
    if only is not None and only not in given:
        raise UsageError(f"the recipe has no stage {only}; it has {' and '.join(given)}")
    stages = [stage for stage in given if only in (None, stage)]
    if isinstance(start, Run) and only is not None and start.recipe.objective in PRETRAINED:
        start = _stage_before(only, given, runs_dir, name) or start
    if any(given[stage].train.deterministic for stage in stages):
        prepare_determinism()  # before joining, which may start CUDA
    runs: list[Run] = []
    with joined_world(given[stages[0]].train.device, step_timeout) as world:
        with world.together():
            if isinstance(start, Run):
                first = StageStart.of(start)
            else:
                first = stage_start(start, runs_dir, None if fresh else runs_dir / f"{name}-{stages[0]}")
            later = [stage for stage in stages[1:] if fresh or not _is_finished(runs_dir / f"{name}-{stage}")]
            _check_stages(recipe, later, first, runs_dir, world)
        for stage in stages:
            if world.is_main:
                console.print(f"{stage} starts from {first.shown}")
            if first.run is not None and first.run.path.resolve() == (runs_dir / f"{name}-{stage}").resolve():
                raise UsageError(f"{first.run.path} cannot start from itself; choose another --name or --run")
            run = train_in_world(
                world,
                KIND,
                first.recipe(recipe, stage, runs_dir),
                runs_dir=runs_dir,
                name=f"{name}-{stage}",
                fresh=fresh,
                console=console,
            )
            # Read again: only rank 0 has updated its own, and the next stage's recipe has the sha256 of the weights.
            runs.append(read_run(run.path))
            first = StageStart.of(runs[-1])
    return runs


def _check_stages(
    recipe: ChatRecipe, stages: list[StageName], start: StageStart, runs_dir: Path, world: "World"
) -> None:
    """Check data, batches and prompts of later stages, so that a missing file is found now and not after days."""
    from lapcli.objectives.chat import plan_stage, prepare_chat

    if not stages:
        return
    tokenizer = start.tokenizer()
    for stage in stages:
        staged = start.recipe(recipe, stage, runs_dir)
        with shown_progress(world.is_main) as progress:
            data = prepare_chat(staged, tokenizer, progress)
        try:
            plan_stage(staged, data, world)
        except UsageError as error:
            raise type(error)(f"stage {stage}: {error}") from None


def _is_finished(path: Path) -> bool:
    return (path / INFO).exists() and read_run(path).is_finished


def _stage_before(stage: StageName, given: dict, runs_dir: Path, name: str) -> Run | None:
    """Return the finished run of the recipe's previous stage, for `--stage sft` after `--stage midtrain`."""
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
