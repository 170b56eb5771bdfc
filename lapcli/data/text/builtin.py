"""The built-in text: the documentation in every Python installation.

It has the topics of `pydoc` and the docstrings of the standard library, a document for each topic and each module.
The sources are parsed with `ast`, never imported or run. It differs a little between Python versions, so runs are
compared within one.
"""

import ast
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from lapcli.data.files import digest
from lapcli.data.sources import DocumentSource

# Not installed by every distribution, or not documentation of the library.
SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "tkinter", "distutils", "ensurepip"),
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__", "pydoc_data", "encodings"),
}
REPEATABLE = 40  # characters; a shorter paragraph is a heading or a name
VERSION = 1  # of the extraction; changing it rebuilds the text


class PythonDocumentation(DocumentSource):
    name = "python_documentation"

    def fingerprint(self) -> str:
        root = _library()
        sources = [(name, (root / name).stat().st_size) for name in _modules(root)]
        return digest(VERSION, platform.python_version(), sources)[:16]

    def rows(self) -> Iterator[str]:
        return without_repeats(builtin_documents(_library()))


PYTHON_DOCUMENTATION = PythonDocumentation()


def builtin_text() -> Path:
    """Return the jsonl file of the built-in text, extracted on the first call."""
    return PYTHON_DOCUMENTATION.file()


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def builtin_documents(root: Path) -> Iterator[str]:
    yield from _topics(root / "pydoc_data" / "topics.py")
    for name in _modules(root):
        try:
            tree = ast.parse((root / name).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # such as a distributor's stub in another encoding
        if docstrings := list(_docstrings(tree, name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))):
            yield "\n\n".join(docstrings) + "\n"


def without_repeats(documents: Iterable[str]) -> Iterator[str]:
    """Drop repeated paragraphs: topics quote each other, and validation must not contain training text."""
    seen: set[str] = set()
    for document in documents:
        kept, before = [], len(seen)
        for paragraph in document.split("\n\n"):
            if paragraph not in seen:
                kept.append(paragraph)
                if len(paragraph) >= REPEATABLE:
                    seen.add(paragraph)
        # Headings alone are not a document: its text is in an earlier document.
        if len(seen) > before:
            yield "\n\n".join(kept)


def _modules(root: Path) -> list[str]:
    """Return the library's source files, relative to `root`, in an order independent of the file system."""
    names = []
    for folder, children, files in os.walk(root):
        # In place: os.walk descends into the remaining folders. A name with a dash belongs to this build and is not a
        # package, such as config-3.11-x86_64-linux-gnu.
        children[:] = [name for name in children if name not in SKIPPED_FOLDERS and "-" not in name]
        # `_sysconfigdata...` holds the compiler's flags of this machine.
        names += [os.path.join(folder, name) for name in files if name.endswith(".py") and "_sysconfigdata" not in name]
    # Some distributions have broken links, such as sitecustomize.py.
    return sorted(Path(name).relative_to(root).as_posix() for name in names if os.path.isfile(name))


def _topics(path: Path) -> Iterator[str]:
    """Yield the topics from a dictionary of strings, parsed as a literal."""
    if not path.is_file():
        return
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            yield from (topics[name] for name in sorted(topics))


def _docstrings(tree: ast.AST, name: str) -> Iterator[str]:
    """Yield each docstring below its object's full name, depth first; only statements that can have one are visited."""
    documented = isinstance(tree, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    docstring = ast.get_docstring(tree) if documented else None  # type: ignore[arg-type]
    if docstring:
        yield f"{name}\n\n{docstring}"
    for child in getattr(tree, "body", []) + getattr(tree, "orelse", []):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, ast.If | ast.Try):
            yield from _docstrings(child, name)
