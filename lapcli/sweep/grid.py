"""The cells of a sweep: values and their combinations, the names of runs, and the recipe of each cell.

A cell is an ordinary run, trained by `lap train` with its own name, and the commands that follow it. Its name is made
from its own values alone, so that a grid can grow and its runs keep their names.

    --over model.laplacian_heads=0,3,6                     numbers
    --over 'model.laplacian_heads=[0,0,3,3],[3,3,0,0]'     lists with one number a layer
    --over 'model.laplacian_heads=linear(0, 4),4'          schedules
"""

import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lapcli.recipe import BaseRecipe, RecipeError, canonical_json, recipe_hash, recipe_loader, recipe_to_dict
from lapcli.recipe.reading import Problem, Unreadable, read_text
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import sha256_of_json

Over = dict[str, list[Any]]
LAPLACIAN_HEADS, OPERATORS = "model.laplacian_heads", "model.operators"
_LONGEST_NAME = 110  # of the 128 characters that a run's name may have: chat stages add to it
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def parse_over(options: Sequence[str]) -> Over:
    """Parse the `--over` options: the values of each key, in order."""
    over: Over = {}
    for option in options:
        key, sign, text = option.partition("=")
        key = key.strip()
        if not sign or not key or not text.strip():
            raise UsageError(f"--over takes KEY=VALUE,VALUE such as seed=0,1,2, got {option[:80]!r}")
        if key in over:
            raise UsageError(f"--over {key} is given twice; put all its values into one")
        over[key] = [_read(key, part) for part in split_values(text)]
    return over


def split_values(text: str) -> list[str]:
    """Split at commas that are not inside brackets or quotes."""
    # Not a YAML list: YAML would split `linear(0, 4)` at its comma, since round brackets mean nothing to it.
    parts, open_brackets, quote, start = [], [], "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in _CLOSING:
            open_brackets.append(_CLOSING[sign])
        elif open_brackets and sign == open_brackets[-1]:
            open_brackets.pop()
        elif sign == "," and not open_brackets:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:])]


def _read(key: str, text: str) -> Any:
    """Read a value as in a recipe."""
    try:
        document, problems = read_text(text, lambda line: "--over", under=(key,))
    except Unreadable as error:
        raise UsageError(f"--over {key}: {text[:60]!r} {error.problem.message}") from None
    if problems:
        raise UsageError(f"--over {key}: {problems[0].message}")
    if document is None or not text:
        raise UsageError(f"--over {key} has no value between two commas; write null to mean none")
    return document.values


def repeated(key: str, values: Sequence[Any]) -> Any | None:
    """Return a value of the key that occurs twice, however it is written; None if there is none."""
    seen = set()
    for value in values:
        text = canonical_json(key, value)
        if text in seen:
            return value
        seen.add(text)
    return None


