"""`lap fetch RECIPE`: download and prepare everything for which a run needs the network, and print the sizes."""

import re
from typing import Annotated, Any

import typer

from lapcli.commands import options
from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import aligned

EXAMPLES = """\b
Examples:
  lap fetch recipes/gpt561m.yaml
  lap fetch recipes/gpt561m.yaml --data ~/fineweb-edu
  lap fetch recipes/gpt561m.yaml --part 3/8
  lap fetch recipes/chat561m.yaml
"""


def fetch(
    recipe: options.Recipe,
    set_: options.Set = None,
    data: options.Data = None,
    part: Annotated[
        str | None,
        typer.Option("--part", metavar="I/N", help="Tokenise only part i of n of the text, for array jobs."),
    ] = None,
) -> None:
    """Download a recipe's data and tokenise its text, once. Afterwards everything runs with HF_HUB_OFFLINE=1."""
    from lapcli.recipe.section import check_local_files

    loaded = options.load_with_data(recipe, set_, data)
    check_local_files(loaded)

    from lapcli.objectives import objective_of
    from lapcli.runtime.progress import shown_progress

    with shown_progress() as progress:
        objective: Any = objective_of(loaded)
        if part is not None and loaded.objective != "language_model":
            raise UsageError(f"--part: recipes of {loaded.objective} have no text to tokenise in parts; leave it out")
        fetched = objective.fetch(loaded, progress, **({} if part is None else {"part": _share(part)}))
    for row in fetched if isinstance(fetched, list) else [fetched]:
        shown = {key: f"{value:,}" if isinstance(value, int) else str(value) for key, value in row.items()}
        print("\n".join(aligned([(key.replace("_", " "), value) for key, value in shown.items()])))


def _share(part: str) -> slice:
    """Return the parts of the token store that `--part i/n` selects."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--part {part[:40]!r} is not I/N with I from 1 to N, such as 3/8")
    return slice(int(match[1]) - 1, None, int(match[2]))
