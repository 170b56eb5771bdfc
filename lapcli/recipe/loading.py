"""Loads a recipe: reads the file and those it `extends`, applies `--set` and `--seed`, checks, and builds it.

Pydantic validates; its errors become problems with the key's file and line, the nearest known key and what is expected.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lapcli.recipe.chat import ChatStageRecipe
from lapcli.recipe.optimizers import OPTIMIZER_SECTIONS, OptimizerSection
from lapcli.recipe.reading import (
    Document,
    KeyPath,
    Problem,
    RecipeError,
    Unreadable,
    dotted,
    has_step,
    in_reading_order,
    key_shown,
    listed,
    quoted,
    read_file,
    read_text,
    value_at,
)
from lapcli.recipe.schema import AnyRecipe, BaseRecipe
from lapcli.recipe.section import Conflicts, Section, inner_section, unusable_sources
from lapcli.runtime.environment import inside_torchrun
from lapcli.runtime.errors import shortened
from lapcli.runtime.plugins import Registry

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Section)
_LONGEST_PATH = 20  # keys of a `--set`; none has more than five

#: The recipe type of each objective, which names the class that trains it; other packages add theirs.
OBJECTIVES: Registry[type[AnyRecipe]] = Registry(
    "objective",
    {
        "language_model": "lapcli.recipe.schema:LanguageModelRecipe",
        "chat": "lapcli.recipe.chat:ChatRecipe",
        "classification": "lapcli.recipe.vision:ClassificationRecipe",
        "self_supervised": "lapcli.recipe.dino:SelfSupervisedRecipe",
    },
)


def shipped_recipes() -> Path:
    """Return the folder of the shipped recipes: beside the package in a checkout, inside it in an installation."""
    package = Path(__file__).parent.parent
    checkout = package.parent / "recipes"
    return checkout if (checkout / "quickstart.yaml").is_file() else package / "recipes"


def find_recipe(name: str | Path) -> Path:
    """Return the file of that name, or else the shipped recipe, such as `quickstart` or `sweeps/laptop`.

    `NAME_kL.yaml` need not exist: it is `NAME.yaml` with k Laplacian heads in every layer.
    """
    path, shipped = Path(name), shipped_recipes()
    try:
        if path.is_file() or _heads_in_name(path):
            return path
    except (OSError, ValueError):  # not a valid file name; reading it will explain why
        return path
    short = path.with_suffix("") if path.suffix in (".yaml", ".yml") else path
    parts = short.parts[1:] if short.parts[:1] == ("recipes",) else short.parts
    if parts and ".." not in parts and not short.is_absolute():
        for folder in (shipped, shipped / "sweeps", shipped / "ladders"):
            file = folder.joinpath(*parts[:-1], f"{parts[-1]}.yaml")
            if file.is_file() or _heads_in_name(file):
                return file
    return path


def _heads_in_name(path: Path) -> Document | None:
    """Return the content that stands in for a missing `NAME_kL.yaml` beside `NAME.yaml`; None for other paths."""
    name = re.fullmatch(r"(.+)_(\d+)L\.yaml", path.name)
    if name is None or path.exists() or not path.with_name(f"{name[1]}.yaml").is_file():
        return None
    values = {"extends": f"{name[1]}.yaml", "model": {"laplacian_heads": int(name[2])}}
    return Document(values, dict.fromkeys([(), ("extends",), ("model", "laplacian_heads")], f"{path}:1"))


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), seed: int | None = None, *, is_kept: bool = False
) -> AnyRecipe:
    """Read a recipe with its parents, apply `--set` and `--seed`, and validate; RecipeError lists every problem.

    `is_kept`: it is the stored recipe of a run, which stays readable under stricter rules of later versions.
    """
    return recipe_loader(path, is_kept=is_kept)(overrides, seed)


def recipe_loader(path: str | Path, *, is_kept: bool = False) -> Callable[[Sequence[str], int | None], AnyRecipe]:
    """Return a `load_recipe` for many overrides of one file, read only once because reading dominates the cost."""
    source = str(path)
    try:
        file, problems = read_with_parents(Path(path))
    except Unreadable as error:
        raise RecipeError(source, [error.problem]) from None

    def load(overrides: Sequence[str], seed: int | None) -> AnyRecipe:
        document, refused = apply_overrides(file, overrides)
        if seed is not None:
            document = document.under(Document({"seed": seed}, {("seed",): "--seed"}))
        recipe = _build(source, document, problems + refused)
        unusable = [] if is_kept else [*recipe.schedule_problems(), *unusable_sources(recipe)]
        if unusable:
            found = [Problem(document.place(tuple(key.split("."))), key, reason) for key, reason in unusable]
            raise RecipeError(source, found)
        for keys, reason in () if is_kept or inside_torchrun() else _ignored(recipe):
            _warn(f"{document.place(keys)}  {dotted(keys)} has no effect: {reason}")
        return recipe

    return load


def _ignored(section: Section) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys that have no effect, in a section and its subsections."""
    yield from (((key,), reason) for key, reason in section.ignored().items())
    for name in type(section).model_fields:
        if isinstance(inner := getattr(section, name), Section):
            yield from (((name, *keys), reason) for keys, reason in _ignored(inner))


