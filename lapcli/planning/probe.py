"""Measures a few training steps on this machine, on made-up data: how long one takes and how much memory it needs."""

import dataclasses
import statistics
import time

import torch

from lapcli.models.compiling import would_compile
from lapcli.planning.plan import Plan
from lapcli.planning.sketch import Sketch
from lapcli.planning.training import kind_of
from lapcli.recipe.schema import BaseRecipe
from lapcli.runtime.devices import peak_memory, resident_memory
from lapcli.runtime.ranks import pick_device
from lapcli.training.optimizers import Optimizers


def probe_plan(recipe: BaseRecipe, plan: Plan, steps: int) -> Plan:
    """The plan with what was measured in one process: neither reading data nor talking to other processes."""
    device = torch.device(pick_device(recipe.train.device))
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    before = 0 if device.type == "cuda" else resident_memory()
    sketch = kind_of(recipe).sketch(
        device, plan.precision == "bf16", compiled=would_compile(recipe.train.compile, device.type)
    )
    found = measure_steps(sketch, plan.micro_batch, plan.accumulation, steps, device, before)
    hours = None if plan.steps is None else plan.steps * found["seconds_per_step"] / 3600
    return dataclasses.replace(plan, probe=found, hours=hours, share_of_peak=None)


def measure_steps(
    sketch: Sketch, examples: int, accumulation: int, steps: int, device: torch.device, before: int
) -> dict[str, float]:
    """Medians over `steps`, after one more that warms up. Of the accumulated micro-batches one is taken for all."""
    optimizers = Optimizers(sketch.groups)
    micro: list[float] = []
    update: list[float] = []
    for _ in range(steps + 1):
        started = _now(device)
        sketch.loss(sketch.forward(examples)).backward()
        done = _now(device)
        optimizers.step()
        optimizers.zero_grad()
        sketch.after_step()
        micro.append(done - started)
        update.append(_now(device) - done)
    seconds = statistics.median(micro[1:]) * accumulation + statistics.median(update[1:])
    return {"steps": steps, "seconds_per_step": seconds, "memory": float(_memory(device) - before)}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_memory()
