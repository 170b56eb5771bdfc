"""Plans any recipe: builds its model on the meta device, traces one training step, and touches no data.

`probe_plan` also runs a few steps on made-up data, to measure how long one takes and how much memory it needs.
"""

import bisect
import dataclasses
import math
import os
import statistics
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lapcli.heads.plan import HeadPlan, LayerClaims, plan_of_layers
from lapcli.objectives import objective_of
from lapcli.objectives.objective import BatchPlan, Objective, plan_batches
from lapcli.planning.plan import TrainingPlan
from lapcli.planning.step_trace import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    TEMPORARY,
    UPDATE,
    StepTrace,
    TooManyOperations,
    trace_step,
    trace_update,
)
from lapcli.recipe.schema import AnyRecipe, BaseRecipe, TransformerModel
from lapcli.runtime.devices import (
    ComputePolicy,
    Device,
    compute_policy,
    peak_memory,
    prefer_attention_kernels,
    this_device,
)
from lapcli.runtime.errors import UsageError
from lapcli.runtime.machine import usable_cores
from lapcli.runtime.ranks import pick_device
from lapcli.training.optimizers import OPTIMIZERS, Optimizers

META = torch.device("meta")
Layers = tuple[LayerClaims, ...]
#: Tracing an operation takes a fifth of a millisecond. Only a loss with many chunks has more operations than this.
MOST_OPERATIONS = 12_000
#: A step with one layer has fewer, unless its loss has several chunks.
FEW_OPERATIONS = 4000


#: Model FLOPs utilisation of compiled bf16 training by objective, for the estimate of hours; cautious: nanochat reports
#: 0.47 for its d20 on H100s, timm's ViT-B under AMP is between 0.3 and 0.4 on A100s, and crops of DINO are small.
MFU = {"language_model": 0.4, "chat": 0.4, "classification": 0.33, "self_supervised": 0.15}
OTHER_MFU = 0.3


def plan_training(
    recipe: AnyRecipe,
    processes: int = 1,
    device: Device | None = None,
    mfu: float | None = None,
    price: float | None = None,
) -> TrainingPlan:
    """Plan a run of a recipe on that many processes; without `device`, on the device that a run here would use.

    `mfu` is the fraction of the peak that the model's FLOPs reach; `price` is that of a device for an hour.
    """
    if not isinstance(recipe, BaseRecipe):
        raise UsageError(f"a recipe of {recipe.objective} has no model of its own; plan the recipes of its runs")
    is_named = device is not None
    if device is None:
        device = this_device(pick_device("auto" if recipe.train.device == "cuda" else recipe.train.device))
    objective = objective_of(recipe)(recipe)
    batches = objective.plan_batches(processes)
    estimate = _Estimate(recipe, device)
    facts = objective.plan_facts(batches)
    phase, memory = estimate.peak(batches)
    limit = device.usable
    if limit is not None and device.type == "cpu":
        limit //= processes  # processes on the CPU share the machine's memory; each GPU has its own
    flops = estimate.trace(batches).flops * batches.accumulation * processes
    mfu = mfu or MFU.get(recipe.objective, OTHER_MFU)
    peak = device.peak(estimate.policy.bf16)
    seconds = None if peak is None else flops / (mfu * peak * processes)
    # Cores that decode examples as fast as the devices train on them; on this machine too few are the limit.
    cores = None if seconds is None else math.ceil(facts.read_seconds * batches.batch / seconds)
    if cores and seconds is not None and not is_named:
        seconds = max(seconds, facts.read_seconds * batches.batch / usable_cores())
    hours = None if seconds is None or facts.steps is None else facts.steps * seconds / 3600
    checkpoint = _bytes(estimate.model.state_dict().values()) + estimate.optimizer_bytes
    fits = limit is None or sum(memory.values()) <= limit
    return TrainingPlan(
        objective=recipe.objective,
        facts=facts,
        parameters=sum(p.numel() for p in estimate.model.parameters() if p.requires_grad),
        heads=estimate.heads,
        operator_flops=estimate.operator_flops,
        batches=batches,
        learning_rates={group.name: group.lr for group in estimate.groups},
        flops_per_step=flops,
        device=device.name,
        precision="bf16" if estimate.policy.bf16 else "float32",
        memory=memory,
        memory_peak_in=phase,
        memory_limit=limit,
        largest_micro_batch=None if fits else estimate.largest(batches, limit or 0),
        compiles=estimate.policy.compiles,
        checkpoint_bytes=checkpoint,
        # A new checkpoint is written before an old one is removed.
        disk_bytes=checkpoint * (recipe.checkpoint.keep + facts.keeps_best + 1),
        hours=hours,
        mfu=None if peak is None else mfu,
        reading_cores=cores or None,
        cost=None if hours is None or price is None else hours * processes * price,
    )


