"""The runs and models to analyse. torch is not imported here, so that a run that does not exist fails at once."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lapcli.recipe import OBJECTIVES
from lapcli.recipe.chat import ChatStageRecipe
from lapcli.runs import INFO, Run, named_run, newest_run, read_run, runs_in
from lapcli.runtime.errors import UsageError


@dataclass(frozen=True)
class Selection:
    """Models and data as the command line names them."""

    runs_dir: Path
    runs: Sequence[str] = ()
    pattern: str | None = None
    models: Sequence[str] = ()  # timm:NAME
    init: bool = False
    checkpoint: str = "last"
    stage: str | None = None
    data: str | None = None
    split: str = "validation"
    limit: int | None = None
    batch: int | None = None
    seed: int = 0


def find_runs(selection: Selection) -> list[Run]:
    """Return the runs in the order in which they are named; the newest finished run if none is named."""
    runs = [named_run(selection.runs_dir, name) for name in selection.runs]
    if selection.pattern is not None:
        names = runs_in(selection.runs_dir)
        matching = [path for path in names if fnmatch.fnmatchcase(path.name, selection.pattern)]
        if not matching:
            raise UsageError(f"no run in {selection.runs_dir} matches --runs {selection.pattern!r}; see --runs-dir")
        runs += [read_run(path) for path in matching]
    if not runs and not selection.models:
        runs = [newest_run(selection.runs_dir, set(OBJECTIVES))]
    runs = list({run.path.resolve(): run for run in runs}.values())
    if selection.stage is None:
        return runs
    return [_stage_of(run, selection.stage, selection.runs_dir) for run in runs]


def _stage_of(run: Run, stage: str, runs_dir: Path) -> Run:
    """Return the run of that stage: the run itself, or the one that `lap sft` trained from it."""
    if isinstance(run.recipe, ChatStageRecipe) and run.recipe.stage == stage:
        return run
    path = runs_dir / f"{run.name}-{stage}"
    if isinstance(run.recipe, ChatStageRecipe) or not (path / INFO).is_file():
        raise UsageError(
            f"there is no {stage} stage of {run.name} ({path}); train it with `lap sft`, or name it: --run"
        )
    return read_run(path)
