"""The built-in text: what every Python installation says about itself.

The documentation topics of `pydoc` and the docstrings of the standard library, one document a topic and one a module.
The sources are parsed with `ast`, never imported or run. It differs a little between Python versions, so runs are
compared within one.
"""

import ast
import gc
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lapcli.data.cache import build_once, digest
from lapcli.runtime.environment import cache_dir
from lapcli.runtime.errors import DataError
from lapcli.runtime.files import sha256_of_file

# Installed or not by the taste of distributors, or no library documentation.
SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "tkinter", "distutils", "ensurepip"),
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__", "pydoc_data", "encodings"),
}
TEXT_FILE = "text.jsonl"
REPEATABLE = 40  # characters; a shorter paragraph is a heading or a name
VERSION = 1  # of the extraction; a change of it builds the text again


def builtin_text() -> Path:
    """The jsonl file of the built-in text, extracted on the first call."""
    root = Path(sysconfig.get_path("stdlib"))
    return build_once(builtin_folder(root), lambda folder: _extract(root, folder), _is_whole) / TEXT_FILE


def builtin_folder(root: Path | None = None) -> Path:
    root = root or Path(sysconfig.get_path("stdlib"))
    sources = [(name, (root / name).stat().st_size) for name in _modules(root)]
    return cache_dir() / "builtin" / digest(VERSION, platform.python_version(), sources)[:16]


def builtin_documents(root: Path) -> Iterator[str]:
    yield from _topics(root / "pydoc_data" / "topics.py")
    for name in _modules(root):
        try:
            tree = ast.parse((root / name).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # a distributor's stub in another encoding is no reason to fail
        if docstrings := list(_docstrings(tree, name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))):
            yield "\n\n".join(docstrings) + "\n"


def _extract(root: Path, folder: Path) -> None:
    with _collector_paused():
        documents = list(without_repeats(builtin_documents(root)))
    if not documents:
        raise DataError(f"this Python carries no documentation ({root}); name another text in data.train")
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    (folder / TEXT_FILE).write_text("".join(lines), encoding="utf-8")
    content = hashlib.sha256("".join(lines).encode()).hexdigest()
    (folder / "index.json").write_text(json.dumps({"sha256": content}))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Syntax trees have no cycles; looking for some among everything that is loaded takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def without_repeats(documents: Iterable[str]) -> Iterator[str]:
    """Each paragraph once. Topics quote each other's sections, and validation must not be text that was trained on."""
    seen: set[str] = set()
    for document in documents:
        kept = []
        new = False
        for paragraph in document.split("\n\n"):
            if len(paragraph) < REPEATABLE:
                kept.append(paragraph)
            elif paragraph not in seen:
                seen.add(paragraph)
                kept.append(paragraph)
                new = True
        if new:
            yield "\n\n".join(kept)


def builtin_sha256(text: Path) -> str:
    return str(json.loads((text.parent / "index.json").read_text())["sha256"])


def _is_whole(folder: Path) -> bool:
    try:
        return sha256_of_file(folder / TEXT_FILE) == builtin_sha256(folder / TEXT_FILE)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _modules(root: Path) -> list[str]:
    """The library's source files, relative to `root`, in an order that does not depend on the file system."""
    names = []
    for folder, children, files in os.walk(root):
        children[:] = [name for name in children if name not in SKIPPED_FOLDERS and "-" not in name]
        # `_sysconfigdata...` holds the compiler's flags of this machine.
        names += [os.path.join(folder, name) for name in files if name.endswith(".py") and "_sysconfigdata" not in name]
    # Distributors leave links that lead nowhere, such as sitecustomize.py.
    return sorted(Path(name).relative_to(root).as_posix() for name in names if os.path.isfile(name))


def _topics(path: Path) -> Iterator[str]:
    """The topics are one dictionary of strings, which is read as a literal."""
    if not path.is_file():
        return
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            yield from (topics[name] for name in sorted(topics))


def _docstrings(tree: ast.AST, name: str) -> Iterator[str]:
    """Each under the full name of what it documents, depth first. Only statements are walked: the rest has none."""
    documented = isinstance(tree, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    docstring = ast.get_docstring(tree) if documented else None  # type: ignore[arg-type]
    if docstring:
        yield f"{name}\n\n{docstring}"
    for child in getattr(tree, "body", []) + getattr(tree, "orelse", []):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, ast.If | ast.Try):
            yield from _docstrings(child, name)
