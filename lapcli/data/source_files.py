"""The files of a source, in the order in which they are read: local ones (brace ranges, globs) and those of the hub.

Files of the hub stay in the Hugging Face library's own cache. A complete set of cached files is used
without asking the hub: a run started today and one started next week read the same, with or without a network.
Only missing files are downloaded, by `lap train` when it needs them and by `lap fetch` ahead of it. `revision` (a
commit, tag or branch) pins the data set itself.
"""

import glob
import os
import re
import socket
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lapcli.data.file_formats import DOCUMENT_SUFFIXES
from lapcli.data.sources import RowSource
from lapcli.recipe.data_sources import Modality, find_source
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress

RANGE = re.compile(r"\{(\d{1,6})\.\.(\d{1,6})\}")
#: Reasons for a failed download, by the error of the hub's library, whose own first line is the status of a request.
REASONS = {
    "GatedRepoError": "it is gated: accept its terms and log in with `hf auth login`",
    "RepositoryNotFoundError": "the hub has no public data set of that name",
    "RevisionNotFoundError": "it has no such revision",
    "RemoteEntryNotFoundError": "it has no such file",
}


def expand_ranges(files: str | Sequence[str]) -> list[str]:
    """Expand `shard_{000..239}.parquet` to its 240 names; numbers are padded to the width of the first."""
    if not isinstance(files, str):
        return list(dict.fromkeys(name for pattern in files for name in expand_ranges(pattern)))
    if not (braces := RANGE.search(files)):
        return [files]
    first, last = braces.groups()
    if int(last) < int(first):
        raise DataError(f"data.files: {braces.group()} in {files} has no numbers; the first is the smaller one")
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [name for number in numbers for name in expand_ranges(files.replace(braces.group(), number, 1))]


def source_files(
    source: str,
    files: str | Sequence[str] | None,
    revision: str | None,
    modality: Modality,
    suffixes: tuple[str, ...],
    progress: Progress | None = None,
    *,
    download: bool = True,
) -> list[Path] | None:
    """Return the files of any source; without `download`, None if they would have to be downloaded or extracted."""
    named = find_source(source, modality)
    if isinstance(named, RowSource):
        return [named.file()] if download or named.folder().is_dir() else None
    if not source.startswith("hub:"):
        return local_files(source, files, suffixes)
    repository, names = source.removeprefix("hub:"), expand_ranges(files or [])
    if download:
        return hub_files(repository, names, revision, progress)
    return cached_hub_files(repository, names, revision)


def local_files(
    train: str, files: str | Sequence[str] | None, suffixes: tuple[str, ...] = DOCUMENT_SUFFIXES
) -> list[Path]:
    """Return the files of a local source: the file itself, those that `files` names, or all with a known suffix."""
    source = Path(train).expanduser()
    # By os.path, which says False of a name that is too long or has a zero byte.
    if os.path.isfile(source):
        if files is not None:
            raise DataError(f"files: {source} is a single file; remove files, or name its folder instead")
        return [source]
    if not os.path.isdir(source):
        hub = f" (hub:{train[:100]}?)" if train.count("/") == 1 else ""
        raise DataError(f"there is no {train[:200]}; give `builtin`, `hub:OWNER/NAME`{hub}, or a file or folder")
    if files is None:
        paths = sorted(path for path in source.iterdir() if path.name.endswith(suffixes) and path.is_file())
    else:
        paths = [path for pattern in expand_ranges(files) for path in _matches(source, pattern)]
    if not paths:
        raise DataError(
            f"{source} has no {', '.join(suffixes)} files; name the folder that has them, or give files, such as "
            "'**/*.txt'"
        )
    # A file under two names, by a link or two patterns, is read once: it could be both trained and validated on.
    return list({path.resolve(): path for path in reversed(paths)}.values())[::-1]


def _matches(source: Path, pattern: str) -> list[Path]:
    # Before globbing: a file's own name may hold brackets.
    names = [pattern] if (source / pattern).is_file() else sorted(glob.glob(pattern, root_dir=source, recursive=True))
    if paths := [source / name for name in names if (source / name).is_file()]:
        return paths
    raise DataError(f"files: nothing in {source} matches {pattern}")


def unreachable() -> str | None:
    """Return at once why the hub is unreachable, else None; its library would retry for half a minute."""
    # Behind a proxy a direct connection fails although the hub can be reached.
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return None
    address = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=0.5).close()
    except TimeoutError:  # slow is not unreachable
        return None
    except OSError as error:
        return f"{address.hostname} cannot be reached: {error.strerror or error}"
    return None


def hub_files(
    repository: str, names: Sequence[str], revision: str | None, progress: Progress | None = None
) -> list[Path]:
    """Return the local paths of a data set's files, all of one commit; download those that are missing."""
    if paths := cached_hub_files(repository, names, revision):
        return paths
    if reason := "HF_HUB_OFFLINE is set" if hub_is_offline() else unreachable():
        missing = next(name for name in names if not cached_hub_files(repository, [name], revision))
        raise _not_downloaded(repository, missing, reason)
    first = _download(repository, names[0], revision)
    # The rest by the commit of the first, so that a branch may move meanwhile: .../snapshots/COMMIT/FOLDER/NAME.
    commit = first.parents[len(Path(names[0]).parts) - 1].name
    paths = [first]
    with ThreadPoolExecutor(8) as pool:
        for path in pool.map(lambda name: _download(repository, name, commit), names[1:]):
            paths.append(path)
            if progress:
                progress("downloading files", len(paths), len(names))
    return paths


def cached_hub_files(repository: str, names: Sequence[str], revision: str | None) -> list[Path] | None:
    """Return the files if all of them are cached, in one snapshot of the data set."""
    from huggingface_hub import try_to_load_from_cache

    paths = []
    for name in names:
        try:
            path = try_to_load_from_cache(repository, name, revision=revision, repo_type="dataset")
        except (ValueError, OSError) as error:  # a name that the hub cannot have
            raise DataError(f"{name} cannot be a file of the data set {repository}: {error}") from None
        if not isinstance(path, str):  # None, or a marker object for a file that is known not to exist
            return None
        paths.append(Path(path))
    return paths


def _download(repository: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # ours covers all files, and eight at once would be unreadable
    options: dict[str, Any] = {"repo_type": "dataset", "endpoint": os.environ.get("HF_ENDPOINT") or None}
    try:
        return Path(hf_hub_download(repository, name, revision=revision, **options))
    except Exception as error:  # the connection, a full disk, proxies and the library's transports raise many kinds
        cause = (str(error.__cause__ or error).splitlines() or [type(error).__name__])[0][:200]
        raise _not_downloaded(repository, name, REASONS.get(type(error).__name__, cause)) from error


def _not_downloaded(repository: str, name: str, reason: str) -> DataError:
    return DataError(
        f"{name} of the data set {repository} is not cached and cannot be downloaded ({reason}); correct the "
        "recipe, run `lap fetch RECIPE` where the hub can be reached, or give local files with --data"
    )