def combinations(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the values; the last key varies fastest."""
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def override(key: str, value: Any) -> str:
    """Return the value in the form of `--set`, as JSON."""
    # Not escaped: JSON writes a character beyond U+FFFF as two surrogates, which YAML reads as two characters.
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def cell_name(prefix: str, values: Mapping[str, Any]) -> str:
    """Return the run's name, such as `vitb_cifar100-12L-drop_path0.1-seed2`, with Laplacian heads as in the paper."""
    last = [key.rpartition(".")[2] for key in values]
    parts = [re.sub(r"[^A-Za-z0-9._+-]+", "_", prefix).strip("._+-") or "cell"]
    for key, value in values.items():
        short = key.rpartition(".")[2]
        if key == LAPLACIAN_HEADS:
            parts.append(f"{_text(value)}L")
        elif key == OPERATORS:
            parts.append(_text(value) if value else "plain")
        else:
            # The whole key where two of the grid end alike, such as validation.every and checkpoint.every.
            parts.append((key if last.count(short) > 1 else short) + _text(value))
    name = re.sub(r"[^A-Za-z0-9._+-]", "_", "-".join(parts))
    # The hash is of the cell's own values, so that its name does not change when the grid grows.
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 9]}-{sha256_of_json(values)[:8]}"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        # One name for 1e-3 and 0.001; all digits where %g would give two values the same name.
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return "_".join(map(_text, value))
    if isinstance(value, dict):
        return "_".join(key + _text(inner) for key, inner in value.items())
    text = str(value)
    clean = re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")
    # A hash, because two paths may differ only in characters that a name cannot contain.
    is_plain = re.fullmatch(r"[A-Za-z0-9.+-]+|linear\([ 0-9,]*\)", text)
    return clean if is_plain else f"{clean[-40:]}.{sha256_of_json(text)[:6]}"


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    name: str
    recipe: Path
    overrides: tuple[str, ...]  # in the form of `--set`
    values: Mapping[str, Any]  # what makes it this cell
    loaded: BaseRecipe = field(repr=False)
    then: tuple[str, ...] = ()  # commands that follow its training
    is_search: bool = False

    @cached_property
    def recipe_sha256(self) -> str:
        return recipe_hash(self.loaded)

    def arguments(self, runs_dir: Path) -> list[str]:
        """Return the words after `lap` that train the cell."""
        sets = [word for text in self.overrides for word in ("--set", text)]
        return ["train", str(self.recipe), *sets, "--name", self.name, "--runs-dir", str(runs_dir)]


@dataclass(frozen=True)
class GridSearch:
    """A search: the run with the best number in its last validation sets values of the grid."""

    over: Over
    set: Mapping[str, Any]
    keep: Mapping[str, Any]
    by: str
    best: str


