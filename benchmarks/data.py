"""Text: tokenising on all cores against one, the cost of a second start, and reading a batch as a fraction of a step.

The quickstart's data and model, prepared in a separate cache.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import alternate

ROOT = Path(__file__).parent.parent


ENCODE = """
import sys, time
from lapcli.data.text.builtin import builtin_text
from lapcli.data.text.tokenizer import Tokenizer
tokenizer, text = Tokenizer.from_file(sys.argv[1]), builtin_text().read_text()
texts = [text[start : start + 10_000] for start in range(0, len(text), 10_000)] * 4
begun = time.perf_counter()
tokenizer.encode_batch(texts)
print(len(texts) * 10_000 / (time.perf_counter() - begun) / 1e6)
"""


def tokenising(tokenizer: str, threads: int) -> float:
    """Million characters per second in a separate process, since the library reads its number of threads once."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", ENCODE, tokenizer]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


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
        file, cores = f"{cache}/tokenizer.json", os.cpu_count() or 1
        data.tokenizer.save(file)
        turns = [(tokenising(file, 1), tokenising(file, cores)) for _ in range(5)]
        one, all_cores = (max(speeds) for speeds in zip(*turns, strict=True))
        objective, world = LanguageModel(recipe), join_world("cpu")
        objective.use(data, world)
        objective.build(world.device)

        def forward_and_backward() -> None:
            objective.loss(objective.batch(0, 0)).backward()

        seconds = alternate({"batch": lambda: objective.batch(1, 0), "step": forward_and_backward}, rounds=7)
        print(f"{data.description}")
        print(f"first start  {starts[0]:.2f} s   (tokenizer trained, text tokenised)")
        print(f"second start {starts[1]:.3f} s   target: under 1 s")
        print(f"tokenising   {one:.1f} million characters/s on one core, {all_cores / one:.2f} times that on {cores}")
        fraction = seconds["batch"] / seconds["step"]
        print(f"batch        {1e3 * seconds['batch']:.2f} ms, {fraction:.2%} of forward and backward; target: under 1%")


if __name__ == "__main__":
    main()