@cache
def _warn(text: str) -> None:
    """Warn only once, since a sweep loads a recipe for each of its cells."""
    log.warning("warning: %s", text)


def recipe_from_dict(values: Mapping[str, Any], source: str = "the recipe") -> AnyRecipe:
    """Build a recipe from the values of `recipe_to_dict`; errors name `source`."""
    return _build(source, Document(dict(values), {(): source}), [])


def _build(source: str, document: Document, problems: list[Problem]) -> AnyRecipe:
    schema, wrong = _recipe_type(document)
    recipe, found = check_recipe(schema, document) if schema is not None else (None, [])
    problems = problems + wrong + [problem for problem in found if problem.key not in {each.key for each in wrong}]
    if problems or recipe is None:
        raise RecipeError(source, in_reading_order(problems, source))
    return recipe


def _recipe_type(document: Document) -> tuple[type[AnyRecipe] | None, list[Problem]]:
    """Return the recipe type of the objective, or the problem with its name."""
    values = document.values
    name = values.get("objective")
    if name == "chat" and "stage" in values:
        return ChatStageRecipe, []  # the stored recipe of one stage's run
    if isinstance(name, str) and name in OBJECTIVES:
        return _with_optimizer(OBJECTIVES[name], document)
    for key, command in {"cells": "sweep", "rungs": "ladder"}.items():
        if "objective" not in values and key in values:
            return None, [Problem(document.place(()), key, f"this is a file of `lap {command}`, not a recipe")]
    expected = _expected(OBJECTIVES)
    message = f"{expected}, got {quoted(name)}" if "objective" in values else f"is missing; {expected}"
    near = get_close_matches(str(name), OBJECTIVES, 1)  # whose keys are checked at once too
    return OBJECTIVES[near[0]] if near else None, [Problem(document.place(("objective",)), "objective", message)]


def _with_optimizer(recipe: type[AnyRecipe], document: Document) -> tuple[type[AnyRecipe], list[Problem]]:
    """Return the recipe type with the section of the optimizer that the file names, if it may name any optimizer."""
    section = document.values.get("optimizer")
    name = section.get("name") if isinstance(section, dict) else None
    if not issubclass(recipe, BaseRecipe) or not recipe.takes_any_optimizer or name is None:
        return recipe, []
    default: Any = recipe.model_fields["optimizer"].annotation
    own_names = get_args(default.model_fields["name"].annotation)
    if name in own_names:
        return recipe, []
    if isinstance(name, str) and name in OPTIMIZER_SECTIONS:
        return _recipe_with_section(recipe, OPTIMIZER_SECTIONS[name]), []
    message = f"{_expected(dict.fromkeys((*own_names, *OPTIMIZER_SECTIONS)))}, got {quoted(name)}"
    return recipe, [Problem(document.place(("optimizer", "name")), "optimizer.name", message)]


def _expected(names: Iterable[str]) -> str:
    return f"expected {listed([f'`{name}`' for name in names])}"


