"""Which files a source has: brace ranges, globs, and the fixed order in which they are read."""

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from lapcli.runtime.errors import DataError

#: What a text source is read from, by the end of the name.
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".txt", ".txt.gz")
#: Read when it is named, but not taken from a folder, where it is mostly about the data.
ONLY_BY_NAME = (".md",)

RANGE = re.compile(r"\{(\d{1,12})\.\.(\d{1,12})\}")
MOST_FILES = 1_000_000


def expand_ranges(files: str | Sequence[str]) -> list[str]:
    """`shard_{000..239}.parquet` as its 240 names; numbers are padded to the width of the first."""
    names: list[str] = []
    for pattern in [files] if isinstance(files, str) else files:
        names += _expand(pattern)
    return names


def _expand(pattern: str) -> list[str]:
    found = RANGE.search(pattern)
    if not found:
        return [pattern]
    first, last = found.groups()
    count = int(last) - int(first) + 1
    if not 0 < count <= MOST_FILES:
        raise DataError(
            f"data.files: {found.group()} in {pattern} is {max(count, 0):,} files; expected 1 to {MOST_FILES:,}"
        )
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [name for n in numbers for name in _expand(pattern[: found.start()] + n + pattern[found.end() :])]


def local_files(train: str, files: str | Sequence[str] | None) -> list[Path]:
    """The files of a local source: itself, or what `files` names in it, or everything readable in it by name."""
    source = Path(train).expanduser()
    try:
        source.stat()
    except (OSError, ValueError):  # not there, a name too long, a zero byte
        raise DataError(
            f"there is no {train[:200]}; data.train is `builtin`, `hub:OWNER/NAME`, or a file or folder"
        ) from None
    if source.is_file():
        if files is not None:
            raise DataError(f"data.files: {source} is a single file; remove files, or name its folder in data.train")
        return [source]
    if not source.is_dir():
        raise DataError(f"there is no {source}; data.train is `builtin`, `hub:OWNER/NAME`, or a file or folder")
    if files is None:
        found = sorted(path for path in source.iterdir() if path.name.endswith(SUFFIXES) and path.is_file())
        if not found:
            raise DataError(
                f"{source} has no {', '.join(SUFFIXES)} files; name the folder that has them, or give data.files, "
                "such as '**/*.txt'"
            )
        return found
    return [path for pattern in expand_ranges(files) for path in _matches(source, pattern)]


def _matches(source: Path, pattern: str) -> list[Path]:
    if (source / pattern).is_file():
        return [source / pattern]
    names = glob.glob(pattern, root_dir=source, recursive=True)
    found = sorted(source / name for name in names if (source / name).is_file())
    if not found:
        raise DataError(f"data.files: nothing in {source} matches {pattern}")
    return found


def check_file_list(names: Sequence[str]) -> None:
    """Refuse what cannot be read, and a file named twice: it could be trained on and validated on."""
    seen: set[str] = set()
    for name in names:
        if not name.endswith(SUFFIXES + ONLY_BY_NAME):
            raise DataError(f"data.files: {name} is of no kind that is read here ({', '.join(SUFFIXES)})")
        if name in seen:
            raise DataError(f"data.files: {name} is named twice; validation would not be held out")
        seen.add(name)


def refuse_same_file(paths: Sequence[Path]) -> None:
    """A file under two names, by a link or a loop of links, would count twice and could be validated on."""
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        status = path.stat()
        other = seen.setdefault((status.st_dev, status.st_ino), path)
        if other != path:
            raise DataError(f"{other} and {path} are the same file, by a link; remove the link, or name the files")
