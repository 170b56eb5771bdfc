"""`lap plan` of the paper's recipes against its imports: torch, and timm for vision. Target: 3 s more.

Complete processes that take turns; the fastest of each counts. A plan that does not fit traces smaller batches as well.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from measure import alternate

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
PLANS = {
    "561M GPT, four L40": ("torch", ["gpt561m_5L.yaml", "--gpu", "l40", "--gpus", "4"]),
    "561M GPT, one L40, does not fit": ("torch", ["gpt561m_5L.yaml", "--gpu", "l40", "--set", "train.micro_batch=128"]),
    "ViT-B on ImageNet, four L40": ("timm", ["vitb_imagenet_3L.yaml", "--gpu", "l40", "--gpus", "4"]),
    "self-supervised ViT-S, four L40": ("timm", ["dino_vits_3L.yaml", "--gpu", "l40", "--gpus", "4"]),
}


def run(*arguments: str) -> None:
    # Bytecode stays cached between runs, as for users.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    for name, (needed, (recipe, *options)) in PLANS.items():
        seconds = alternate(
            {
                "imports": partial(run, "-c", f"import {needed}"),
                "plan": partial(run, "-m", "lapcli", "plan", str(RECIPES / recipe), *options),
            },
            rounds=5,
        )
        beyond = seconds["plan"] - seconds["imports"]
        print(f"lap plan, {name}: {seconds['plan']:.2f} s, {beyond:.2f} s of it beyond importing {needed}")
