"""Images in tables: hub data sets by name, and local folders of parquet files with the hub's columns and splits.

Both use `datasets.load_dataset`, so that local and hub files behave alike. It converts local files once, in a
folder of our cache, and recognises them by name and modification time.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from lapcli.data.images.image_set import ImageSet
from lapcli.runtime.environment import cache_dir, hub_is_offline
from lapcli.runtime.errors import DataError

#: Larger labels are no classes, but something else, such as an id of each image.
MOST_CLASSES = 1_000_000
#: Names of a source's held-out split, in order of preference: ImageNet's `test` has no labels, its `validation` has.
HELD_OUT = ("validation", "valid", "val", "test")


class TableImages(ImageSet):
    def __init__(self, table: Any, source: str, split: str, image_column: str, label_column: str) -> None:
        from datasets import ClassLabel
        from datasets import Image as ImageFeature

        self._place, self._column = f"{source}, split {split}", image_column
        labels = table[label_column][:]  # a column of `datasets` 4 is lazy; the slice reads it once
        if not labels:
            raise DataError(f"{self._place} has no rows")
        feature = table.features[label_column]
        classes = list(feature.names) if isinstance(feature, ClassLabel) else None
        most = MOST_CLASSES if classes is None else len(classes)
        for index, label in enumerate(labels):
            if not isinstance(label, int) or not 0 <= label < most:
                raise DataError(
                    f"{self.name(index)} has the label {repr(label)[:60]}; expected the number of a class from 0 to "
                    f"{most - 1}: correct it, or choose another data.label_column"
                )
        super().__init__(np.array(labels), classes or [str(number) for number in range(max(labels) + 1)])
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
    source: str, revision: str | None, image_column: str | None, label_column: str | None
) -> tuple[TableImages, TableImages | None]:
    """Open the training images, and those that the source holds out; `source` is hub:OWNER/NAME or a folder."""
    splits = load_tables(source, revision)
    if "train" not in splits:
        raise DataError(f"{source} has no split `train`; it has {', '.join(splits)}")
    train, held_out = (
        TableImages(
            splits[split],
            source,
            split,
            _column(splits[split], source, image_column, "image"),
            _column(splits[split], source, label_column, "label"),
        )
        if split
        else None
        for split in ("train", next((name for name in HELD_OUT if name in splits), None))
    )
    assert train is not None
    return train, held_out


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


def _column(table: Any, source: str, wanted: str | None, kind: Literal["image", "label"]) -> str:
    """Return the column that the recipe names, or the only one that can hold images or labels."""
    from datasets import ClassLabel, Image, Value

    features, have = table.features, ", ".join(table.column_names)
    if wanted is not None and wanted not in features:
        raise DataError(f"{source} has no column {wanted}; it has {have} (data.{kind}_column)")
    if kind == "image":
        # Without the hub's metadata an image is a dictionary of its bytes and its path.
        plain = [n for n, f in features.items() if isinstance(f, dict) and set(f) == {"bytes", "path"}]
        found = plain + [name for name, feature in features.items() if isinstance(feature, Image)]
    else:
        numbers = [n for n, f in features.items() if isinstance(f, Value) and f.dtype.startswith(("int", "uint"))]
        found = [name for name, feature in features.items() if isinstance(feature, ClassLabel)] or numbers
    if wanted is None and len(found) != 1:
        raise DataError(
            f"{source} has {len(found) or 'no'} columns that hold {kind}s; it has {have}: give data.{kind}_column"
        )
    return wanted or found[0]


def has_tables(folder: Path) -> bool:
    return next(folder.rglob("*.parquet"), None) is not None