@cache
def _recipe_with_section(recipe: type[BaseRecipe], section: type[OptimizerSection]) -> type[BaseRecipe]:
    """Return the recipe type with another section under `optimizer`; as a subclass it is still a recipe of its kind."""
    return create_model(recipe.__name__, __base__=recipe, __module__=recipe.__module__, optimizer=(section, ...))


def read_with_parents(path: Path) -> tuple[Document, list[Problem]]:
    """Read a recipe and all files it extends; every value keeps the file and line it comes from."""
    document, problems = Document({}, {}), list[Problem]()
    chain: list[str] = []
    extends_at: str | None = None  # the place of the `extends` that named this file
    current: Path | None = path
    while current is not None:
        heads = _heads_in_name(current)
        if heads is None:
            _must_be_a_file(current, extends_at)
        chain.append(os.path.realpath(current))
        if chain[-1] in chain[:-1]:
            names = " -> ".join(Path(name).name for name in chain[chain.index(chain[-1]) :])
            raise Unreadable(Problem(extends_at or str(path), "extends", f"the files extend each other: {names}"))
        file, unreadable = read_file(current) if heads is None else (heads, [])
        problems += unreadable
        extends_at = file.places.pop(("extends",), None)
        current = _parent(current, file.values.pop("extends"), extends_at) if extends_at else None
        document = file.under(document)
    return Document(document.values, {**document.places, (): f"{path}:1"}), problems


def apply_overrides(document: Document, overrides: Sequence[str]) -> tuple[Document, list[Problem]]:
    """Apply each `key.path=value` like a file of one line that extends the recipe before it."""
    problems: list[Problem] = []
    for text in overrides:
        key, sign, value_text = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        try:
            if not sign or not all(path) or len(path) > _LONGEST_PATH:
                raise Unreadable(
                    Problem("--set", "", f"expected key.path=value, such as train.steps=100, got {quoted(text)}")
                )
            value, wrong = read_text(value_text, lambda line: "--set", under=path)
            if value is None:
                raise Unreadable(Problem("--set", "", "has no value after `=`; write null to mean none"))
        except Unreadable as error:
            problems.append(Problem("--set", key_shown(key), error.problem.message))
            continue
        problems += wrong
        values = value.values
        for part in reversed(path):
            values = {part: values}
        # A section of the file keeps its line, because a message about a missing key points there.
        above: list[KeyPath] = [path[:depth] for depth in range(1, len(path))]
        new = {section: "--set" for section in above if not isinstance(value_at(document.values, section), dict)}
        document = document.under(Document(values, {**new, **value.places}))
    return document, problems


def _parent(child: Path, name: Any, where: str) -> Path:
    if not isinstance(name, str) or not name.endswith((".yaml", ".yml")):
        raise Unreadable(Problem(where, "extends", f"expected the name of one .yaml file, got {quoted(name)}"))
    return child.parent / name


def _must_be_a_file(path: Path, extends_at: str | None) -> None:
    """Refuse a missing file, with the nearest existing name, and folders, devices and pipes."""
    try:
        if path.is_file():
            return
        names = [entry.name for entry in path.parent.glob("*.y*ml")]
    except (OSError, ValueError):
        names = []
    if not extends_at and len(path.parts) == 1:
        names += [entry.stem for entry in shipped_recipes().glob("*.yaml")]
    near = get_close_matches(path.name, names, 1, 0.5)
    hint = f"did you mean {path.parent / near[0]}?" if near else "check the name"
    if extends_at:
        raise Unreadable(Problem(extends_at, "extends", f"{quoted(str(path))} is not a file; {hint}"))
    raise Unreadable(Problem(shortened(str(path)), "", f"is not a file; {hint}"))


