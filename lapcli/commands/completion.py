"""What the shell offers at Tab: names of runs, recipes and tasks, and keys of `--set` with their values.

Nothing here imports torch; names of runs and recipes need no more than a look at a folder. A completion that fails
offers nothing, so that no traceback lands in the middle of a line.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from lapcli.runtime.environment import runs_dir


def _harmless(complete: Callable[[str], Iterator[str]]) -> Callable[[str], list[str]]:
    def offered(incomplete: str) -> list[str]:
        try:
            return [word for word in complete(incomplete) if word.startswith(incomplete)]
        except Exception:  # a recipe that does not load, a folder that cannot be read: there is nothing to offer
            return []

    return offered


@_harmless
def runs(incomplete: str) -> Iterator[str]:
    """Names in the folder of runs; a name that begins with a dot is of a run that is still being prepared."""
    return (path.parent.name for path in sorted(_runs_dir().glob("*/run.json")) if path.parent.name[:1] != ".")


@_harmless
def recipes(incomplete: str) -> Iterator[str]:
    """Shipped ones by name, and files and folders below what was typed."""
    from lapcli.recipe.loading import shipped_recipes

    folder = shipped_recipes()
    yield from (str(path.relative_to(folder).with_suffix("")) for path in sorted(folder.rglob("*.yaml")))
    before, slash, _ = incomplete.rpartition("/")
    for path in sorted(Path(before + slash or ".").glob("*")):  # none where there is no such folder
        if path.is_dir() and not path.name.startswith("."):
            yield f"{before}{slash}{path.name}/"
        elif path.suffix in (".yaml", ".yml"):
            yield f"{before}{slash}{path.name}"


@_harmless
def tasks(incomplete: str) -> Iterator[str]:
    """The next of a list such as top1,top5; those of the run's kind if a run is named."""
    from lapcli.evaluation.families import evaluated_kinds, families_of
    from lapcli.runs import named_run

    run = _given("--run")
    kinds = evaluated_kinds() if run is None else [named_run(_runs_dir(), run).recipe.objective]
    before, comma, _ = incomplete.rpartition(",")
    names = dict.fromkeys(name for kind in kinds for family in families_of(kind) for name in family.tasks)
    return (f"{before}{comma}{name}" for name in names if name not in before.split(","))


@_harmless
def settings(incomplete: str) -> Iterator[str]:
    """`key=` for the keys of the recipe, and `key=value` where the values are few."""
    from lapcli.recipe import find_recipe, load_recipe

    recipe = next(path for word in _words()[2:] if (path := find_recipe(word)).is_file())
    keys = dict(_keys(type(load_recipe(recipe)), ""))
    key, equals, _ = incomplete.partition("=")
    return (f"{key}={value}" for value in keys.get(key, [])) if equals else (f"{key}=" for key in keys)


def _words() -> list[str]:
    """The line so far. Typer passes it to the process in these; where an option's value is missing, as it is while that
    is being completed, it parses nothing of the line."""
    return (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()


def _given(option: str) -> str | None:
    words = _words()
    return words[words.index(option) + 1] if option in words[:-1] else None


def _runs_dir() -> Path:
    return Path(_given("--runs-dir") or runs_dir())


def _keys(annotation: Any, before: str) -> Iterator[tuple[str, list[str]]]:
    """(dotted key, its values if it has a few) of a section and of those inside it."""
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
