"""Data sources: local files, the hub, URLs, and named sources, which other packages may add.

    class Fables(DocumentSource):
        name = "fables"                     # in a recipe: `data: {train: "plugin:fables"}`
        def fingerprint(self): return "1"   # changes when the text does
        def rows(self): yield from ...      # documents

    def register(extensions):               # in the module of the entry point group `lap.plugins`
        extensions.add("data source", Fables())

Text and conversations are written once to a jsonl file in the cache, which a run reads like any other local file.

Files of the hub stay in the Hugging Face library's own cache. A complete set of cached files is used without asking the
hub: runs started today and next week read the same data, with or without a network. Only missing files are
downloaded, by `lap train` when needed and by `lap fetch` in advance.
"""

import glob
import json
import os
import re
import sys
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lapcli.data.files import SUFFIXES, build_once, digest
from lapcli.recipe.section import PREFIX, Modality, check_local_file, find_source
from lapcli.runtime.environment import cache_dir, hub_is_offline, is_main_process
from lapcli.runtime.errors import DataError

if TYPE_CHECKING:
    from lapcli.data.images.image_set import ImageSet

ROWS_FILE = "text.jsonl"
_RANGE = re.compile(r"\{(\d{1,6})\.\.(\d{1,6})\}")
_SECONDS = 60  # timeout of a download
#: Reasons for a failed download, by the error of the hub's library, whose own first line is the HTTP status.
_REASONS = {
    "GatedRepoError": "it is gated: accept its terms and log in with `hf auth login`",
    "RepositoryNotFoundError": "the hub has no public data set of that name",
    "RevisionNotFoundError": "it has no such revision",
}


class DataSource(ABC):
    name: ClassVar[str]  # used as `plugin:NAME` in a recipe
    modality: ClassVar[Modality]


class LabelledImageSource(DataSource):
    """Images for `data.train`. Their identity is computed from labels, sizes and content, as for every image set."""

    modality = "images"
    train_images: ClassVar[int | None] = None  # if known without opening them; `lap plan` counts steps with it

    @abstractmethod
    def images(self) -> "tuple[ImageSet, ImageSet | None]":
        """Return the training images, and the source's own held-out images, if any."""


class RowSource(DataSource):
    """Rows that are generated once and cached."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a string that changes whenever `rows` does. It is called at every start, so it should be cheap."""

    @abstractmethod
    def rows(self) -> Iterator[Any]:
        """Yield every row, always in the same order."""

    def file(self) -> Path:
        """Return a jsonl file of all rows, written on the first call."""
        return build_once(self.folder(), self._write) / ROWS_FILE

    def folder(self) -> Path:
        """Return the folder where that file is, or will be."""
        return cache_dir() / "sources" / digest(self.name, self.fingerprint())[:32]

    def _write(self, folder: Path) -> None:
        rows = ({"text": row} if self.modality == "text" else row for row in self.rows())
        with (folder / ROWS_FILE).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


class DocumentSource(RowSource):
    """Text for `data.train`: a row is one document."""

    modality = "text"


class ConversationSource(RowSource):
    """Conversations for `source:` in a mixture: a row is a list of {role, content}, or a row of its `format`."""

    modality = "chat"


#: Training images of public sets, with which `lap plan` counts the steps of a recipe before anything is downloaded.
TRAIN_IMAGES = {
    "builtin": 1_797,  # scikit-learn's digits
    "hub:uoft-cs/cifar10": 50_000,
    "hub:uoft-cs/cifar100": 50_000,
    "hub:ILSVRC/imagenet-1k": 1_281_167,
}


def known_images(source: str) -> int | None:
    """Return the number of training images of a source; None if it is not known before it is opened."""
    if source.startswith(PREFIX):
        return getattr(find_source(source, "images"), "train_images", None)
    return TRAIN_IMAGES.get(source)


def expand_ranges(files: str | Sequence[str]) -> list[str]:
    """Expand `shard_{000..239}.parquet` to its 240 names; numbers are padded to the width of the first."""
    if not isinstance(files, str):
        return list(dict.fromkeys(name for pattern in files for name in expand_ranges(pattern)))
    if not (braces := _RANGE.search(files)):
        return [files]
    first, last = braces.groups()
    if int(last) < int(first):
        raise DataError(f"data.files: {braces.group()} in {files} has no numbers; the first is the smaller one")
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [name for number in numbers for name in expand_ranges(files.replace(braces.group(), number, 1))]


