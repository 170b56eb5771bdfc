"""`lap fetch RECIPE`: do everything that a run needs the network for, and print the sizes."""

from typing import TYPE_CHECKING

from lapcli.commands import options

if TYPE_CHECKING:
    from lapcli.recipe.chat import ChatRecipe
    from lapcli.recipe.self_supervised import SelfSupervisedRecipe
    from lapcli.recipe.vision import ClassificationRecipe

EXAMPLES = """\b
Examples:
  lap fetch recipes/gpt561m.yaml
  lap fetch recipes/gpt561m.yaml --data ~/fineweb-edu --json
  lap fetch recipes/chat561m.yaml
"""


def fetch(
    recipe: options.Recipe, set_: options.Set = None, data: options.Data = None, as_json: options.Json = False
) -> None:
    """Download RECIPE's data, once, and tokenise its text. Afterwards everything runs with HF_HUB_OFFLINE=1."""
    import json

    from lapcli.data.text.tokens import prepare_text
    from lapcli.recipe import load_recipe
    from lapcli.recipe.chat import ChatRecipe
    from lapcli.recipe.schema import LanguageModelRecipe
    from lapcli.recipe.self_supervised import SelfSupervisedRecipe
    from lapcli.recipe.vision import ClassificationRecipe
    from lapcli.runtime.errors import UsageError
    from lapcli.runtime.progress import shown_progress

    loaded = load_recipe(recipe, set_ or [])
    if isinstance(loaded, ChatRecipe):
        _fetch_chat(options.chat_recipe(recipe, set_, data), as_json)
        return
    loaded = load_recipe(recipe, options.overrides(set_, data))
    if isinstance(loaded, ClassificationRecipe | SelfSupervisedRecipe):
        _fetch_images(loaded, as_json)
        return
    if not isinstance(loaded, LanguageModelRecipe):
        raise UsageError(f"{recipe} trains on nothing that could be fetched")
    with shown_progress() as progress:
        prepared = prepare_text(loaded.data, loaded.tokenizer, progress=progress)
    on_disk = sum(path.stat().st_size for path in prepared.folder.iterdir())
    if as_json:
        facts = {
            "source": loaded.data.train,
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
        print(json.dumps(facts, indent=2))
        return
    rows = {
        "source": f"{loaded.data.train}, files: {prepared.source_files:,}, {prepared.source_bytes / 1e6:,.1f} MB",
        "documents": f"{prepared.documents:,}",
        "train": f"{len(prepared.train):,} tokens",
        "validation": f"{len(prepared.validation):,} tokens",
        "vocabulary": f"{prepared.tokenizer.vocab_size:,} tokens, sha256 {prepared.tokenizer.sha256[:16]}",
        "tokenised": f"{on_disk / 1e6:,.1f} MB in {prepared.folder}",
    }
    for name, value in rows.items():
        print(f"{name:<12}{value}")


def _fetch_images(recipe: "ClassificationRecipe | SelfSupervisedRecipe", as_json: bool) -> None:
    import json

    from lapcli.data.images.sources import open_images
    from lapcli.runtime.progress import shown_progress

    with shown_progress() as progress:
        data = open_images(recipe.data, getattr(recipe.model, "classes", None), progress)
    facts = {
        "source": recipe.data.train,
        "classes": len(data.train.classes),
        "train_images": len(data.train),
        "validation_images": len(data.validation),
        "identity": data.identity,
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<19}{f'{value:,}' if isinstance(value, int) else value}")


def _fetch_chat(recipe: "ChatRecipe", as_json: bool) -> None:
    """Every data set of every mixture, each once."""
    import json

    from lapcli.data.chat.counts import fetch_data_sets
    from lapcli.runtime.progress import shown_progress

    with shown_progress() as progress:
        found = fetch_data_sets(recipe, progress)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for row in found:
        size = f"{row['bytes'] / 1e6:,.1f} MB" if row["bytes"] else "generated"
        print(f"{row['name']:<24}{row['rows']:>10,} rows   {size:<12}{row['source']}")