def check_recipe(schema: type[S], document: Document) -> tuple[S | None, list[Problem]]:
    """Return the recipe, or the problems that prevent it. Conflicting keys are found once every key is valid."""
    try:
        return schema.model_validate(document.values), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    found = dict[KeyPath, Problem]()  # one for each key: a union has an error for each of its forms
    conflicts: list[Problem] = []
    missing, meant = set[KeyPath](), set[KeyPath]()  # keys that are missing; keys that a misspelt one stands for
    for detail in details:
        conflict = detail.get("ctx", {}).get("error")
        if isinstance(conflict, Conflicts):
            conflicts += _conflicts(conflict, detail["loc"], document)
            continue
        path = _path(detail, document.values)
        section, field = _field(schema, path)
        if field is None and (near := misspelt(str(path[-1]), section)):
            meant.add((*path[:-1], near))
        if detail["type"] == "missing":
            missing.add(path)
        message = _message(detail, section, field, value_at(document.values, path), schema, path)
        found.setdefault(path, Problem(document.place(path), dotted(path), message))
    # A misspelt key is not also missing.
    return None, [problem for path, problem in found.items() if path not in missing & meant] + conflicts


def _path(detail: ErrorDetails, values: Any) -> KeyPath:
    """Return the path of the key, without the names of union members that pydantic adds."""
    path = detail["loc"]
    for depth, step in enumerate(path):
        if not has_step(values, step):
            is_missing = detail["type"] == "missing" and depth == len(path) - 1 and isinstance(values, dict)
            return path if is_missing else path[:depth]
        values = values[step]
    return path


def _field(section: type[Section], path: KeyPath) -> tuple[type[Section], FieldInfo | None]:
    """Return the section that contains a key, and the key's field; None for an unknown key."""
    *above, last = [step for step in path if isinstance(step, str)]
    for key in above:
        section = inner_section(section.model_fields[key]) or section
    return section, section.model_fields.get(last)


def _message(
    detail: ErrorDetails,
    section: type[Section],
    field: FieldInfo | None,
    value: Any,
    recipe: type[Section],
    path: KeyPath,
) -> str:
    if field is None:
        return unknown_key(str(path[-1]), section, recipe)
    inner = inner_section(field)
    if detail["type"] == "missing":
        needed = [name for name, key in inner.model_fields.items() if key.is_required()] if inner else []
        return f"the section is missing; it needs {', '.join(needed)}" if needed else "is missing; add it"
    if inner and detail["type"].startswith("model"):
        return f"expected keys under it, such as `{next(iter(inner.model_fields))}:`, got {quoted(value)}"
    if detail["type"] == "value_error":  # of a validator of ours
        return str(detail["ctx"]["error"])
    expected = field.description or detail["msg"].removeprefix("Input should be ")
    return f"expected {expected}, got {quoted(value)}"


def _conflicts(conflicts: Conflicts, path: KeyPath, document: Document) -> Iterator[Problem]:
    for keys, reason in conflicts.found:
        places = {key: place for key in keys if (place := document.places.get((*path, key)))}
        where = places.get(keys[0]) or next(iter(places.values()), document.place(path))
        # The other key of a conflict may come from a parent file or from an option.
        others = [f"`{key}` is from {place}" for key, place in places.items() if _source(place) != _source(where)]
        yield Problem(where, dotted((*path, keys[0])), reason + (f" ({', '.join(others)})" if others else ""))


def _source(where: str) -> str:
    return where.rpartition(":")[0] or where


def key_paths(section: type[Section], under: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return every key that a recipe may have, sections included."""
    paths: list[tuple[str, ...]] = []
    for name, field in section.model_fields.items():
        paths.append((*under, name))
        if inner := inner_section(field):
            paths += key_paths(inner, (*under, name))
    return paths


def misspelt(key: str, section: type[Section]) -> str | None:
    """Return the key of this section that `key` misspells by a letter or two."""
    return next(iter(get_close_matches(key, list(section.model_fields), 1, cutoff=0.8)), None)


def unknown_key(key: str, section: type[Section], recipe: type[Section]) -> str:
    """Return the message for a key that its section does not have."""
    if similar := get_close_matches(key, list(section.model_fields), 1):
        return f"unknown key; did you mean `{similar[0]}`?"
    name = key.rpartition(".")[2]
    if elsewhere := [".".join(path) for path in key_paths(recipe) if path[-1] == name]:
        return f"unknown key here; did you mean {listed([f'`{path}`' for path in elsewhere])}?"
    return f"unknown key; known here: {', '.join(section.model_fields)}"
