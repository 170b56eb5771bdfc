"""How much a recipe would still download, as far as it is known without asking the hub."""

from lapcli.data.hub import cached_hub_files
from lapcli.data.text.sources import hub_list
from lapcli.recipe.schema import TextSource
from lapcli.recipe.vision import ImageFiles

#: Bytes of a file, roughly: shards are closed at 250 million characters and compressed.
TEXT_FILE_BYTES = {"karpathy/fineweb-edu-100b-shuffle": 100_000_000}
#: Bytes of all files of image sets, roughly.
IMAGE_SET_BYTES = {
    "hub:uoft-cs/cifar10": 144_000_000,
    "hub:uoft-cs/cifar100": 142_000_000,
    "hub:ILSVRC/imagenet-1k": 166_000_000_000,
}
NOTHING = 0, "nothing"


def text_download(source: TextSource) -> tuple[int | None, str]:
    if not source.train.startswith("hub:"):
        return NOTHING
    repository, names = hub_list(source)
    missing = [name for name in names if cached_hub_files(repository, [name], source.revision) is None]
    if not missing:
        return NOTHING
    each = TEXT_FILE_BYTES.get(repository)
    return _said(None if each is None else each * len(missing), f"{len(missing):,} files of {repository}")


def image_download(source: ImageFiles) -> tuple[int | None, str]:
    if not source.train.startswith("hub:"):
        return NOTHING
    return _said(IMAGE_SET_BYTES.get(source.train), source.train.removeprefix("hub:"))


def _said(size: int | None, what: str) -> tuple[int | None, str]:
    if size is None:
        return None, f"{what}; how large they are only the hub knows"
    return size, f"about {size / 1e9:,.1f} GB, unless it is here already: {what}"
