"""The files of a data set of conversations: of the hub, behind https, or local; and their rows as they stand there."""

import csv
import gzip
import hashlib
import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lapcli.data.cache import build_once, digest
from lapcli.data.checksums import INDEX, read_index, write_index
from lapcli.data.file_lists import expand_ranges, refuse_same_file
from lapcli.data.hub import cached_hub_files, hub_files
from lapcli.data.text.formats import zero_bytes
from lapcli.recipe.chat import ChatRecipe, DataSet, Stage
from lapcli.runtime.environment import cache_dir, hub_is_offline
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file
from lapcli.runtime.progress import Progress

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv", ".txt")
_SECONDS = 60


def source_files(data_set: DataSet, progress: Progress | None = None, *, download: bool = True) -> list[Path] | None:
    """The files on this machine, in the order of the recipe; none if they would have to be downloaded and may not."""
    source = data_set.source
    if source.startswith("hub:"):
        repository, names = source.removeprefix("hub:"), expand_ranges(data_set.files or [])
        found = cached_hub_files(repository, names, data_set.revision)
        return found or (hub_files(repository, names, data_set.revision, progress) if download else None)
    if source.startswith("https://"):
        return _downloaded(data_set, download)
    return _local(data_set)


def read_rows(path: Path) -> Iterator[Any]:
    """Rows as dictionaries (csv: lists of cells), whatever is in them."""
    name = path.name
    if not name.endswith(SUFFIXES):  # blobs of the hub's cache have no suffix, but the links to them do
        raise DataError(f"{path} is of no kind that is read here ({', '.join(SUFFIXES)})")
    try:
        if name.endswith(".parquet"):
            yield from _parquet(path)
        elif name.endswith(".csv"):
            refuse_zero_bytes(path)
            with path.open(encoding="utf-8", newline="") as lines:
                yield from csv.reader(lines)
        elif name.endswith(".json"):
            rows = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(rows, list):
                raise DataError(f"{path} is not a JSON list of rows")
            yield from rows
        else:
            yield from _jsonl(path)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, EOFError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({str(error).splitlines()[0][:200]}); get or mend it") from None


def refuse_zero_bytes(path: Path) -> None:
    """Text in UTF-16 or UTF-32 would be read as UTF-8 full of zero bytes."""
    content = path.read_bytes()
    if 0 in content:
        raise DataError(f"{path} {zero_bytes(content)}")


def count_rows(path: Path) -> int:
    """Of parquet without reading it."""
    if path.name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is not a whole parquet file ({str(error)[:200]}); get it again") from None
    return sum(1 for _ in read_rows(path))


def with_local_data(recipe: ChatRecipe, folder: Path) -> ChatRecipe:
    """The recipe with copies of its data sets in `folder`: hub:OWNER/NAME as NAME/ or OWNER/NAME/, with the hub's
    files in it; a file behind https by its own name. A folder without a copy leaves the source as it is."""

    def local(data_set: DataSet) -> DataSet:
        address = urllib.parse.urlsplit(data_set.source).path if "://" in data_set.source else ""
        owner_and_name = data_set.source.removeprefix("hub:")
        for place in (owner_and_name, owner_and_name.rpartition("/")[2], address.rpartition("/")[2]):
            remote = data_set.source.startswith(("hub:", "https://"))
            if remote and place and (folder / place).exists():
                changes = {"source": str(folder / place), "revision": None, "sha256": None}
                return data_set.model_copy(update=changes)
        return data_set

    def stage(before: Stage) -> Stage:
        validation = before.validation.model_copy(update={"mixture": [local(d) for d in before.validation.mixture]})
        return before.model_copy(update={"mixture": [local(d) for d in before.mixture], "validation": validation})

    if not folder.is_dir():
        raise DataError(f"--data {folder} is no folder; it holds copies of the data sets, by their names")
    stages: dict[str, Stage] = {str(name): stage(given) for name, given in recipe.stages.given().items()}
    return recipe.model_copy(update={"stages": recipe.stages.model_copy(update=stages)})


def _local(data_set: DataSet) -> list[Path]:
    source = Path(data_set.source).expanduser()
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"{data_set.name}: there is no {source}; name a file or folder, or use --data DIR")
    if data_set.files is None:
        found = sorted(path for path in source.iterdir() if path.name.endswith(SUFFIXES))
    else:
        found = [path for pattern in expand_ranges(data_set.files) for path in _matches(source, pattern)]
    if not found:
        raise DataError(f"{data_set.name}: {source} has no {', '.join(SUFFIXES)} files; name the folder that has them")
    refuse_same_file(found)
    return found


def _matches(folder: Path, pattern: str) -> list[Path]:
    found = [folder / pattern] if (folder / pattern).is_file() else sorted(folder.glob(pattern))
    if not found:
        raise DataError(f"nothing in {folder} matches {pattern}; check files, or the copy of the data set")
    return found


def _downloaded(data_set: DataSet, download: bool) -> list[Path] | None:
    """Kept for good: the address may serve another file tomorrow, and a run that goes on must not read it."""
    name = Path(urllib.parse.urlsplit(data_set.source).path).name or "file"
    folder = cache_dir() / "downloads" / digest(data_set.source, data_set.sha256)[:16]
    if not download and not (folder / name).is_file():
        return None
    build_once(
        folder,
        lambda new: _download(data_set, new / name),
        lambda old: _is_kept(data_set, old / name),
        lambda old: _adopt(old / name),
    )
    return [folder / name]


def _download(data_set: DataSet, path: Path) -> None:
    if hub_is_offline():
        raise DataError(
            f"{data_set.name}: {data_set.source} is not on this machine and HF_HUB_OFFLINE is set; run `lap fetch "
            "RECIPE` where it can be reached, or put the file in a folder and use --data"
        )
    try:
        with urllib.request.urlopen(data_set.source, timeout=_SECONDS) as answer:
            content = answer.read()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{data_set.name}: {data_set.source} could not be downloaded ({error}); run `lap fetch RECIPE` when it can "
            "be reached, or put the file in a folder and use --data"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if data_set.sha256 not in (None, found):
        raise DataError(f"{data_set.name}: {data_set.source} has the sha256 {found}, the recipe says {data_set.sha256}")
    path.write_bytes(content)
    write_index(path.parent, {"sha256": found})


def _is_kept(data_set: DataSet, path: Path) -> bool:
    """Whether the file is what was downloaded."""
    try:
        expected = read_index(path.parent)["sha256"]
        return expected == sha256_of_file(path) and data_set.sha256 in (None, expected)
    except (OSError, ValueError, KeyError):
        return False


def _adopt(path: Path) -> None:
    """A file that version 0.1 downloaded, which kept no hash of it, is taken as it is."""
    if path.is_file() and not (path.parent / INDEX).exists():
        write_index(path.parent, {"sha256": sha256_of_file(path)})


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{path} is not a whole parquet file ({str(error)[:200]}); get it again") from None


def _jsonl(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number} is not a line of JSON ({str(error)[:100]}); mend it") from None
