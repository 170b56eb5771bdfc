"""The files of a source, in the order in which they are read: local ones (brace ranges, globs) and those of the hub.

Files of the hub stay in the Hugging Face library's own cache. A complete set of files that is already there is used
without asking the hub: a run started today and one started next week read the same, with or without a network.
Only missing files are downloaded, by `lap train` when it needs them and by `lap fetch` ahead of it. `revision` (a
commit, tag or branch) pins the data set itself.
"""

import errno
import glob
import os
import re
import socket
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lapcli.data.file_formats import DOCUMENT_SUFFIXES
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError, LapError

#: Read if named, but skipped in a folder, where such a file mostly describes the data.
ONLY_BY_NAME = (".md",)

RANGE = re.compile(r"\{(\d{1,12})\.\.(\d{1,12})\}")
MOST_FILES = 1_000_000


def expand_ranges(files: str | Sequence[str]) -> list[str]:
    """Expand `shard_{000..239}.parquet` to its 240 names; numbers are padded to the width of the first."""
    names: list[str] = []
    for pattern in [files] if isinstance(files, str) else files:
        names += _expand(pattern)
    return names


def _expand(pattern: str) -> list[str]:
    braces = RANGE.search(pattern)
    if not braces:
        return [pattern]
    first, last = braces.groups()
    count = int(last) - int(first) + 1
    if not 0 < count <= MOST_FILES:
        raise DataError(
            f"data.files: {braces.group()} in {pattern} is {max(count, 0):,} files; expected 1 to {MOST_FILES:,}"
        )
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [name for n in numbers for name in _expand(pattern[: braces.start()] + n + pattern[braces.end() :])]


def _meant(train: str) -> str:
    """Suggest what to write instead of a name that is neither a file nor a folder."""
    if re.match(r"https?:/", train):
        return "a URL is not read directly: download the file and name it here"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", train) and not Path(train).suffix:
        return f"did you mean hub:{train}? Otherwise give `builtin`, or a file or folder"
    return "give `builtin`, `hub:OWNER/NAME`, or a file or folder"


def local_files(train: str, files: str | Sequence[str] | None) -> list[Path]:
    """Return the files of a local source: the file itself, those that `files` names, or all with a known suffix."""
    source = Path(train).expanduser()
    try:
        source.stat()
    except (OSError, ValueError):  # not there, a name too long, a zero byte
        raise DataError(f"there is no {train[:200]}; {_meant(train)}") from None
    if source.is_file():
        if files is not None:
            raise DataError(f"data.files: {source} is a single file; remove files, or name its folder in data.train")
        return [source]
    if not source.is_dir():
        raise DataError(f"{source} is a pipe or a device; give `builtin`, `hub:OWNER/NAME`, or a file or folder")
    if files is None:
        paths = sorted(path for path in source.iterdir() if path.name.endswith(DOCUMENT_SUFFIXES) and path.is_file())
        if not paths:
            raise DataError(
                f"{source} has no {', '.join(DOCUMENT_SUFFIXES)} files; name the folder that has them, "
                "or give data.files, such as '**/*.txt'"
            )
        return paths
    return [path for pattern in expand_ranges(files) for path in _matches(source, pattern)]


def _matches(source: Path, pattern: str) -> list[Path]:
    # Before globbing: a file's own name may hold brackets.
    if (source / pattern).is_file():
        return [source / pattern]
    names = glob.glob(pattern, root_dir=source, recursive=True)
    paths = sorted(source / name for name in names if (source / name).is_file())
    if not paths:
        raise DataError(f"data.files: nothing in {source} matches {pattern}")
    return paths


def check_file_list(names: Sequence[str]) -> None:
    """Refuse files of unknown formats, and one named twice, which could be both trained on and validated on."""
    seen: set[str] = set()
    for name in names:
        if not name.endswith(DOCUMENT_SUFFIXES + ONLY_BY_NAME):
            raise DataError(
                f"data.files: {name} has a format that is not read here; expected {', '.join(DOCUMENT_SUFFIXES)}"
            )
        if name in seen:
            raise DataError(f"data.files: {name} is named twice, so that validation would not be held out; remove one")
        seen.add(name)


def refuse_same_file(paths: Sequence[Path]) -> None:
    """Refuse a file under two names, by a link: it would count twice, and could be trained and validated on."""
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        status = path.stat()
        other = seen.setdefault((status.st_dev, status.st_ino), path)
        if other != path:
            raise DataError(f"{other} and {path} are the same file, by a link; remove the link, or name the files")


