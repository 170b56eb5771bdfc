"""The plan of a run, before anything starts: sizes, batches, rates, cost, memory, disk, time.

Its model is built on the meta device and one step is traced; no data is touched. `measure` also runs a few steps.
"""

import bisect
import dataclasses
import math
import statistics
import time
from typing import Any

import torch

from lapcli.heads.plan import HeadPlan
from lapcli.objectives import objective_of
from lapcli.objectives.objective import BatchPlan, Objective, plan_batches
from lapcli.planning.step_trace import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    PARTS,
    TEMPORARY,
    UPDATE,
    StepTrace,
    TooManyOperations,
    trace_step,
    trace_update,
)
from lapcli.recipe.schema import AnyRecipe, BaseRecipe, TransformerModel
from lapcli.runtime.devices import ComputePolicy, Device, compute_policy, prefer_attention_kernels, this_device
from lapcli.runtime.environment import usable_cores
from lapcli.runtime.errors import UsageError
from lapcli.runtime.ranks import pick_device
from lapcli.runtime.tables import wrapped
from lapcli.training.optimizers import Optimizers, state_bytes
from lapcli.training.train import checkpoint_bytes, checkpoints_held

#: Model FLOPs utilisation of compiled bf16 training by objective, for the estimate of hours; cautious: nanochat reports
#: 0.47 for its d20 on H100s, timm's ViT-B under AMP is between 0.3 and 0.4 on A100s, and crops of DINO are small.
MFU = {"language_model": 0.4, "chat": 0.4, "classification": 0.33, "self_supervised": 0.15}
OTHER_MFU = 0.3
#: Tracing an operation takes a tenth of a millisecond. Only losses with many chunks exceed this.
MOST_OPERATIONS, FEW_OPERATIONS = 30_000, 6000


def plan_training(
    recipe: AnyRecipe,
    processes: int = 1,
    device: Device | None = None,
    mfu: float | None = None,
    price: float | None = None,
) -> "TrainingPlan":
    """Plan a run of a recipe on this number of processes; without `device`, on the device that a run here would use.

    `mfu` is the model's fraction of the peak FLOPs; `price` is per device and hour.
    """
    if not isinstance(recipe, BaseRecipe):
        raise UsageError(f"a recipe of {recipe.objective} has no model of its own; plan the recipes of its runs")
    is_here = device is None
    if device is None:
        device = this_device(pick_device("auto" if recipe.train.device == "cuda" else recipe.train.device))
    plan = TrainingPlan(recipe, processes, device)
    plan.estimate_time(mfu, price, is_here)
    return plan


class _TracedPolicy(ComputePolicy):
    """The policy of the planned device for tensors on the CPU, so with the CPU's autocast."""

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)


