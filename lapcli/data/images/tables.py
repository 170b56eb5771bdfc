"""Images in tables: hub data sets by name, and local folders of parquet files with the hub's columns and splits.

Both use `datasets.load_dataset`, so that local files and the hub's behave alike. It converts local files once, in a
folder of our cache, and recognises them by name and modification time.
"""

import os
from pathlib import Path
from typing import Any

from lapcli.data.images.image_set import ImageSet, check_labels
from lapcli.runtime.environment import cache_dir, hub_is_offline
from lapcli.runtime.errors import DataError

#: Larger labels are no classes, but something else, such as an id of each image.
MOST_CLASSES = 1_000_000
#: Names of a source's held-out split, in order of preference: ImageNet's `test` has no labels, its `validation` has.
HELD_OUT = ("validation", "valid", "val", "test")


class TableImages(ImageSet):
    def __init__(
        self, table: Any, source: str, split: str, image_column: str, label_column: str, turned: bool = False
    ) -> None:
        from datasets import ClassLabel
        from datasets import Image as ImageFeature

        self._place = f"{source}, split {split}"
        labels = table[label_column][:]  # a column of `datasets` 4 is lazy; the slice reads it once
        feature = table.features[label_column]
        if isinstance(feature, ClassLabel):
            classes = list(feature.names)
        else:
            known = [label if isinstance(label, int) else -1 for label in labels]
            highest = max(known, default=-1)
            if highest >= MOST_CLASSES:
                raise DataError(
                    f"{self.name(known.index(highest))} has the label {highest:,}; labels are the numbers of classes "
                    f"from 0, at most {MOST_CLASSES:,}: choose another data.label_column"
                )
            classes = [str(number) for number in range(highest + 1)]
        super().__init__(check_labels(labels, len(classes), self.name), classes, turned)
        if not len(self):
            raise DataError(f"{self._place} has no rows")
        self._column = image_column
        self._table = table.select_columns([image_column]).cast_column(image_column, ImageFeature(decode=False))

    def encoded(self, index: int) -> bytes:
        cell = self._table[index][self._column]
        if cell and cell["bytes"] is not None:
            return bytes(cell["bytes"])
        if not cell or not cell["path"]:
            raise DataError(f"{self.name(index)} has no image in column {self._column}")
        try:
            return Path(cell["path"]).read_bytes()
        except OSError as error:
            raise DataError(f"{self.name(index)}: {cell['path']} cannot be read ({error.strerror})") from None

    def name(self, index: int) -> str:
        return f"{self._place}, row {index}"


def open_tables(
    source: str,
    revision: str | None,
    image_column: str | None,
    label_column: str | None,
    turned: bool = False,
) -> tuple[TableImages, TableImages | None]:
    """Open the training images, and those that the source holds out; `source` is hub:OWNER/NAME or a folder."""
    splits = load_tables(source, revision)
    if "train" not in splits:
        raise DataError(f"{source} has no split `train`; it has {', '.join(splits)}")
    held_out = next((name for name in HELD_OUT if name in splits), None)
    parts = []
    for split in ("train", held_out):
        if split is not None:
            table = splits[split]
            image = _column(table, source, image_column, _images(table), "image")
            label = _column(table, source, label_column, _labels(table), "label")
            parts.append(TableImages(table, source, split, image, label, turned))
    return parts[0], parts[1] if len(parts) > 1 else None


def load_tables(source: str, revision: str | None, **options: Any) -> Any:
    """Load the splits of a hub data set or of a folder of parquet files; DataError with the next step on failure."""
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError

    is_hub = source.startswith("hub:")
    datasets.disable_progress_bars()
    if hub_is_offline():  # the libraries read the variable only when they are imported, which may be earlier
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        if is_hub:
            return datasets.load_dataset(source.removeprefix("hub:"), revision=revision, **options)
        folder, place = str(Path(source).expanduser()), str(cache_dir() / "datasets")
        return datasets.load_dataset(folder, cache_dir=place, **options)
    except GatedRepoError:
        raise DataError(f"{source} is gated; accept its terms and log in with `hf auth login`") from None
    except Exception as error:
        reason = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0][:200]
        if is_hub:
            raise DataError(
                f"{source} could not be loaded ({reason}); run `lap fetch RECIPE` where the hub can be reached, "
                "or give local files with --data DIR"
            ) from error
        raise DataError(f"{source} could not be read as a data set ({reason})") from error


def _column(table: Any, source: str, wanted: str | None, candidates: list[str], kind: str) -> str:
    have = ", ".join(table.column_names)
    if wanted is not None and wanted not in table.column_names:
        raise DataError(f"{source} has no column {wanted}; it has {have} (data.{kind}_column)")
    if wanted is None and len(candidates) != 1:
        raise DataError(
            f"{source} has {len(candidates) or 'no'} columns that hold {kind}s; it has {have}: give data.{kind}_column"
        )
    return wanted or candidates[0]


def _images(table: Any) -> list[str]:
    from datasets import Image

    return [name for name, feature in table.features.items() if isinstance(feature, Image) or _holds_bytes(feature)]


def _holds_bytes(feature: Any) -> bool:
    return isinstance(feature, dict) and set(feature) == {"bytes", "path"}


def _labels(table: Any) -> list[str]:
    from datasets import ClassLabel, Value

    features = table.features.items()
    classes = [name for name, feature in features if isinstance(feature, ClassLabel)]
    return classes or [name for name, f in features if isinstance(f, Value) and f.dtype.startswith(("int", "uint"))]


def has_tables(folder: Path) -> bool:
    return any(name.endswith(".parquet") for _, _, files in os.walk(folder) for name in files)
