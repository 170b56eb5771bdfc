"""`lap plan RECIPE`: estimate what a recipe needs before anything starts."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from lapcli.commands import options
from lapcli.commands.sft import PRETRAINED, STARTS
from lapcli.runtime.devices import GPUS, Device, named_gpu, this_cpu
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import ExitCode, UsageError
from lapcli.runtime.launch import Processes

if TYPE_CHECKING:
    from pathlib import Path

    from lapcli.recipe import AnyRecipe, BaseRecipe

EXAMPLES = """\b
Examples:
  lap plan recipes/quickstart.yaml
  lap plan gpt561m_5L --gpu l40 --gpus 4
  lap plan recipes/chat561m.yaml --run gpt561m_5L --gpu h100 --gpus 8
  lap plan recipes/quickstart.yaml --probe 5
"""


def plan(
    recipe: options.Recipe,
    set_: options.Set = None,
    data: options.Data = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help=f"cpu, or one of {', '.join(GPUS)}; by default this machine's."),
    ] = None,
    tflops: Annotated[
        float | None, typer.Option("--tflops", min=0.1, help="Peak TFLOPs of an unlisted GPU in the run's precision.")
    ] = None,
    memory: Annotated[float | None, typer.Option("--memory", min=0.1, help="Memory of that GPU in GB.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option("--bandwidth", min=0.1, help="Bandwidth between two such GPUs, GB/s per direction.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=4096, help="Number of GPUs.")] = None,
    probe: Annotated[
        int | None,
        typer.Option("--probe", metavar="STEPS", min=1, help="Steps to measure on this machine, on random data."),
    ] = None,
    mfu: Annotated[
        float | None,
        typer.Option(
            "--mfu", min=0.01, max=1, help="Assumed fraction of the peak; the default depends on the objective."
        ),
    ] = None,
    price: Annotated[float | None, typer.Option("--price", min=0, help="Price per GPU hour.")] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Chat recipes: the pretrained run to start from; by default the newest finished."),
    ] = None,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Estimate a recipe's parameters, FLOPs, memory, disk and hours. The exit code is 3 if it does not fit."""

    from lapcli.planning import plan_training

    loaded = options.load_with_data(recipe, set_, data)
    plans = {}
    for stage, staged in _run_recipes(loaded, runs_dir or default_runs_dir(), run).items():
        device = _device(gpu, (tflops, memory, bandwidth), staged, probing=probe is not None)
        # One process for a named device; on this machine as many processes as `lap train` would use.
        processes = gpus or (1 if device else Processes().here(staged.train.device))
        plan = plan_training(staged, processes, device, mfu, price)
        if probe is not None and plan.fits is False:
            print("lap: the recipe would not fit, so no step was measured", file=sys.stderr)
        elif probe is not None:
            plan.measure(probe)
        plans[stage] = plan
    if as_json:
        values = {stage: plan.to_dict() for stage, plan in plans.items()}
        print(json.dumps(values.get("", values), indent=2))  # a recipe without stages has one plan without a name
    else:
        print("\n\n".join(f"{stage}\n{plan.to_text()}".lstrip() for stage, plan in plans.items()))
    if any(plan.fits is False for plan in plans.values()):
        raise typer.Exit(ExitCode.WILL_NOT_FIT)


def _run_recipes(recipe: "AnyRecipe", runs_dir: "Path", run: str | None) -> "dict[str, BaseRecipe]":
    """Return the recipes of a recipe file's runs by stage; the first stage starts from `run`."""
    from lapcli.recipe import BaseRecipe
    from lapcli.recipe.chat import ChatRecipe

    if isinstance(recipe, BaseRecipe):
        if run is not None:
            raise UsageError(f"a recipe of {recipe.objective} defines its own model; leave --run out")
        return {"": recipe}
    assert isinstance(recipe, ChatRecipe)
    from lapcli.runs import find_run
    from lapcli.training.stages import from_run, stage_recipes

    given = recipe.init_from if run is None else None
    if given is None:
        given = from_run(find_run(runs_dir, run, PRETRAINED if run is None else STARTS), runs_dir)
    return dict(stage_recipes(recipe, given, runs_dir))


def _device(gpu: str | None, given: tuple[float | None, ...], recipe: "BaseRecipe", probing: bool) -> "Device | None":
    tflops, memory, bandwidth = given
    if gpu is None and any(given):
        if tflops is None or memory is None:
            raise UsageError(
                "a GPU that is not listed needs both --tflops and --memory, and --bandwidth if there are more"
            )
        flops, link = tflops * 1e12, None if bandwidth is None else bandwidth * 1e9
        return Device("the given GPU", "cuda", int(memory * 1e9), flops, flops, link=link)
    if gpu is None:
        return None
    if any(given):
        raise UsageError(f"--gpu {gpu} has its own --tflops, --memory and --bandwidth; leave these out, or --gpu")
    if gpu == "cpu":
        if recipe.train.device == "cuda":
            raise UsageError("train.device is cuda; plan for a GPU, or add --set train.device=cpu")
        return this_cpu()
    if recipe.train.device not in {"auto", "cuda"}:
        raise UsageError(f"train.device is {recipe.train.device}, so no GPU would be used; leave --gpu {gpu} out")
    if probing:
        raise UsageError(f"--probe measures this machine; leave --gpu {gpu} out")
    return named_gpu(gpu)
