"""`lap recipes`: list the recipes that come with lap, or explain the keys of a recipe."""

import fnmatch
import sys
from difflib import get_close_matches
from typing import Annotated

import typer

from lapcli.commands import options
from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import facts

EXAMPLES = """\b
Examples:
  lap recipes
  lap recipes 'vit*'
  lap recipes gpt561m --print
  lap recipes train.micro_batch
"""


def recipes(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMES",
            autocompletion=options.recipe_names,
            help="Names or patterns of recipes, by default all; or keys, such as train.micro_batch or optimizer.",
        ),
    ] = None,
    print_: Annotated[bool, typer.Option("--print", help="Print the content of the files.")] = False,
) -> None:
    """List the shipped recipes, which commands accept by name from any folder; or explain the keys of recipes."""

    from lapcli.recipe.reference import find_keys, nearest_key
    from lapcli.recipe.shipped import list_shipped

    shipped = list_shipped()
    unknown = [name for name in patterns or [] if not any(fnmatch.fnmatchcase(recipe.name, name) for recipe in shipped)]
    keys = [find_keys(name) for name in unknown]
    for name, lines in zip(unknown, keys, strict=True):
        if not lines or len(unknown) < len(patterns or []):
            near = next(iter(get_close_matches(name, [recipe.name for recipe in shipped], 1)), None) or nearest_key(
                name
            )
            hint = f"did you mean {near}?" if near else "lap recipes lists all"
            raise UsageError(f"there is no shipped recipe and no key {name[:60]!r}; {hint}")
    if keys and print_:
        raise UsageError(f"--print is for recipes, and {unknown[0]} is a key; leave one of them out")
    if keys:
        found = [key for lines in keys for key in lines]
        print("\n".join(map(str, found)))
        return
    chosen = [
        recipe
        for recipe in shipped
        if not patterns or any(fnmatch.fnmatchcase(recipe.name, pattern) for pattern in patterns)
    ]
    if print_:
        for recipe in chosen:
            print(recipe.path.read_text(encoding="utf-8"), end="")
    else:
        print(facts([(recipe.name, recipe.summary) for recipe in chosen]))
        print("NAME_kL is NAME with k Laplacian heads in every layer, such as gpt561m_5L.", file=sys.stderr)