DOWNLOADS_AT_ONCE = 8


_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def unreachable() -> str | None:
    """Return at once why the hub cannot be reached, or None if it may be: its library would retry for half a minute."""
    # Behind a proxy a direct connection fails although the hub can be reached.
    if any(os.environ.get(name) for name in _PROXIES):
        return None
    address = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=0.5).close()
    except TimeoutError:  # slow is not unreachable
        return None
    except OSError as error:
        return f"{address.hostname} cannot be reached: {error.strerror or error}"
    return None


def hub_files(
    repository: str,
    names: Sequence[str],
    revision: str | None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Path]:
    """Return the local paths of a data set's files, all of one commit; download those that are missing."""
    if paths := cached_hub_files(repository, names, revision):
        return paths
    if hub_is_offline():
        missing = next(name for name in names if not _cached(repository, name, revision))
        raise DataError(
            f"HF_HUB_OFFLINE is set and {missing} of the data set {repository} is not on this machine; "
            "run `lap fetch RECIPE` where the hub can be reached"
        )
    if reason := unreachable():
        raise DataError(
            f"the files of the data set {repository} are not on this machine and cannot be downloaded ({reason}); run "
            "`lap fetch RECIPE` when the hub can be reached, or give local files with --data"
        )
    _download(repository, names, revision, progress)
    paths = cached_hub_files(repository, names, revision)
    if paths is None:  # the branch moved between two files; most of the new commit's are here by now
        _download(repository, names, revision, progress)
        paths = cached_hub_files(repository, names, revision)
    if paths is None:
        raise DataError(f"the data set {repository} keeps changing; give data.revision, then run `lap fetch RECIPE`")
    return paths


def cached_hub_files(repository: str, names: Sequence[str], revision: str | None) -> list[Path] | None:
    """Return the files if all of them are on this machine, in one snapshot of the data set."""
    paths = []
    for name in names:
        if (path := _cached(repository, name, revision)) is None:
            return None
        paths.append(path)
    return paths


def _cached(repository: str, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(repository, name, cache_dir=_hub_cache(), revision=revision, repo_type="dataset")
    except (HFValidationError, ValueError, OSError) as error:
        raise DataError(f"{name} cannot be a file of the data set {repository}: {error}") from None
    # Besides None the library returns a marker object for a file that it knows not to exist.
    return Path(path) if isinstance(path, str) else None


def _download(
    repository: str, names: Sequence[str], revision: str | None, progress: Callable[[str, int, int], None] | None
) -> None:
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        downloads = [pool.submit(_download_file, repository, name, revision) for name in names]
        try:
            for done, download in enumerate(downloads):
                if progress:
                    progress("downloading files", done, len(names))
                download.result()
        except BaseException:
            # Else leaving the `with` block would first download every file that is still queued.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if progress:
        progress("downloading files", len(names), len(names))


def _download_file(repository: str, name: str, revision: str | None) -> None:
    from huggingface_hub import errors, hf_hub_download
    from huggingface_hub.utils import tqdm

    class Quiet(tqdm):
        """No bar of the library: ours covers all files, and eight at once would be unreadable."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    try:
        hf_hub_download(
            repository,
            name,
            repo_type="dataset",
            revision=revision,
            cache_dir=_hub_cache(),
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            tqdm_class=Quiet,
        )
    except errors.GatedRepoError:
        raise DataError(
            f"the data set {repository} is gated; accept its terms and log in with `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise DataError(f"the hub has no public data set {repository}; check data.train, or `hf auth login`") from None
    except errors.RevisionNotFoundError:
        raise DataError(f"the data set {repository} has no revision {revision}; check data.revision") from None
    except errors.RemoteEntryNotFoundError:
        raise DataError(f"the data set {repository} has no file {name}; check data.files") from None
    except Exception as error:  # the connection, proxies and the library's transports raise many kinds
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise LapError(
                f"the disk is full while downloading {name}; free some space, or set HF_HOME to another disk"
            ) from error
        cause = str(error.__cause__ or error).splitlines() or [type(error).__name__]
        raise DataError(
            f"{name} of the data set {repository} could not be downloaded ({cause[0][:200]}); "
            "run `lap fetch RECIPE` when the hub can be reached, or give local files in data.train"
        ) from error


def _hub_cache() -> Path:
    """Return the hub's cache folder; the library reads the variables only once, at its import."""
    from huggingface_hub import constants

    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(constants.HF_HUB_CACHE)
