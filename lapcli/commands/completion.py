"""Completion in the shell: names of runs, recipes and tasks, and keys of `--set` with their values.

torch is never imported; names of runs and recipes are read from a folder. A completion that fails offers nothing, so
that no traceback is printed into the user's line.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from lapcli.runtime.environment import runs_dir
from lapcli.runtime.errors import LapError

_BASH_WORDS, _BASH_PLACE = "COMP_WORDS", "COMP_CWORD"  # variables that Typer's script for bash sets
_begun = ""  # `key=`, while bash completes only its value


def join_words_of_bash() -> None:
    """Join `key`, `=` and `value`, into which bash splits `--set key=value` to complete the last one alone.

    The key is remembered in `_begun` while its value is completed.
    """
    global _begun
    split_words = os.environ.get(_BASH_WORDS, "").split("\n")  # a word a line; the last is empty after a space
    if os.environ.get("_LAP_COMPLETE") != "complete_bash" or "=" not in split_words:
        return
    words: list[str] = []
    for word in split_words[: int(os.environ[_BASH_PLACE]) + 1]:
        is_joined = words and (word == "=" or words[-1].endswith("="))
        words[-1:] = [words[-1] + word] if is_joined else [*words[-1:], word]
    if "=" in words[-1] and not words[-1].startswith("-"):
        key, _, words[-1] = words[-1].partition("=")
        _begun = f"{key}="
    os.environ |= {_BASH_WORDS: "\n".join(words), _BASH_PLACE: str(len(words) - 1)}


def _harmless(complete: Callable[[str], Iterator[str]]) -> Callable[[str], list[str]]:
    def offered(incomplete: str) -> list[str]:
        whole = _begun + incomplete
        try:
            return [word.removeprefix(_begun) for word in complete(whole) if word.startswith(whole)]
        except Exception:  # a recipe that does not load, a folder that cannot be read: nothing is offered
            return []

    return offered


@_harmless
def runs(incomplete: str) -> Iterator[str]:
    """Offer the names in the folder of runs; a name that begins with a dot is a run that is still being prepared."""
    return (path.parent.name for path in sorted(_runs_dir().glob("*/run.json")) if path.parent.name[:1] != ".")


@_harmless
def recipes(incomplete: str) -> Iterator[str]:
    """Offer shipped recipes by name, and files and folders below what was typed."""
    from lapcli.recipe.loading import shipped_recipes

    folder = shipped_recipes()
    yield from (str(path.relative_to(folder).with_suffix("")) for path in sorted(folder.rglob("*.yaml")))
    before, slash, _ = incomplete.rpartition("/")
    for path in sorted(Path(before + slash or ".").glob("*")):  # empty if the folder does not exist
        if path.is_dir() and not path.name.startswith("."):
            yield f"{before}{slash}{path.name}/"
        elif path.suffix in (".yaml", ".yml"):
            yield f"{before}{slash}{path.name}"


@_harmless
def tasks(incomplete: str) -> Iterator[str]:
    """Offer the next task of a list such as top1,top5; those of the run's kind if an existing run is named."""
    from lapcli.evaluation.families import evaluated_kinds, families_of
    from lapcli.runs import named_run

    kinds = evaluated_kinds()
    if run := _given("--run"):
        with contextlib.suppress(LapError):
            kinds = [named_run(_runs_dir(), run).recipe.objective]
    before, comma, _ = incomplete.rpartition(",")
    names = dict.fromkeys(name for kind in kinds for family in families_of(kind) for name in family.tasks)
    return (f"{before}{comma}{name}" for name in names if name not in before.split(","))


@_harmless
def settings(incomplete: str) -> Iterator[str]:
    """Offer `key=` for the keys of the recipe; if one key is left also its values, so that the shell adds no space."""
    from lapcli.recipe import find_recipe, load_recipe

    recipe = next(path for word in _words()[2:] if (path := find_recipe(word)).is_file())
    keys = recipe_keys(type(load_recipe(recipe)))
    key, equals, _ = incomplete.partition("=")
    if equals:
        yield from (f"{key}={value}" for value in keys.get(key, []))
        return
    matching = [key for key in keys if key.startswith(incomplete)]
    yield from (f"{key}=" for key in matching)
    yield from (f"{matching[0]}={value}" for value in keys[matching[0]] if len(matching) == 1)


def recipe_keys(recipe: type) -> dict[str, list[str]]:
    """Return every dotted key that a recipe of that class may have, with its values if they are few."""
    return dict(_keys(recipe, ""))


def _words() -> list[str]:
    """Return the words of the line so far, from the variables in which Typer passes them.

    Typer itself does not parse the line while an option's value is missing, as during its completion.
    """
    return (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()


def _given(option: str) -> str | None:
    words = _words()
    return words[words.index(option) + 1] if option in words[:-1] else None


def _runs_dir() -> Path:
    return Path(_given("--runs-dir") or runs_dir())


def _keys(annotation: Any, before: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (dotted key, its values if they are few) of a section and of its subsections."""
    from lapcli.recipe.section import Section

    if isinstance(annotation, type) and issubclass(annotation, Section):
        for name, field in annotation.model_fields.items():
            inner = list(_keys(field.annotation, f"{before}{name}."))
            yield from inner or [(f"{before}{name}", list(_values(field.annotation)))]
    elif get_origin(annotation) not in (list, tuple, dict, Literal):
        for part in get_args(annotation):
            yield from _keys(part, before)


def _values(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) not in (list, tuple, dict):
        for part in get_args(annotation):
            yield from _values(part)
