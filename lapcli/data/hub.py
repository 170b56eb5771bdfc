"""Files of a hub data set, kept in the Hugging Face library's own cache.

A complete set of files that is already there is used as it is, without asking the hub: a run started today and one
started next week read the same, with or without a network. Only missing files are downloaded, by `lap train` when it
needs them and by `lap fetch` ahead of it. `revision` (a commit, tag or branch) pins the data set itself.
"""

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError, LapError

DOWNLOADS_AT_ONCE = 8


def hub_files(
    repository: str,
    names: Sequence[str],
    revision: str | None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Path]:
    """The local paths of a data set's files, all of one commit, downloaded where missing."""
    if found := cached_hub_files(repository, names, revision):
        return found
    if hub_is_offline():
        missing = next(name for name in names if not _cached(repository, name, revision))
        raise DataError(
            f"HF_HUB_OFFLINE is set and {missing} of the data set {repository} is not on this machine; "
            "run `lap fetch RECIPE` where the hub can be reached"
        )
    _download(repository, names, revision, progress)
    found = cached_hub_files(repository, names, revision)
    if found is None:  # a branch moved on between two files; those of the new commit are mostly here by now
        _download(repository, names, revision, progress)
        found = cached_hub_files(repository, names, revision)
    if found is None:
        raise DataError(f"the data set {repository} keeps changing; give data.revision, then run `lap fetch RECIPE`")
    return found


def cached_hub_files(repository: str, names: Sequence[str], revision: str | None) -> list[Path] | None:
    """The files if every one of them is on this machine, in one snapshot of the data set."""
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
        found = try_to_load_from_cache(repository, name, cache_dir=_hub_cache(), revision=revision, repo_type="dataset")
    except (HFValidationError, ValueError, OSError) as error:
        raise DataError(f"{name} cannot be a file of the data set {repository}: {error}") from None
    return Path(found) if isinstance(found, str) else None


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
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if progress:
        progress("downloading files", len(names), len(names))


def _download_file(repository: str, name: str, revision: str | None) -> None:
    from huggingface_hub import errors, hf_hub_download
    from huggingface_hub.utils import tqdm

    class Quiet(tqdm):
        """One bar for all files is ours; eight of the library's at once are unreadable."""

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
    except Exception as error:  # whatever the connection, its proxies or the library's transports raise
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise LapError(f"the disk is full while downloading {name}; free some, or set HF_HOME elsewhere") from error
        cause = str(error.__cause__ or error).splitlines() or [type(error).__name__]
        raise DataError(
            f"{name} of the data set {repository} could not be downloaded ({cause[0][:200]}); "
            "run `lap fetch RECIPE` when the hub can be reached, or give local files in data.train"
        ) from error


def _hub_cache() -> Path:
    """The library fixes this when it is imported; read at the time of the call, it also follows later changes."""
    from huggingface_hub import constants

    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(constants.HF_HUB_CACHE)
