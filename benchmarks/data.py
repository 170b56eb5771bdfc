"""Text: what a second start costs, and what share of a training step reading its batch is.

The quickstart's data and model, prepared in a cache of their own.
"""

import os
import tempfile
import time
from pathlib import Path

from measure import alternate

ROOT = Path(__file__).parent.parent


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LAP_CACHE"] = cache
        from lapcli.data.text.tokens import prepare_text
        from lapcli.objectives.language_model import LanguageModel
        from lapcli.recipe import load_recipe
        from lapcli.recipe.schema import LanguageModelRecipe
        from lapcli.runtime.ranks import join_world

        recipe = load_recipe(ROOT / "recipes/quickstart.yaml")
        assert isinstance(recipe, LanguageModelRecipe)
        starts = []
        for _ in range(2):
            begun = time.perf_counter()
            data = prepare_text(recipe.data, recipe.tokenizer)
            starts.append(time.perf_counter() - begun)
        objective, world = LanguageModel(recipe), join_world("cpu")
        objective.use(data, world)
        objective.build(world.device)

        def forward_and_backward() -> None:
            objective.loss(objective.batch(0, 0)).backward()

        seconds = alternate({"batch": lambda: objective.batch(1, 0), "step": forward_and_backward}, rounds=7)
        print(f"{data.description}")
        print(f"first start  {starts[0]:.2f} s   (tokenizer trained, text tokenised)")
        print(f"second start {starts[1]:.3f} s   target: under 1 s")
        share = seconds["batch"] / seconds["step"]
        print(f"batch        {1e3 * seconds['batch']:.2f} ms, {share:.2%} of forward and backward   target: under 1%")


if __name__ == "__main__":
    main()
