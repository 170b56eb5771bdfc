"""`lap fetch RECIPE`: do everything that a run needs the network for, and print the sizes."""

import json

from lapcli.commands import options

EXAMPLES = """\b
Examples:
  lap fetch recipes/gpt561m.yaml
  lap fetch recipes/gpt561m.yaml --data ~/fineweb-edu --json
  lap fetch recipes/chat561m.yaml
"""


def fetch(
    recipe: options.Recipe, set_: options.Set = None, data: options.Data = None, as_json: options.Json = False
) -> None:
    """Download a recipe's data and tokenise its text, once. Afterwards everything runs with HF_HUB_OFFLINE=1."""

    from lapcli.kinds import kind_of, load_recipe_with_data
    from lapcli.runtime.progress import shown_progress

    loaded = load_recipe_with_data(recipe, set_ or [], data)
    with shown_progress() as progress:
        fetched = kind_of(loaded).fetch(loaded, progress)
    if as_json:
        print(json.dumps(fetched.facts, indent=2))
        return
    for line in fetched.lines:
        print(line)
