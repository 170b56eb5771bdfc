"""A finished run's GPT with its tokenizer, ready to be used."""

from typing import NamedTuple

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.evaluation.run_tasks import find_weights
from lapcli.models.gpt import GPT
from lapcli.objectives.language_model import build_gpt
from lapcli.recipe.schema import GPTRecipe
from lapcli.runs import TOKENIZER, Run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.ranks import World, join_world
from lapcli.training import checkpoint


class LoadedGPT(NamedTuple):
    model: GPT
    tokenizer: Tokenizer
    weights_sha256: str


def load_gpt(run: Run, world: World | None = None, saved: checkpoint.Checkpoint | None = None) -> LoadedGPT:
    """Weights are checked against their hash and their head plan, the tokenizer against the one they were made with.

    `saved`: the checkpoint to load; by default the last one.
    """
    recipe = run.recipe
    if not isinstance(recipe, GPTRecipe):
        raise UsageError(f"{run.path} is no run of a GPT; use --run")
    if saved is None:
        saved = find_weights(run, "last")
    tokenizer = Tokenizer.from_file(run.path / TOKENIZER)
    run.check_tokenizer(tokenizer.sha256)
    device = (world or join_world(recipe.train.device)).device
    plain = recipe.model_copy(update={"train": recipe.train.model_copy(update={"compile": False})})
    model = build_gpt(plain, device)
    checkpoint.load_weights(saved.weights, model, str(model.config.head_plan))
    return LoadedGPT(model.eval(), tokenizer, saved.weights_sha256)
