"""Public data sets by name: sizes for `lap plan` before anything is downloaded, and the places of files on the hub.

Names are those of a recipe's `data.train`. The files of benchmarks are declared by each benchmark.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lapcli.recipe.data_sources import PREFIX, find_source


@dataclass(frozen=True)
class KnownSet:
    train_images: int | None = None
    download_bytes: int | None = None  # all files together, roughly
    file_bytes: int | None = None  # one file, roughly
    revision: str | None = None  # if the default branch has no parquet files
    files: Mapping[str, str] = field(default_factory=dict)  # of that revision, by split


KNOWN_SETS: dict[str, KnownSet] = {
    "builtin": KnownSet(train_images=1_797),  # of images: scikit-learn's digits
    "hub:uoft-cs/cifar10": KnownSet(train_images=50_000, download_bytes=144_000_000),
    "hub:uoft-cs/cifar100": KnownSet(train_images=50_000, download_bytes=142_000_000),
    "hub:ILSVRC/imagenet-1k": KnownSet(train_images=1_281_167, download_bytes=166_000_000_000),
    # A shard has 250 million characters, compressed.
    "hub:karpathy/fineweb-edu-100b-shuffle": KnownSet(file_bytes=100_000_000),
    # ADE20K: the hub's copy is a loading script, which `datasets` no longer runs; the hub has converted it to parquet.
    "hub:zhoubolei/scene_parse_150": KnownSet(
        revision="refs/convert/parquet",
        files={split: f"scene_parsing/{split}/*.parquet" for split in ("train", "validation")},
    ),
}


def known_set(source: str) -> KnownSet:
    """Return the facts about a source, all None if it is not in the table and does not declare them."""
    if source.startswith(PREFIX):
        return KnownSet(train_images=getattr(find_source(source, "images"), "train_images", None))
    return KNOWN_SETS.get(source, KnownSet())
