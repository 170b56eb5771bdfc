"""The files of a data set of conversations: of the hub, behind https, or local; and their rows as they stand there."""

import hashlib
import urllib.parse
import urllib.request
from pathlib import Path

from lapcli.data.cache import build_once, digest
from lapcli.data.checksums import INDEX, read_index, write_index
from lapcli.data.file_formats import ROW_SUFFIXES
from lapcli.data.source_files import cached_hub_files, expand_ranges, hub_files, refuse_same_file
from lapcli.data.sources import RowSource
from lapcli.recipe.chat import ChatRecipe, DataSet, Stage
from lapcli.recipe.data_sources import find_source
from lapcli.runtime.environment import cache_dir, hub_is_offline
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file, write_bytes
from lapcli.runtime.progress import Progress

_SECONDS = 60


def source_files(data_set: DataSet, progress: Progress | None = None, *, download: bool = True) -> list[Path] | None:
    """The files on this machine, in the order of the recipe; none if they would have to be downloaded and may not."""
    source = data_set.source
    named = find_source(source, "chat")
    if isinstance(named, RowSource):
        return [named.file()] if download or named.folder().is_dir() else None
    if source.startswith("hub:"):
        repository, names = source.removeprefix("hub:"), expand_ranges(data_set.files or [])
        cached = cached_hub_files(repository, names, data_set.revision)
        return cached or (hub_files(repository, names, data_set.revision, progress) if download else None)
    if source.startswith("https://"):
        return _downloaded(data_set, download)
    return _local(data_set)


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
        raise DataError(f"--data {folder} is not a folder; give one that holds copies of the data sets, by their names")
    stages: dict[str, Stage] = {str(name): stage(given) for name, given in recipe.stages.given().items()}
    return recipe.model_copy(update={"stages": recipe.stages.model_copy(update=stages)})


def _local(data_set: DataSet) -> list[Path]:
    source = Path(data_set.source).expanduser()
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"{data_set.name}: there is no {source}; name a file or folder, or use --data DIR")
    if data_set.files is None:
        paths = sorted(path for path in source.iterdir() if path.name.endswith(ROW_SUFFIXES))
    else:
        paths = [path for pattern in expand_ranges(data_set.files) for path in _matches(source, pattern)]
    if not paths:
        raise DataError(
            f"{data_set.name}: {source} has no {', '.join(ROW_SUFFIXES)} files; name the folder that has them"
        )
    refuse_same_file(paths)
    return paths


def _matches(folder: Path, pattern: str) -> list[Path]:
    paths = [folder / pattern] if (folder / pattern).is_file() else sorted(folder.glob(pattern))
    if not paths:
        raise DataError(f"nothing in {folder} matches {pattern}; check files, or the copy of the data set")
    return paths


def _downloaded(data_set: DataSet, download: bool) -> list[Path] | None:
    """Kept for good: the address may serve another file tomorrow, and a resumed run must not read it."""
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
    sha256 = hashlib.sha256(content).hexdigest()
    if data_set.sha256 not in (None, sha256):
        raise DataError(
            f"{data_set.name}: {data_set.source} has the sha256 {sha256}, but the recipe says {data_set.sha256}"
        )
    write_bytes(path, content)
    write_index(path.parent, {"sha256": sha256})


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
