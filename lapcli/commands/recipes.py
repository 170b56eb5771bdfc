"""`lap recipes`: list the recipes that come with lap."""

import fnmatch
import sys
from difflib import get_close_matches
from typing import Annotated

import typer

from lapcli.commands import options
from lapcli.commands.options import print_json
from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import facts

EXAMPLES = """\b
Examples:
  lap recipes
  lap recipes 'vit*'
  lap recipes gpt561m --print
"""


def recipes(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMES",
            autocompletion=options.recipe_names,
            help="Names or patterns; by default all.",
        ),
    ] = None,
    print_: Annotated[bool, typer.Option("--print", help="Print the files themselves.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the shipped recipes. Commands accept them by name, from any folder."""

    from lapcli.recipe.shipped import list_shipped

    if print_ and as_json:
        raise UsageError("--print gives the files and --json the list; leave one of them out")
    shipped = list_shipped()
    for pattern in patterns or []:
        if not any(fnmatch.fnmatchcase(recipe.name, pattern) for recipe in shipped):
            near = get_close_matches(pattern, [recipe.name for recipe in shipped], 1)
            hint = f"did you mean {near[0]}?" if near else "lap recipes lists all"
            raise UsageError(f"there is no shipped recipe {pattern[:60]!r}; {hint}")
    chosen = [
        recipe
        for recipe in shipped
        if not patterns or any(fnmatch.fnmatchcase(recipe.name, pattern) for pattern in patterns)
    ]
    if as_json:
        print_json([{**vars(recipe), "path": str(recipe.path)} for recipe in chosen])
    elif print_:
        for recipe in chosen:
            print(recipe.path.read_text(encoding="utf-8"), end="")
    else:
        print(facts([(recipe.name, recipe.summary) for recipe in chosen]))
        print("NAME_kL is NAME with k Laplacian heads in every layer, such as gpt561m_5L.", file=sys.stderr)
