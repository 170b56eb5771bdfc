"""`lap fetch RECIPE`: do everything that a run needs the network for, and print the sizes."""

import json

from lapcli.commands import options
from lapcli.runtime.tables import aligned

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

    from lapcli.objectives import objective_of
    from lapcli.runtime.progress import shown_progress

    loaded = options.load_with_data(recipe, set_, data)
    with shown_progress() as progress:
        fetched = objective_of(loaded).fetch(loaded, progress)
    if as_json:
        print(json.dumps(fetched, indent=2))
        return
    for row in fetched if isinstance(fetched, list) else [fetched]:
        shown = {key: f"{value:,}" if isinstance(value, int) else str(value) for key, value in row.items()}
        print("\n".join(aligned([(key.replace("_", " "), value) for key, value in shown.items()])))
