"""Next-token prediction with a GPT on text."""

from typing import TYPE_CHECKING, Any

from lapcli.kinds.kind import LANGUAGE, Fetched, Kind, LoadedModel, Start
from lapcli.recipe.schema import GPTRecipe, LanguageModelRecipe
from lapcli.runs import TOKENIZER, Run
from lapcli.runtime.progress import Progress, shown_progress

if TYPE_CHECKING:
    import torch

    from lapcli.runtime.ranks import World
    from lapcli.training.checkpoint import Checkpoint


class LanguageModelKind(Kind):
    name = "language_model"
    recipe = recipe_file = LanguageModelRecipe
    gives = frozenset({LANGUAGE})
    metrics = ("validation_loss", "validation_bits_per_byte")

    def start(self, recipe: LanguageModelRecipe, world: "World", run: Run) -> Start:
        from lapcli.data.text.tokens import prepare_text
        from lapcli.objectives.language_model import LanguageModel

        with shown_progress(world.is_main) as progress:
            data = prepare_text(recipe.data, recipe.tokenizer, progress=progress)
        if world.is_main and run.info.get("tokenizer_sha256") in (None, data.tokenizer.sha256):
            data.tokenizer.save(run.path / TOKENIZER)  # that of other data, which is refused, must not replace it
        facts = {"data": data.description, "data_sha256": data.identity, "tokenizer_sha256": data.tokenizer.sha256}
        return Start(LanguageModel(recipe, data, world), facts)

    def load(
        self, run: Run, checkpoint: "Checkpoint | None", device: "torch.device", *, float32: bool = False
    ) -> LoadedModel:
        return load_gpt(run, checkpoint, device, self.gives, float32=float32)

    def fetch(self, recipe: LanguageModelRecipe, progress: Progress) -> Fetched:
        from lapcli.data.text.tokens import prepare_text

        prepared = prepare_text(recipe.data, recipe.tokenizer, progress=progress)
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


def load_gpt(
    run: Run, checkpoint: "Checkpoint | None", device: "torch.device", gives: frozenset[str], *, float32: bool
) -> LoadedModel:
    """A GPT, and the tokenizer that it was trained with."""
    from lapcli.data.text.tokenizer import Tokenizer
    from lapcli.objectives.language_model import build_gpt
    from lapcli.training.checkpoint import load_weights

    recipe: Any = run.recipe
    assert isinstance(recipe, GPTRecipe)
    tokenizer = Tokenizer.from_file(run.path / TOKENIZER)
    run.check_tokenizer(tokenizer.sha256)
    changes = {"compile": False, **({"precision": "float32"} if float32 else {})}
    plain = recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
    model = build_gpt(plain, device, is_drawn=checkpoint is None)
    if checkpoint is not None:
        load_weights(checkpoint.weights, model, str(model.config.head_plan))
    return LoadedModel(
        name=run.name,
        module=model.eval(),
        gives=gives,
        weights="untrained" if checkpoint is None else "trained",
        weights_sha256=None if checkpoint is None else checkpoint.weights_sha256,
        step=0 if checkpoint is None else checkpoint.step,
        device=device,
        run=run,
        tokenizer=tokenizer,
    )


KIND = LanguageModelKind()
