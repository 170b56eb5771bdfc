"""`lap plan RECIPE`: what a recipe would train and what that takes, before anything starts."""

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lapcli.commands import options
from lapcli.runtime.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from lapcli.recipe import BaseRecipe
    from lapcli.runtime.devices import Device

EXAMPLES = """\b
Examples:
  lap plan recipes/quickstart.yaml
  lap plan recipes/gpt561m_5L.yaml --gpu l40 --gpus 4
  lap plan recipes/vitb_imagenet_3L.yaml --gpu a100 --set train.micro_batch=256 --json
  lap plan recipes/quickstart.yaml --probe 5
"""


def plan(
    recipe: options.Recipe,
    set_: options.Set = None,
    data: options.Data = None,
    gpu: Annotated[
        Literal["l40", "h100", "a100", "cpu"] | None,
        typer.Option("--gpu", help="What to plan for; by default what is here."),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=4096, help="How many of them.")] = None,
    probe: Annotated[
        int | None, typer.Option("--probe", metavar="STEPS", min=1, help="Measure so many steps here, on made-up data.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Parameters, batches, rates, FLOPs, memory, disk, download and hours of a recipe; exit code 3: it will not fit."""
    from lapcli.planning import plan_training
    from lapcli.recipe import BaseRecipe, load_recipe

    loaded = load_recipe(recipe, options.overrides(set_, data))
    if not isinstance(loaded, BaseRecipe):
        raise UsageError(f"{recipe} has stages, whose model is a run's; `lap sft {recipe} --dry-run` counts their rows")
    device = _device(gpu, loaded, probing=probe is not None)
    found = plan_training(loaded, gpus or _how_many(gpu, loaded), device)
    if probe is not None and found.fits is False:
        print("lap: it would not fit, so no step was tried", file=sys.stderr)
    elif probe is not None:
        from lapcli.planning.probe import probe_plan

        found = probe_plan(loaded, found, probe)
    print(found.to_json() if as_json else found.to_text())
    if found.fits is False:
        raise typer.Exit(ExitCode.WILL_NOT_FIT)


def _device(gpu: str | None, recipe: "BaseRecipe", probing: bool) -> "Device | None":
    from lapcli.runtime.devices import GPUS, this_cpu

    if gpu is None:
        return None
    if gpu == "cpu":
        if recipe.train.device == "cuda":
            raise UsageError("train.device is cuda; plan for a GPU, or add --set train.device=cpu")
        return this_cpu()
    if recipe.train.device not in {"auto", "cuda"}:
        raise UsageError(f"train.device is {recipe.train.device}, so no GPU would be used; leave --gpu {gpu} out")
    if probing:
        raise UsageError(f"--probe measures what is here; leave --gpu {gpu} out")
    return GPUS[gpu]


def _how_many(gpu: str | None, recipe: "BaseRecipe") -> int:
    """One of a named device; of this machine's, as many as `lap train` would use."""
    from lapcli.runtime.launch import Processes

    return 1 if gpu else Processes().here(recipe.train.device)
