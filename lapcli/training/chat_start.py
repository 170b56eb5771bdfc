"""The start of a chat stage's run: its weights and tokenizer from the run before it, and its conversations."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.objectives.chat import Chat, prepare_chat
from lapcli.recipe.chat import ChatStageRecipe
from lapcli.runs import CHECKPOINTS, Run
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import shown_progress
from lapcli.runtime.ranks import World
from lapcli.training import checkpoint

TOKENIZER = "tokenizer.json"


def build_chat(recipe: ChatStageRecipe, world: World, run: Run) -> tuple[Chat, dict[str, Any]]:
    """The objective, and what `run.json` says of its start and its data."""
    before = folder_of(recipe.start.run, run.path.parent)
    weights = weights_with(before / CHECKPOINTS, recipe.start.weights_sha256)
    if weights is None and checkpoint.newest(run.checkpoints, warn=lambda text: None) is None:
        raise DataError(
            f"{run.path} starts from weights with the sha256 {recipe.start.weights_sha256[:16]} of {before}, which has "
            "no whole checkpoint of them any more; train it again, then use --fresh"
        )
    own = run.path / TOKENIZER
    tokenizer = Tokenizer.from_file(own if own.is_file() else before / TOKENIZER)
    if tokenizer.vocab_size != recipe.tokenizer.vocab:
        raise DataError(
            f"{before / TOKENIZER} has {tokenizer.vocab_size:,} tokens, its model {recipe.tokenizer.vocab:,}"
        )
    with shown_progress() if world.is_main else nullcontext() as progress:
        data = prepare_chat(recipe, tokenizer, progress)
    if world.is_main and not own.is_file():
        tokenizer.save(own)
    facts = {
        "started_from": {"run": recipe.start.run, "weights_sha256": recipe.start.weights_sha256},
        "data": data.description,
        "data_sha256": data.train.identity,
        "rows_without_target": data.train.dropped,
        "cut_rows": data.train.cut,
        "cut_share": data.train.cut / len(data.train),
        "malformed_rows": sum(part.rows.malformed for part in data.train.parts),
        "tokenizer_sha256": tokenizer.sha256,
        "notes": [data.description, *data.train.malformed_examples()],
    }
    return Chat(recipe, data, weights, world), facts


def folder_of(run: str, runs_dir: Path) -> Path:
    """A run is recorded by its name where it stands beside the new one, else by its path."""
    return runs_dir / run if (runs_dir / run).exists() else Path(run)


def weights_with(checkpoints: Path, sha256: str) -> Path | None:
    """The whole weights with that hash, newest checkpoint first."""
    for step in reversed(checkpoint.steps_in(checkpoints)):
        path = checkpoints / f"step-{step:06d}"
        if checkpoint.find_damage(path) is None:
            found = checkpoint.Checkpoint.read(path)
            if found.weights_sha256 == sha256:
                return found.weights
    return None
