"""Which runs are analysed. No torch in here: a name that is none is refused at once."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lapcli.recipe.chat import ChatStageRecipe
from lapcli.recipe.schema import LanguageModelRecipe
from lapcli.runs import INFO, Run, named_run, newest_run, read_run
from lapcli.runtime.errors import UsageError

OBJECTIVES = {"language_model", "classification", "self_supervised"}


@dataclass(frozen=True)
class Choice:
    """Which models on which data, as the command was asked."""

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


def find_runs(choice: Choice) -> list[Run]:
    """In the order they were named; the newest finished one if none was."""
    found = [named_run(choice.runs_dir, name) for name in choice.runs]
    if choice.pattern is not None:
        paths = sorted(path.parent for path in choice.runs_dir.glob(f"*/{INFO}"))
        matching = [path for path in paths if fnmatch.fnmatchcase(path.name, choice.pattern)]
        if not matching:
            raise UsageError(f"no run in {choice.runs_dir} matches --runs {choice.pattern!r}; see --runs-dir")
        found += [read_run(path) for path in matching]
    if not found and not choice.models:
        found = [newest_run(choice.runs_dir, OBJECTIVES)]
    found = list({run.path.resolve(): run for run in found}.values())
    return found if choice.stage is None else [_stage_of(run, choice.stage, choice.runs_dir) for run in found]


def _stage_of(run: Run, stage: str, runs_dir: Path) -> Run:
    """The run of a chat stage that began with a pretrained one."""
    if isinstance(run.recipe, ChatStageRecipe) and run.recipe.stage == stage:
        return run
    path = runs_dir / f"{run.name}-{stage}"
    if not isinstance(run.recipe, LanguageModelRecipe) or not (path / INFO).is_file():
        raise UsageError(
            f"there is no {stage} stage of {run.name} ({path}); train it with `lap sft`, or name it: --run"
        )
    return read_run(path)