class TrainingPlan:
    """The contents and the cost of a recipe's run. Bytes and traces are those of one process."""

    def __init__(self, recipe: BaseRecipe, processes: int, device: Device, *, advises: bool = True) -> None:
        self._recipe, self._device, self.device, train = recipe, device, device.name, recipe.train
        self._policy = device.policy(train.precision, train.compile)
        self._traces: dict[tuple[int, bool], StepTrace] = {}
        self._too_many: float = math.inf  # examples whose step has more than MOST_OPERATIONS
        self._objective = self._built()
        model, groups = self._objective.model, self._objective.parameter_groups()
        self.batches = objective_of(recipe)(recipe).plan_batches(processes)
        self.facts = self._objective.plan_facts()
        self.steps = self.facts.steps
        section: Any = getattr(recipe, "model", None)
        self.heads: HeadPlan | None = section.head_plan() if isinstance(section, TransformerModel) else None
        self.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.learning_rates = {group.name: group.lr for group in groups}
        self._trained = _bytes(p for p in model.parameters() if p.requires_grad)
        self._optimizer = state_bytes(groups)
        self._update_peak = trace_update(self._built())
        self.flops_per_step = self._trace(self.batches).flops * self.batches.accumulation * processes
        self.flops_per_unit = self.flops_per_step // (self.batches.batch * self.facts.units_per_example)
        self.flops = None if self.steps is None else float(self.flops_per_step) * self.steps
        self.precision = "bf16" if self._policy.bf16 else "float32"
        self.memory_peak_in, self.memory = self._peak(self.batches)
        self.memory_total = sum(self.memory.values())
        # Processes on the CPU share the machine's memory; each GPU has its own.
        shared = processes if device.type == "cpu" else 1
        self.memory_limit = None if device.usable is None else device.usable // shared
        #: None if the memory of the device is not known
        self.fits = None if self.memory_limit is None else self.memory_total <= self.memory_limit
        #: that fits, if this one does not; 0: none does
        self.largest_micro_batch = self._largest() if self.fits is False and advises else None
        #: changes of the recipe with which it fits at the same micro-batch
        self.fitting_changes = self._fitting_changes() if self.fits is False and advises else None
        #: Bytes that a process sends in a step to share weights, gradients and Muon's matrices.
        self.communication_bytes = self._communication()
        self.checkpoint_bytes = checkpoint_bytes(self._objective)
        self.disk_bytes = self.checkpoint_bytes * checkpoints_held(recipe, self._objective, self.steps)
        self.hours: float | None = None
        self.mfu: float | None = None  # None: the peak is unknown, or a step was measured
        self.reading_cores: int | None = None  # that decode examples as fast as the devices train on them
        self.cost: float | None = None  # in the currency of the given price
        self.seconds_per_step: float | None = None  # measured

    def _built(self) -> Objective[Any]:
        objective = objective_of(self._recipe)(self._recipe)
        # Coarse: each chunk of a loss is traced.
        policy = {**dataclasses.asdict(self._policy), "compiles": False, "coarse": True}
        objective.build(torch.device("meta"), _TracedPolicy(**policy))
        if self._recipe.train.recompute == "blocks":
            objective.recompute_blocks()
        return objective

    def _trace(self, batches: BatchPlan) -> StepTrace:
        """Trace a micro-batch.

        A loss that processes its rows in small chunks has too many operations to trace for many examples. The trace is
        then extrapolated from two smaller micro-batches, which fill the buffer of a chunk; all else grows linearly.
        """
        examples, keeps, size = batches.micro_batch, _keeps_gradients(batches), self._objective.multiple
        if examples < self._too_many:
            try:
                return self._traced(examples, keeps)
            except TooManyOperations:
                self._too_many = examples
        while 4 * size < examples and self._traced(size, keeps).operations < FEW_OPERATIONS:
            size *= 2
        start, end = self._traced(size, keeps), self._traced(2 * size, keeps)
        return end.beyond(start, (examples - 2 * size) / size)

    def _traced(self, examples: int, keeps: bool) -> StepTrace:
        key = examples, keeps
        if key not in self._traces:
            limit = MOST_OPERATIONS if examples > 4 * self._objective.multiple else math.inf
            self._traces[key] = trace_step(self._built(), examples, keeps, limit)
        return self._traces[key]

    def _peak(self, batches: BatchPlan) -> tuple[str, dict[str, int]]:
        """Return the phase of a step with the peak memory of the process, and its bytes by part."""
        kept = self._trained if _keeps_gradients(batches) else 0
        peaks = {phase: dict(parts) for phase, parts in self._trace(batches).peaks.items()}
        for phase in (FORWARD, BACKWARD):
            peaks[phase][GRADIENTS] += kept
        peaks[UPDATE] = {**dict.fromkeys(PARTS, 0), GRADIENTS: self._trained, TEMPORARY: self._update_peak}
        phase = max(peaks, key=lambda name: sum(peaks[name].values()))
        held = peaks[phase]
        weights, optimizer = _bytes(self._objective.model.parameters()), self._optimizer
        if (ranks := batches.processes) > 1:
            # Accumulated gradients are complete until the last micro-step; without accumulation each block's are
            # reduced to shards as they appear.
            held[GRADIENTS] = self._trained // ranks + (self._trained if batches.accumulation > 1 else 0)
            sizes, rest = self._gathered()
            keeps_all = self._recipe.train.shard == "gradients"  # else two shards at a time
            gathered = rest + (sum(sizes) if keeps_all else 2 * max(sizes, default=0))
            weights, optimizer = weights // ranks + gathered, optimizer // ranks
            # The buffer from which the gradients of a block are reduced.
            held[TEMPORARY] += max((_bytes(shard.parameters()) for shard in self._objective.shards()), default=0)
        held[ACTIVATIONS] += _bytes(self._objective.model.buffers())
        parts = {"weights": weights, "optimizer": optimizer, **held}
        return phase, {name: parts[name] for name in ("weights", GRADIENTS, "optimizer", ACTIVATIONS, TEMPORARY)}

    def _gathered(self) -> tuple[list[int], int]:
        """Return the bytes of the weights that a process gathers: for each shard, and for all others together."""
        sizes, rest = [], _bytes(self._objective.model.parameters())
        for shard in self._objective.shards():
            dtype = self._objective.gathered_dtype(shard)
            sizes.append(sum(p.numel() * (dtype or p.dtype).itemsize for p in shard.parameters()))
            rest -= _bytes(shard.parameters())
        return sizes, rest

    def _largest(self) -> int:
        """Return the largest smaller micro_batch that fits; 0 if none does."""
        batches, multiple = self.batches, self._objective.multiple
        share = batches.batch // batches.processes
        sizes = [n for n in range(multiple, batches.micro_batch, multiple) if share % n == 0]

        def total(size: int) -> int:
            return sum(self._peak(plan_batches(batches.batch, size, batches.processes, multiple))[1].values())

        fitting = bisect.bisect_right(sizes, self.memory_limit or 0, key=total)
        return sizes[fitting - 1] if fitting else 0

    def _fitting_changes(self) -> dict[str, str] | None:
        """Return the smallest change that makes the run fit without changing its results."""
        shard = {"shard": "weights"} if self.batches.processes > 1 else {}
        for changes in (shard, {"recompute": "blocks"}, {**shard, "recompute": "blocks"}):
            recipe = self._recipe.model_copy(update={"train": self._recipe.train.model_copy(update=changes)})
            if changes and TrainingPlan(recipe, self.batches.processes, self._device, advises=False).fits:
                return {f"train.{key}": value for key, value in changes.items()}
        return None

    def _communication(self) -> int:
        """Gathers of the weights, once a step or twice a micro-step; one reduction of the gradients in float32; and
        Muon's matrices, which go to their owners and back."""
        ranks, objective = self.batches.processes, self._objective
        if ranks == 1:
            return 0
        sizes, rest = self._gathered()
        is_once = self._recipe.train.shard == "gradients"
        gathers = sum(sizes) + rest if is_once else self.batches.accumulation * (2 * sum(sizes) + rest)
        reduced = sum(4 * p.numel() for p in objective.model.parameters() if p.requires_grad)
        muon = [group for group in objective.parameter_groups() if group.optimizer == "muon"]
        exchanged = 2 * sum(_bytes(group.parameters.values()) for group in muon) // ranks
        return (gathers + reduced + exchanged) * (ranks - 1) // ranks

    def estimate_time(self, mfu: float | None, price: float | None, is_here: bool) -> None:
        """Set hours and cost: FLOPs over a fraction of the peak, or the loader's time if it is slower."""
        peak = self._device.peak(self._policy.bf16)
        if peak is None:
            return
        self.mfu = mfu or MFU.get(self._recipe.objective, OTHER_MFU)
        seconds = self.flops_per_step / (self.mfu * peak * self.batches.processes)
        reading = self.facts.read_seconds * self.batches.batch
        self.reading_cores = math.ceil(reading / seconds) or None
        if is_here:  # on another machine, the number of cores is not known
            seconds = max(seconds, reading / usable_cores())
        if self.steps is not None:
            self.hours = self.steps * seconds / 3600
            self.cost = None if price is None else self.hours * self.batches.processes * price

    def measure(self, steps: int) -> None:
        """Replace the estimated hours by measured ones: the median of `steps` of one process, after one to warm up.

        Data is synthetic, and there is no communication.
        """
        recipe, device = self._recipe, torch.device(pick_device(self._recipe.train.device))
        if recipe.train.threads:
            torch.set_num_threads(recipe.train.threads)
        objective = objective_of(recipe)(recipe)
        objective.build(device, compute_policy(device, recipe.train.precision, recipe.train.compile))
        optimizers = Optimizers(objective.parameter_groups())
        batch = objective.synthetic_batch(self.batches.micro_batch, device)
        seconds = []
        with prefer_attention_kernels(device, recipe.train.deterministic):  # as training does
            for _ in range(steps + 1):
                started = time.perf_counter()
                for _ in range(self.batches.accumulation):
                    objective.loss(batch).backward()
                optimizers.step()
                optimizers.zero_grad()
                objective.after_step(0)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
        self.seconds_per_step = statistics.median(seconds[1:])
        self.hours = None if self.steps is None else self.steps * self.seconds_per_step / 3600
        self.mfu = self.cost = None

    def to_dict(self) -> dict[str, Any]:
        hidden = ("facts", "heads", "batches")
        values = {key: x for key, x in vars(self).items() if key not in hidden and not key.startswith("_")}
        values[f"flops_per_{self.facts.unit}"] = values.pop("flops_per_unit")
        if self.heads is not None:
            values |= {"laplacian_heads": list(self.heads.per_layer), "heads": self.heads.heads}
            values["head_grid"] = self.heads.grid()
            if not self.heads.is_laplacian:
                values["operators"] = [self.heads.operator_names(n) for n in range(len(self.heads.per_layer))]
        facts = {name: getattr(self.facts, name) for name in ("epochs", "data")}
        return {
            "objective": self._recipe.objective,
            "compiles": self._policy.compiles,
            **values,
            **dataclasses.asdict(self.batches),
            **facts,
            **self.facts.values,
        }

    def to_text(self) -> str:
        batches, facts, lines = self.batches, self.facts, [("parameters", f"{self.parameters:,}")]
        if self.heads is not None:
            total, plan = self.heads.heads * len(self.heads.per_layer), self.heads
            words = f"{plan.total} of {total} Laplacian (L)"
            if not plan.is_laplacian:
                letters = {c.operator.name: c.operator.letter for layer in plan.layers for c in layer}
                named = ", ".join(f"{count} {name} ({letters[name]})" for name, count in plan.counts().items())
                words = f"of {total}: {named}, the rest attention (A)"
            lines.append(("heads", f"{words}\n{plan.grid()}"))
        steps = "by epochs, known once the data is there" if self.steps is None else f"{self.steps:,}"
        batch = f"{batches.batch:,} {facts.example}"
        if facts.units_per_example > 1:
            batch += f", {batches.batch * facts.units_per_example:,} {facts.unit}s a step"
        processes = f"{batches.processes} process{'es' if batches.processes > 1 else ''}"
        flops = f"{self.flops_per_unit:,} for each {facts.unit}"
        lines += [
            ("steps", steps + (f", {facts.epochs:g} epochs" if facts.epochs else "")),
            (
                "batch",
                f"{batch}\n{processes} x {batches.micro_batch} {facts.example} x {batches.accumulation} accumulated",
            ),
            ("learning rate", ", ".join(f"{rate:.6g} {group}" for group, rate in self.learning_rates.items())),
            ("FLOPs", flops + ("" if self.flops is None else f", {self.flops:.3e} in all")),
            ("memory", self._memory()),
            ("disk", f"{gigabytes(self.disk_bytes)} for checkpoints of {gigabytes(self.checkpoint_bytes)}"),
        ]
        if self.reading_cores:
            lines.append(("cores", f"{self.reading_cores:,} decode images as fast as the devices train"))
        if self.communication_bytes:
            sent = f"{gigabytes(self.communication_bytes)} sent by each process in a step"
            if self._device.link:
                seconds = self.communication_bytes / self._device.link
                sent += f", at least {seconds:.3g} s between GPUs of one machine; a part of it overlaps with the step"
            lines.append(("sharing", sent))
        lines += [("time", self._time()), ("data", facts.data)]
        return "\n".join(
            part
            for name, text in lines
            for number, line in enumerate(text.splitlines())
            for part in wrapped(line, f"{name if number == 0 else '':<15}")
        )

    def _memory(self) -> str:
        total = f"{gigabytes(self.memory_total)} a process, estimated, in {self.precision}"
        parts = ", ".join(f"{part} {gigabytes(size)}" for part, size in self.memory.items())
        if self.memory_limit is None:
            fit = f"the memory of {self.device} is unknown"
        else:
            limit = f"the {gigabytes(self.memory_limit)} that a process has on {self.device}"
            ways = [f"--set train.micro_batch={self.largest_micro_batch}"] if self.largest_micro_batch else []
            if self.fitting_changes:
                ways.append(" ".join(f"--set {key}={value}" for key, value in self.fitting_changes.items()))
            if self.fits:
                fit = f"fits into {limit}"
            elif ways:
                fit = f"does not fit into {limit}; {' or '.join(ways)} does"
            else:
                way = "whatever micro_batch, shard and recompute are; use more or larger GPUs"
                fit = f"does not fit into {limit}, {way}"
        return "\n".join([f"{total}; peak in the {self.memory_peak_in}", parts, fit])

    def _time(self) -> str:
        hours = None if self.hours is None else duration(self.hours)
        if self.seconds_per_step is not None:
            measured = f"{self.seconds_per_step:.3g} s a step, measured here without reading data"
            return measured + ("" if hours is None else f": {hours} in all")
        if hours is None:
            return f"known once {'the data is there' if self.steps is None else 'lap plan --probe has measured a step'}"
        cost = "" if self.cost is None else f", {self.cost:,.2f} at the given price"
        return f"{hours}{cost}, if the FLOPs reach {self.mfu:.0%} of the peak of {self.device} (--mfu)"


def _keeps_gradients(batches: BatchPlan) -> bool:
    return batches.accumulation > 1 or batches.processes > 1


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 5e6 else f"{count / 1e6:.2f} MB"


def duration(hours: float) -> str:
    if hours >= 48:
        return f"{hours:,.0f} hours ({hours / 24:.1f} days)"
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
