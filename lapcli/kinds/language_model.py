"""Next-token prediction with a GPT on text."""

from typing import TYPE_CHECKING, Any

from lapcli.data.source_files import cached_hub_files
from lapcli.data.sources import known_set
from lapcli.kinds.kind import (
    HELD_OUT_TEXT,
    LANGUAGE,
    Fetched,
    Kind,
    LoadedModel,
    PlanFacts,
    TrainingStart,
    TrainingStep,
    describe_download,
    with_initial_weights,
)
from lapcli.recipe import find_recipe, load_recipe
from lapcli.recipe.schema import AnyRecipe, GPTRecipe, LanguageModelRecipe, TextSource, TokenizerSection
from lapcli.runs import TOKENIZER, Run
from lapcli.runtime.environment import runs_dir
from lapcli.runtime.progress import Progress, shown_progress

if TYPE_CHECKING:
    import torch

    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.objectives.objective import BatchPlan
    from lapcli.runtime.devices import ComputePolicy
    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint


class LanguageModelKind(Kind):
    name = "language_model"
    recipe = recipe_file = LanguageModelRecipe
    gives = frozenset({LANGUAGE, HELD_OUT_TEXT})
    metrics = ("validation_loss", "validation_bits_per_byte")

    def start(self, recipe: LanguageModelRecipe, world: "World", run: Run) -> TrainingStart:
        from lapcli.data.text.tokens import prepare_text
        from lapcli.kinds.initial_weights import find_initial_weights
        from lapcli.objectives.language_model import LanguageModel

        initial = find_initial_weights(recipe, run)
        tokenizer = recipe.tokenizer if initial is None else initial.tokenizer(recipe)
        with shown_progress(world.is_main) as progress:
            data = prepare_text(recipe.data, tokenizer, progress=progress)
        # The tokenizer of changed data, which is refused later, must not replace the run's own.
        if world.is_main and run.info.get("tokenizer_sha256") in (None, data.tokenizer.sha256):
            data.tokenizer.save(run.path / TOKENIZER)
        facts = {"data": data.description, "data_sha256": data.identity, "tokenizer_sha256": data.tokenizer.sha256}
        return with_initial_weights(LanguageModel(recipe, data, world), facts, [], initial, recipe)

    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        return load_gpt(run, checkpoint, device, self.gives, float32=float32)

    def paper_recipe(self, recipe: LanguageModelRecipe) -> tuple[str, AnyRecipe]:
        return "gpt561m", load_recipe(find_recipe("gpt561m"))

    def fetch(self, recipe: LanguageModelRecipe, progress: Progress) -> Fetched:
        from lapcli.data.text.tokens import prepare_text

        prepared = prepare_text(recipe.data, _tokenizer_to_fetch(recipe), progress=progress)
        on_disk = sum(path.stat().st_size for path in prepared.folder.iterdir())
        facts = {
            "source": recipe.data.train,
            "source_files": prepared.source_files,
            "source_bytes": prepared.source_bytes,
            "documents": prepared.documents,
            "vocab": prepared.tokenizer.vocab_size,
            "train_tokens": len(prepared.train),
            "validation_tokens": len(prepared.validation),
            "bytes_on_disk": on_disk,
            "folder": str(prepared.folder),
            "identity": prepared.identity,
            "tokenizer_sha256": prepared.tokenizer.sha256,
        }
        rows = {
            "source": f"{recipe.data.train}, files: {prepared.source_files:,}, {prepared.source_bytes / 1e6:,.1f} MB",
            "documents": f"{prepared.documents:,}",
            "train": f"{len(prepared.train):,} tokens",
            "validation": f"{len(prepared.validation):,} tokens",
            "vocabulary": f"{prepared.tokenizer.vocab_size:,} tokens, sha256 {prepared.tokenizer.sha256[:16]}",
            "tokenised": f"{on_disk / 1e6:,.1f} MB in {prepared.folder}",
        }
        return Fetched(facts, [f"{name:<12}{value}" for name, value in rows.items()])

    def training_step(
        self, recipe: LanguageModelRecipe, device: "torch.device", policy: "ComputePolicy"
    ) -> TrainingStep:
        return gpt_training_step(recipe, device, policy)

    def plan_facts(self, recipe: LanguageModelRecipe, batches: "BatchPlan") -> PlanFacts:
        from lapcli.data.text.tokens import describe_source

        return PlanFacts(
            steps=recipe.train.steps,
            epochs=None if recipe.train.steps else recipe.train.epochs,
            data=describe_source(recipe.data, recipe.tokenizer),
            **_download_facts(recipe.data),
            **token_facts(recipe, recipe.train.steps),
        )


