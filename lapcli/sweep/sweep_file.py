"""The schema of sweep files: grids of recipes, the commands after each run, and the report at the end.

    cells:
      - recipe: ../vitb_cifar100.yaml         # beside this file
        search:                               # runs first; the best of these is used in every cell of `over`
          over: {optimizer.lr: [3e-4, 5e-4]}
          set: {data.validation: 0.1}         # only in the search
          keep: {schedule.start_lr: 3e-6}     # in the search and in the grid that follows it
          by: validation_top1
          best: highest
        over: {model.laplacian_heads: [0, 6, 12], seed: [0, 1, 2]}
        then: eval --tasks top1
    report: --rows model.laplacian_heads

A sweep file is checked as strictly as a recipe, and errors name file and line.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lapcli.recipe.checking import check_recipe, misspelt
from lapcli.recipe.loading import find_recipe, read_with_parents
from lapcli.recipe.reading import Document, RecipeError, Unreadable, in_reading_order
from lapcli.recipe.section import Section, Text, combination

Values = Annotated[list[Any], Field(min_length=1, max_length=1000)]


class Search(Section):
    """Runs that choose values for the grid: those of the best run by a validation metric."""

    over: Annotated[dict[str, Values], Field(min_length=1)]
    set: dict[str, Any] = Field(default_factory=dict)  # only in the search, such as images held out from training
    # In the search and in the grid after it, which would otherwise be trained differently from what was searched;
    # without the search (`--no-search`) the recipe's own values stay.
    keep: dict[str, Any] = Field(default_factory=dict)
    by: Text  # a metric of the last validation, such as validation_top1
    best: Literal["highest", "lowest"]


class CellGroup(Section):
    """One recipe and the keys that vary; every combination of values is a cell."""

    recipe: Text  # path from the sweep file
    name: Text | None = None  # first part of the runs' names; null: the recipe's
    set: dict[str, Any] = Field(default_factory=dict)  # applied to every cell
    search: Search | None = None
    over: dict[str, Values] = Field(default_factory=dict)
    # Commands after training: eval, analyze or sft. {run}, {seed} and {folder} (of this file) are filled in; without
    # {run}, `--run` is added.
    then: Text | list[Text] = Field(default_factory=list, description="a command, such as eval --tasks top1, or a list")

    @combination("over", "set")
    def _varied_or_set(self) -> str | None:
        both = [key for key in self.over if key in self.set]
        return f"{', '.join(both)} is also in set; keep one" if both else None

    @combination("search", "over", "set")
    def _chosen_once(self) -> str | None:
        taken = [] if self.search is None else [key for key in self.search.over if key in {**self.over, **self.set}]
        return f"{', '.join(taken)} is searched and is also in over or set; keep one" if taken else None

    @combination("search", "over", "set")
    def _kept_once(self) -> str | None:
        search = self.search
        if search is None:
            return None
        others = {**search.over, **search.set, **self.over, **self.set}
        twice = [key for key in search.keep if key in others]
        return f"{', '.join(twice)} is in keep and also in another over or set; keep one" if twice else None

    def commands(self) -> list[str]:
        return [self.then] if isinstance(self.then, str) else list(self.then)


class SweepFile(Section):
    cells: Annotated[list[CellGroup], Field(min_length=1, max_length=100)]
    report: Text | list[Text] = Field(  # options of `lap report`, which gets the runs of the cells
        default_factory=list, description="options of lap report, such as --format html, or a list of such texts"
    )

    def reports(self) -> list[str]:
        return [self.report] if isinstance(self.report, str) else list(self.report)


@dataclass(frozen=True)
class LoadedSweep:
    path: Path
    sweep: SweepFile
    document: Document

    def place(self, *keys: str | int) -> str:
        """Return the file and line of a key, or of the nearest section above it that is in the file."""
        return self.document.place(keys)


def load_sweep(path: Path) -> LoadedSweep | None:
    """Load a sweep file; None if the file is a recipe. RecipeError lists every problem at once."""
    path = find_recipe(path)
    try:
        document, problems = read_with_parents(path)
    except Unreadable as error:
        raise RecipeError(str(path), [error.problem]) from None
    if "objective" in document.values or not any(
        key in SweepFile.model_fields or misspelt(key, SweepFile) for key in document.values
    ):
        return None
    sweep, wrong = check_recipe(SweepFile, document)
    if sweep is None or problems:
        raise RecipeError(str(path), in_reading_order([*problems, *wrong], str(path)))
    return LoadedSweep(path, sweep, document)