@dataclass(frozen=True)
class Grid:
    """One recipe and the keys that are varied."""

    recipe: Path
    over: Over
    prefix: str
    set: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # `--set` of the command line, in every cell; overrides the file's values
    then: tuple[str, ...] = ()
    search: GridSearch | None = None
    folder: Path = Path()
    place: Callable[..., str] = lambda *keys: "--over"  # where a key stands: ("over", key), ("then", 0)

    @property
    def size(self) -> int:
        """The number of cells of the grid and its search, without building any."""
        searched = math.prod(map(len, self.search.over.values())) if self.search else 0
        return searched + math.prod(map(len, self.over.values()))

    def cells(
        self,
        chosen: Mapping[str, Any] | None = None,
        only: Callable[[str], bool] = lambda name: True,
        over: Over | None = None,
    ) -> list[Cell]:
        """Build the cells with the values that a search chose; values equal to the recipe's do not change the names.

        `only` selects cells by name; `over` replaces the grid's own values.
        """
        over = self.over if over is None else over
        values = {**self._kept(), **(chosen or {})}
        places = {key: self.place("set", key) for key in self.set} | {
            **{key: self.place("search", "keep", key) for key in self._kept()},
            **{key: self.place("search", "over", key) for key in chosen or {}},
            **{key: self.place("over", key) for key in self.over},
        }
        return self._make(self.prefix, over, {**self.set, **values}, self._changes(values), places, only=only)

    def search_cells(self) -> list[Cell]:
        search = self.search
        if search is None:
            return []
        places = {key: self.place("set", key) for key in self.set}
        for name, keys in (("keep", search.keep), ("set", search.set), ("over", search.over)):
            places |= {key: self.place("search", name, key) for key in keys}
        set_ = {**self.set, **self._kept(), **search.set}
        return self._make(f"{self.prefix}-search", search.over, set_, {}, places, is_search=True)

    def choices(self) -> list[dict[str, Any]]:
        """Return every choice that the search can make; an empty list without a search."""
        return [] if self.search is None else combinations(self.search.over)

    def possible_cells(self) -> Iterator[tuple[dict[str, Any], list[Cell] | RecipeError]]:
        """Yield every choice of the search with the cells that it leads to, or with the problems of their recipes.

        Only the first seed is used: no other key of a recipe depends on the seed.
        """
        one_seed = {key: values[:1] if key == "seed" else values for key, values in self.over.items()}
        for choice in self.choices():
            try:
                yield choice, self.cells(choice, over=one_seed)
            except RecipeError as error:
                yield choice, error

    def _kept(self) -> dict[str, Any]:
        """Return the values of the search's `keep`, except those that `--set` overrides."""
        given = {text.partition("=")[0].strip() for text in self.options}
        return {key: value for key, value in (self.search.keep if self.search else {}).items() if key not in given}

    def _changes(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chosen values that differ from the grid's own recipe, and so belong in the names."""
        if not chosen:
            return {}
        recipe = recipe_to_dict(self._load((*(override(key, value) for key, value in self.set.items()), *self.options)))
        return {key: value for key, value in chosen.items() if _value_at(recipe, key) != value}

    def _make(
        self,
        prefix: str,
        over: Over,
        set_: Mapping[str, Any],
        named: Mapping[str, Any],
        places: Mapping[str, str],
        *,
        is_search: bool = False,
        only: Callable[[str], bool] = lambda name: True,
    ) -> list[Cell]:
        """Build cells. `named`: values in the names beside those of `over`; `places`: where each key was written."""
        cells = []
        problems: list[Problem] = []
        # Later ones win: the command line over the file, and the cell's own values, added below, over both.
        common = (*(override(key, value) for key, value in set_.items()), *self.options)
        for values in combinations(over):
            name = cell_name(prefix, {**named, **values})
            if not only(name):
                continue
            overrides = (*common, *(override(key, value) for key, value in values.items()))
            try:
                recipe = self._load(overrides)
            except RecipeError as error:
                placed = [_at_its_place(problem, places) for problem in error.problems]
                problems += [problem for problem in placed if problem not in problems]
                continue
            then = () if is_search else tuple(fill_command(text, name, recipe.seed, self.folder) for text in self.then)
            cells.append(Cell(name, self.recipe, overrides, values, recipe, then, is_search))
        if problems:
            raise RecipeError(str(self.recipe), problems)
        return cells

    def _load(self, overrides: tuple[str, ...]) -> BaseRecipe:
        """Load the recipe of a cell, once: checks, costs, the search and the runner all build the same cells."""
        if overrides not in self._loaded:
            try:
                recipe = self._loader(overrides, None)
            except RecipeError as error:
                recipe = error
            self._loaded[overrides] = recipe
        recipe = self._loaded[overrides]
        if isinstance(recipe, RecipeError):
            raise recipe
        if not isinstance(recipe, BaseRecipe):
            message = "has stages, which start from a run: put it into `then`, as sft RECIPE"
            raise RecipeError(str(self.recipe), [Problem(str(self.recipe), "stages", message)])
        return recipe

    @cached_property
    def _loader(self) -> Callable[[Sequence[str], int | None], Any]:
        return recipe_loader(self.recipe)

    @cached_property
    def _loaded(self) -> dict[tuple[str, ...], Any]:
        return {}


def fill_command(text: str, run: str, seed: int, folder: Path) -> str:
    """Fill in a command of `then` for one run; without {run}, `--run` is added."""
    marks = {"{run}": run, "{seed}": str(seed), "{folder}": str(folder)}
    named = "{run}" in text
    for mark, value in marks.items():
        text = text.replace(mark, shlex.quote(value))
    return text if named else f"{text} --run {shlex.quote(run)}"


def _value_at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _at_its_place(problem: Problem, places: Mapping[str, str]) -> Problem:
    """Change a problem to name the place where a value was written; the cell itself got it by `--set`."""
    varied = {key.rpartition(".")[2] for key in places}
    message = re.sub(
        r"`(\w+)` is from --set",
        lambda match: match[0].replace("--set", "the grid") if match[1] in varied else match[0],
        problem.message,
    )
    if problem.where != "--set":
        return Problem(problem.where, problem.key, message)
    for key, place in places.items():
        # With the dot, so that only whole parts of a key match.
        if f"{problem.key}.".startswith((f"{key}.", f"{key}[")) or key.startswith(f"{problem.key}."):
            return Problem(place, problem.key, message)
    return Problem(problem.where, problem.key, message)