def source_files(
    source: str, files: str | Sequence[str] | None, revision: str | None, modality: Modality, *, download: bool = True
) -> list[Path] | None:
    """Return the files of any source, in order; without `download`, None if they would have to be downloaded or made.

    A file behind https never expires, because the URL may serve another file when a run resumes.
    """
    named = find_source(source, modality)
    if isinstance(named, RowSource):
        return [named.file()] if download or named.folder().is_dir() else None
    if source.startswith("hub:"):
        repository, names = source.removeprefix("hub:"), expand_ranges(files or [])
        return hub_files(repository, names, revision) if download else cached_hub_files(repository, names, revision)
    if source.startswith("https://"):
        folder = cache_dir() / "downloads" / digest(source)[:16]
        file = folder / (Path(urllib.parse.urlsplit(source).path).name or "file")
        if download:
            build_once(folder, lambda new: _fetch(source, new / file.name))
        return [file] if file.is_file() else None
    return local_files(source, files)


def local_files(source: str, files: str | Sequence[str] | None = None) -> list[Path]:
    """Return the files of a local source: the file itself, those that `files` names, or all with a known suffix."""
    place = Path(source).expanduser()
    if place.is_file():
        if files is not None:
            raise DataError(f"files: {place} is a single file; remove files, or name its folder instead")
        return [place]
    check_local_file("data", source)
    if files is None:
        paths = sorted(path for path in place.iterdir() if path.name.endswith(SUFFIXES) and path.is_file())
    else:
        paths = []
        for name in expand_ranges(files):
            found = [place / each for each in sorted(glob.glob(name, root_dir=place, recursive=True))]
            if not any(path.is_file() for path in found):
                raise DataError(f"files: nothing in {place} matches {name}")
            paths += [path for path in found if path.is_file()]
    if not paths:
        raise DataError(
            f"{place} has no {', '.join(SUFFIXES)} files; name the folder that has them, or give files, such as "
            "'**/*.txt'"
        )
    # A file under two names, by a link or two patterns, is read once: otherwise it could be in both splits.
    return list({path.resolve(): path for path in reversed(paths)}.values())[::-1]


def hub_files(repository: str, names: Sequence[str], revision: str | None = None) -> list[Path]:
    """Return the local paths of a data set's files, all of one commit; download those that are missing.

    `revision` (a commit, tag or branch) pins the data set itself.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if paths := cached_hub_files(repository, names, revision):
        return paths
    if not (is_main_process() and sys.stderr.isatty()):
        disable_progress_bars()
    wanted = [glob.escape(name) for name in names]
    try:
        if hub_is_offline():
            raise ValueError("HF_HUB_OFFLINE is set")
        endpoint = os.environ.get("HF_ENDPOINT")  # its library reads the variable only when it is imported
        folder = snapshot_download(
            repository, repo_type="dataset", revision=revision, allow_patterns=wanted, endpoint=endpoint
        )
        paths = [Path(folder) / name for name in names]
        if missing := [name for name, path in zip(names, paths, strict=True) if not path.is_file()]:
            raise ValueError(f"it has no file {missing[0]}")
    except Exception as error:  # the connection, a full disk, proxies and the library's transports raise many kinds
        cause = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(
            f"the data set {repository} is not cached and cannot be downloaded "
            f"({_REASONS.get(type(error).__name__, cause)}); correct the recipe, run `lap fetch RECIPE` where the hub "
            "can be reached, or give local files with --data"
        ) from error
    return paths


def cached_hub_files(repository: str, names: Sequence[str], revision: str | None) -> list[Path] | None:
    """Return the files if all of them are cached, in one snapshot of the data set."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(repository, repo_type="dataset", revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    except ValueError as error:  # a name that the hub cannot have
        raise DataError(f"{repository} cannot be a data set of the hub: {error}") from None
    paths = [Path(folder) / name for name in names]
    return paths if all(path.is_file() for path in paths) else None


def _fetch(address: str, path: Path) -> None:
    try:
        if hub_is_offline():
            raise ValueError("HF_HUB_OFFLINE is set")
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
            path.write_bytes(answer.read())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{address} could not be downloaded ({error}); correct the recipe, run `lap fetch RECIPE` where it can be "
            "reached, or put the file in a folder and use --data"
        ) from None
