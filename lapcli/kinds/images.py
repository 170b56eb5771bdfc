"""What the kinds of image training share: fetching images, planning their download, and loading a ViT."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lapcli.data.known_sets import known_set
from lapcli.kinds.kind import Fetched, describe_download
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from lapcli.training.checkpoint import Checkpoint


def fetch_images(source: ImageFiles, classes: int | None, progress: Progress) -> Fetched:
    from lapcli.data.images.sources import open_images

    data = open_images(source, classes, progress)
    facts = {
        "source": source.train,
        "classes": len(data.train.classes),
        "train_images": len(data.train),
        "validation_images": len(data.validation),
        "identity": data.identity,
    }
    lines = [
        f"{name.replace('_', ' '):<19}{f'{value:,}' if isinstance(value, int) else value}"
        for name, value in facts.items()
    ]
    return Fetched(facts, lines)


def download_facts(source: ImageFiles) -> dict[str, Any]:
    """The fields of a plan's facts."""

    if not source.train.startswith("hub:"):
        return {}
    return describe_download(known_set(source.train).download_bytes, source.train.removeprefix("hub:"))


def load_vit(build: "Callable[[int | None], nn.Module]", recipe: Any, checkpoint: "Checkpoint | None") -> Any:
    """The model that `build` makes from a seed, with the weights of the checkpoint; without one, untrained."""
    import torch

    from lapcli.training.checkpoint import load_weights

    if checkpoint is None:
        return build(recipe.seed)
    with torch.device("meta"):  # nothing is drawn only to be overwritten
        model = build(None)
    model.to_empty(device="cpu")
    load_weights(checkpoint.weights, model, str(recipe.model.head_plan()))
    return model
