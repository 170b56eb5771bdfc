"""Text sources, each as a corpus: the built-in text, a hub data set, or local files."""

from collections.abc import Callable, Sequence
from pathlib import Path

from lapcli.data.file_lists import check_file_list, expand_ranges, local_files, refuse_same_file
from lapcli.data.fingerprint import hub_fingerprint
from lapcli.data.hub import cached_hub_files, hub_files
from lapcli.data.text.builtin import builtin_folder, builtin_sha256, builtin_text
from lapcli.data.text.corpus import Corpus, SourceFile
from lapcli.data.text.formats import is_text
from lapcli.recipe.schema import TextSource
from lapcli.runtime.errors import DataError
from lapcli.runtime.progress import Progress


def open_corpus(source: TextSource, progress: Progress | None = None) -> Corpus:
    """The source's files, downloaded where they are missing; nothing of a file's text is read."""
    if source.train == "builtin":
        text = builtin_text()
        return Corpus(source, _files([text.name], [text], lambda path: [builtin_sha256(path)]), progress)
    if source.train.startswith("hub:"):
        repository, names = hub_list(source)
        paths = hub_files(repository, names, source.revision, progress)
        return Corpus(source, _files(names, paths, hub_fingerprint), progress)
    paths = local_files(source.train, source.files)
    folder = Path(source.train).expanduser()
    names = [path.name if folder.is_file() else path.relative_to(folder).as_posix() for path in paths]
    _check(source, names)
    refuse_same_file(paths)
    return Corpus(source, _files(names, paths, lambda path: None), progress)


def corpus_at_hand(source: TextSource) -> Corpus | None:
    """The corpus if nothing need be downloaded or extracted for it."""
    if source.train == "builtin" and not builtin_folder().is_dir():
        return None
    if source.train.startswith("hub:"):
        repository, names = hub_list(source)
        if cached_hub_files(repository, names, source.revision) is None:
            return None
    return open_corpus(source)


def hub_list(source: TextSource) -> tuple[str, list[str]]:
    """The data set's name and its files, in the order of the recipe."""
    names = expand_ranges(source.files or [])
    _check(source, names)
    return source.train.removeprefix("hub:"), names


def _files(
    names: Sequence[str], paths: Sequence[Path], known: Callable[[Path], Sequence[str | int] | None]
) -> list[SourceFile]:
    try:
        contents = [known(path) for path in paths]
        return [
            SourceFile(name, path, path.stat().st_size, None if content is None else tuple(content))
            for name, path, content in zip(names, paths, contents, strict=True)
        ]
    except OSError as error:
        raise DataError(f"cannot read {error.filename} ({error.strerror}); check data.train") from None


def _check(source: TextSource, names: Sequence[str]) -> None:
    check_file_list(names)
    if source.separator is not None and not any(map(is_text, names)):
        raise DataError("data.separator: none of the source's files is a text file; remove it")
    if source.column != "text" and all(map(is_text, names)):
        raise DataError(f"data.column: text files have no columns such as {source.column}; remove it")