class _TracedPolicy(ComputePolicy):
    """The policy of the planned device for tensors on the CPU, so with the CPU's autocast."""

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)


class _Estimate:
    """FLOPs and memory of one process.

    Layers of a transformer add up: the step is traced with one layer and with two, and every further layer adds the
    difference. In the backward a layer's gradients appear as its activations are freed, so that the larger of the two
    is added.
    """

    def __init__(self, recipe: BaseRecipe, device: Device) -> None:
        self._recipe, train = recipe, recipe.train
        self.policy = device.policy(train.precision, train.compile)
        self._traced = _TracedPolicy(**{**dataclasses.asdict(self.policy), "compiles": False, "coarse": True})
        self._traces: dict[tuple[Layers, int, bool], StepTrace] = {}
        self._too_many: float = math.inf  # examples whose step has more than MOST_OPERATIONS
        section = getattr(recipe, "model", None)
        self.heads: HeadPlan | None = section.head_plan() if isinstance(section, TransformerModel) else None
        step = self._step(self._layers)
        self._objective, self._multiple = step, step.multiple
        self.model, self.groups = step.model, step.parameter_groups()
        self._trained = _bytes(p for p in self.model.parameters() if p.requires_grad)

    @property
    def _layers(self) -> Layers:
        return () if self.heads is None else self.heads.layers

    def _step(self, layers: Layers) -> Objective[Any]:
        """Build the objective with these operators in each layer."""
        recipe: Any = self._recipe
        if layers != self._layers:
            keys = plan_of_layers(layers, recipe.model.heads).recipe_keys()
            section = recipe.model.model_copy(update={"layers": len(layers), **keys})
            recipe = recipe.model_copy(update={"model": section})
        objective = objective_of(recipe)(recipe)
        objective.build(META, self._traced)
        if recipe.train.recompute == "blocks":
            objective.recompute_blocks()
        return objective

    @property
    def operator_flops(self) -> int:
        """FLOPs that the operators add for one token, forward and backward: three times the forward's."""
        section: Any = getattr(self._recipe, "model", None)
        return 0 if self.heads is None else 3 * self.heads.added_flops(section.width // section.heads, section.width)

    @cached_property
    def optimizer_bytes(self) -> int:
        return sum(
            OPTIMIZERS[group.optimizer].state_bytes(p) for group in self.groups for p in group.parameters.values()
        )

    @cached_property
    def update_peak(self) -> int:
        return trace_update(self._step(self._layers))

    def peak(self, batches: BatchPlan) -> tuple[str, dict[str, int]]:
        """Return the phase of a step in which the process holds most memory, and the bytes that it holds by part."""
        trace, keeps = self.trace(batches), _keeps_gradients(batches)
        phases = {phase: trace.peak(phase) for phase in (FORWARD, BACKWARD)}
        phases[UPDATE] = {ACTIVATIONS: 0, GRADIENTS: self._trained, TEMPORARY: self.update_peak}
        phase = max(phases, key=lambda name: sum(phases[name].values()) + keeps * self._trained * (name != UPDATE))
        parts = phases[phase]
        gradients = parts[GRADIENTS] + (self._trained if keeps and phase != UPDATE else 0)
        weights, optimizer = _bytes(self.model.parameters()), self.optimizer_bytes
        if (ranks := batches.processes) > 1:
            # Accumulated gradients are complete until the last micro-step; without accumulation each block's are
            # reduced to shards as they appear.
            gradients = self._trained // ranks + (self._trained if batches.accumulation > 1 else 0)
            weights, optimizer = weights // ranks + self._gathered(), optimizer // ranks
            # The buffer from which the gradients of a block are reduced.
            parts = {**parts, TEMPORARY: parts[TEMPORARY] + max(map(_shard_bytes, self._objective.shards()), default=0)}
        return phase, {
            "weights": weights,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": parts[ACTIVATIONS] + _bytes(self.model.buffers()),
            "temporary": parts[TEMPORARY],
        }

    def _gathered(self) -> int:
        """Bytes of the weights that a process gathers of the others' shards: all, or two blocks and the rest."""
        each = []
        for shard in self._objective.shards():
            dtype = self._objective.gathered_dtype(shard)
            each.append(sum(p.numel() * (dtype or p.dtype).itemsize for p in shard.parameters()))
        sharded = sum(map(_shard_bytes, self._objective.shards()))
        rest = _bytes(self.model.parameters()) - sharded
        return rest + (sum(each) if self._recipe.train.shard == "gradients" else 2 * max(each, default=0))

    def largest(self, batches: BatchPlan, limit: int) -> int:
        """Return the largest smaller micro_batch that fits; 0 if none does."""
        share, multiple = batches.batch // batches.processes, self._multiple
        sizes = [n for n in range(multiple, batches.micro_batch, multiple) if share % n == 0]

        def total(size: int) -> int:
            split = plan_batches(batches.batch, size, batches.processes, multiple)
            return sum(self.peak(split)[1].values())

        fitting = bisect.bisect_right(sizes, limit, key=total)
        return sizes[fitting - 1] if fitting else 0

    def trace(self, batches: BatchPlan) -> StepTrace:
        """Trace a micro-batch.

        A loss that processes its rows in chunks has too many operations to trace for many examples. The trace is then
        extrapolated linearly from two smaller micro-batches: the buffer of a chunk is constant, and all else grows
        linearly.
        """
        keeps, examples = _keeps_gradients(batches), batches.micro_batch
        size = self._multiple
        if examples < 4 * size:
            return self._all_layers(examples, keeps)
        if examples < self._too_many:
            try:
                return self._all_layers(examples, keeps, MOST_OPERATIONS)
            except TooManyOperations:
                self._too_many = examples
        # The smaller of the two has several chunks, so that it fills the buffer of a chunk.
        while 4 * size < examples and self._traced_with(self._layers[:1], 2 * size, keeps).operations < FEW_OPERATIONS:
            size *= 2
        start, end = self._all_layers(size, keeps), self._all_layers(2 * size, keeps)
        return end.beyond(start, (examples - 2 * size) / size)

    def _all_layers(self, examples: int, keeps: bool, most_operations: float = math.inf) -> StepTrace:
        layers = self._layers
        one = self._traced_with(layers[:1], examples, keeps, most_operations)
        if len(layers) < 2:
            return one
        peaks, flops, kept = dict(one.peaks), one.flops, one.kept
        gradients = 0 if keeps else self._gradients_of_a_layer
        for layer in layers[1:]:
            two = self._traced_with((layers[0], layer), examples, keeps, most_operations)
            added = two.kept - one.kept
            flops += two.flops - one.flops
            kept += added
            peaks[FORWARD, ACTIVATIONS] += added
            peaks[BACKWARD, ACTIVATIONS if added > gradients else GRADIENTS] += max(added, gradients)
        return StepTrace(flops, kept, peaks, one.operations)

    @cached_property
    def _gradients_of_a_layer(self) -> int:
        first = self._step(self._layers[:1]).model
        return (self._trained - _bytes(p for p in first.parameters() if p.requires_grad)) // (len(self._layers) - 1)

    def _traced_with(self, layers: Layers, examples: int, keeps: bool, most_operations: float = math.inf) -> StepTrace:
        key = layers, examples, keeps
        if key not in self._traces:
            step = self._step(layers)
            self._traces[key] = trace_step(step, examples, keeps_gradients=keeps, most_operations=most_operations)
        return self._traces[key]


def _shard_bytes(shard: torch.nn.Module) -> int:
    return _bytes(shard.parameters())


def _keeps_gradients(batches: BatchPlan) -> bool:
    return batches.accumulation > 1 or batches.processes > 1


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def probe_plan(recipe: BaseRecipe, plan: TrainingPlan, steps: int) -> TrainingPlan:
    """Add a measurement to the plan: steps of one process, without reading data and without communication."""
    train = recipe.train
    device = torch.device(pick_device(train.device))
    if train.threads:
        torch.set_num_threads(train.threads)
    before = 0 if device.type == "cuda" else resident_memory()
    policy = compute_policy(device, train.precision, train.compile)
    objective = objective_of(recipe)(recipe)
    objective.build(device, policy)
    with prefer_attention_kernels(device, train.deterministic):  # as training does
        measured = measure_steps(objective, plan.batches.micro_batch, plan.batches.accumulation, steps, device, before)
    hours = None if plan.steps is None else plan.steps * measured["seconds_per_step"] / 3600
    return dataclasses.replace(plan, probe=measured, hours=hours, mfu=None, cost=None)


def measure_steps(
    objective: Objective[Any], examples: int, accumulation: int, steps: int, device: torch.device, before: int
) -> dict[str, float]:
    """Measure medians over `steps`, after one step to warm up. Only one of the accumulated micro-batches is computed,
    and its time is multiplied."""
    optimizers = Optimizers(objective.parameter_groups())
    batch = objective.synthetic_batch(examples, device)
    micro: list[float] = []
    update: list[float] = []
    for _ in range(steps + 1):
        started = _now(device)
        objective.loss(batch).backward()
        done = _now(device)
        optimizers.step()
        optimizers.zero_grad()
        objective.after_step(0)
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


def resident_memory() -> int:
    """Return the bytes that this process holds now, or the most it ever held on systems without /proc."""
    try:
        # The second number counts resident pages, the first virtual ones.
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory()
