"""Measures a few training steps on this machine, on made-up data: how long one takes and how much memory it needs."""

import dataclasses
import statistics
import time

import torch

from lapcli.kinds import kind_of
from lapcli.kinds.kind import TrainingStep
from lapcli.planning.plan import TrainingPlan
from lapcli.recipe.schema import BaseRecipe
from lapcli.runtime.devices import compute_policy, peak_memory, resident_memory
from lapcli.runtime.ranks import pick_device
from lapcli.training.optimizers import Optimizers


def probe_plan(recipe: BaseRecipe, plan: TrainingPlan, steps: int) -> TrainingPlan:
    """The plan with what was measured in one process: neither reading data nor talking to other processes."""
    train = recipe.train
    device = torch.device(pick_device(train.device))
    if train.threads:
        torch.set_num_threads(train.threads)
    before = 0 if device.type == "cuda" else resident_memory()
    policy = compute_policy(device, train.precision, train.compile)
    step = kind_of(recipe).training_step(recipe, device, policy)
    measured = measure_steps(step, plan.batches.micro_batch, plan.batches.accumulation, steps, device, before)
    hours = None if plan.steps is None else plan.steps * measured["seconds_per_step"] / 3600
    return dataclasses.replace(plan, probe=measured, hours=hours, share_of_peak=None)


def measure_steps(
    step: TrainingStep, examples: int, accumulation: int, steps: int, device: torch.device, before: int
) -> dict[str, float]:
    """Medians over `steps`, after one more that warms up. One of the accumulated micro-batches stands for all."""
    optimizers = Optimizers(step.parameter_groups())
    batch = step.made_up_batch(examples, device)
    micro: list[float] = []
    update: list[float] = []
    for _ in range(steps + 1):
        started = _now(device)
        step.loss(batch).backward()
        done = _now(device)
        optimizers.step()
        optimizers.zero_grad()
        step.after_step()
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