def _tokenizer_to_fetch(recipe: LanguageModelRecipe) -> "TokenizerSection | Tokenizer":
    init_from = recipe.train.init_from
    if init_from is None:
        return recipe.tokenizer
    from lapcli.kinds.initial_weights import source_tokenizer
    from lapcli.kinds.weight_sources import find_source

    return source_tokenizer(find_source(init_from, runs_dir()), recipe)


def token_facts(recipe: GPTRecipe, steps: int | None) -> dict[str, Any]:
    """Return the fields of `PlanFacts` for batches of sequences as long as the context, counted in tokens."""
    tokens_per_step = recipe.train.batch * recipe.model.context
    tokens = None if steps is None else steps * tokens_per_step
    return {
        "example": "sequences",
        "unit": "token",
        "units_per_example": recipe.model.context,
        "lines": {"tokens": "-" if tokens is None else f"{tokens:,}"},
        "values": {"tokens_per_step": tokens_per_step, "tokens": tokens},
    }


def _download_facts(source: TextSource) -> dict[str, Any]:
    from lapcli.data.text.corpus import hub_list

    if not source.train.startswith("hub:"):
        return {}
    repository, names = hub_list(source)
    missing = [name for name in names if cached_hub_files(repository, [name], source.revision) is None]
    if not missing:
        return {}
    each = known_set(source.train).file_bytes
    return describe_download(None if each is None else each * len(missing), f"{len(missing):,} files of {repository}")


def gpt_training_step(
    recipe: GPTRecipe, device: "torch.device", policy: "ComputePolicy", any_length: bool = False
) -> TrainingStep:
    import torch

    from lapcli.objectives.language_model import build_gpt, parameter_groups

    model = build_gpt(recipe, device, any_length=any_length, policy=policy)

    def synthetic_batch(sequences: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(sequences, recipe.model.context, dtype=torch.long, device=device)

    def loss(tokens_BT: torch.Tensor) -> torch.Tensor:
        return model.loss(tokens_BT, tokens_BT)

    return TrainingStep(model, lambda: parameter_groups(recipe, model), synthetic_batch, loss)


def load_gpt(
    run: Run, checkpoint: "Checkpoint | None", device: "torch.device", gives: frozenset[str], *, float32: bool
) -> LoadedModel:
    """Load a GPT and the tokenizer that it was trained with."""
    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.objectives.language_model import build_gpt
    from lapcli.training.checkpoint import load_weights

    recipe: Any = run.recipe
    assert isinstance(recipe, GPTRecipe)
    tokenizer = Tokenizer.from_file(run.path / TOKENIZER)
    run.check_tokenizer(tokenizer.sha256)
    # Evaluations have too many shapes to compile.
    changes = {"compile": False, **({"precision": "float32"} if float32 else {})}
    plain = recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
    model = build_gpt(plain, device, is_drawn=checkpoint is None)
    if checkpoint is not None:
        load_weights(checkpoint.weights, model, str(model.config.head_plan()))
    return LoadedModel.from_run(run, checkpoint, model.cast_weights().eval(), device, gives, tokenizer=tokenizer)


KIND = LanguageModelKind()
