"""The plan of any recipe: builds its model on the meta device, traces a step of it, and touches no data."""

import dataclasses
from typing import Any

import torch

from lapcli.models.compiling import would_compile
from lapcli.objectives.batching import plan_batches
from lapcli.objectives.objective import BatchPlan
from lapcli.planning.kind import Kind
from lapcli.planning.plan import Plan
from lapcli.planning.pretending import pretended
from lapcli.planning.shapes import ShapeMemory
from lapcli.planning.sketch import Sketch
from lapcli.planning.trace import Peak, count_flops, optimizer_bytes, trace_memory
from lapcli.planning.uncompiled import without_compiler
from lapcli.recipe.schema import AnyRecipe, BaseRecipe, LanguageModelRecipe
from lapcli.recipe.self_supervised import SelfSupervisedRecipe
from lapcli.recipe.vision import ClassificationRecipe
from lapcli.runtime.devices import Device, this_device
from lapcli.runtime.errors import UsageError
from lapcli.runtime.ranks import pick_device

META = torch.device("meta")
#: Of a GPU's peak, where nothing was measured: upstream's run of the 561M GPT on eight H100 had a little more.
SHARE_OF_PEAK = 0.4


def plan_training(recipe: AnyRecipe, processes: int = 1, device: Device | None = None) -> Plan:
    """The plan of any recipe on that many processes; `device` none: what a run here would use."""
    if not isinstance(recipe, BaseRecipe):
        raise UsageError(f"a recipe of {recipe.objective} has no model of its own and cannot be planned")
    kind = kind_of(recipe)
    if device is None:
        device = this_device(pick_device("auto" if recipe.train.device == "cuda" else recipe.train.device))
    with without_compiler():
        return _plan(recipe, kind, processes, device)


def _plan(recipe: BaseRecipe, kind: Kind, processes: int, device: Device) -> Plan:
    train = recipe.train
    bf16 = device.uses_bf16(train.precision)
    batches = plan_batches(train.batch, train.micro_batch, processes, kind.multiple)
    sketch = kind.sketch(META, bf16)
    memory = Memory(recipe, kind, device, bf16)
    peak = memory.peak(batches)
    limit = memory.limit(processes)
    fits = None if limit is None else peak.total <= limit
    flops = _flops_per_step(kind, device, bf16, batches)
    hours, share = _reckoned_hours(flops, kind.steps, device.peak(bf16), processes)
    model = sum(x.numel() * x.element_size() for x in sketch.model.state_dict().values())
    checkpoint = model + optimizer_bytes(sketch.groups)
    kept = recipe.checkpoint.keep + kind.keeps_best + 1  # a new one is written before an old one is removed
    download_bytes, download = kind.download()
    plan = kind.head_plan
    shared: dict[str, Any] = {
        "objective": recipe.objective,
        "parameters": _parameters(sketch),
        "laplacian_heads": list(plan.per_layer),
        "heads": plan.heads,
        "head_grid": plan.grid(),
        "steps": kind.steps,
        **dataclasses.asdict(batches),
        "learning_rates": {group.name: group.lr for group in sketch.groups},
        "flops_per_step": flops,
        "flops": None if kind.steps is None else float(flops) * kind.steps,
        "device": device.name,
        "precision": "bf16" if bf16 else "float32",
        "memory": peak.parts,
        "memory_peak_in": peak.phase,
        "memory_limit": limit,
        "fits": fits,
        "largest_micro_batch": None if fits in (True, None) else memory.largest(batches, peak),
        "checkpoint_bytes": checkpoint,
        "disk_bytes": checkpoint * kept,
        "download_bytes": download_bytes,
        "download": download,
        "hours": hours,
        "share_of_peak": share,
    }
    return kind.plan(shared)


def kind_of(recipe: BaseRecipe) -> Kind:
    if isinstance(recipe, LanguageModelRecipe):
        from lapcli.planning.language import Language

        return Language(recipe)
    if isinstance(recipe, ClassificationRecipe):
        from lapcli.planning.classification import Classifying

        return Classifying(recipe)
    if isinstance(recipe, SelfSupervisedRecipe):
        from lapcli.planning.self_supervised import SelfSupervising

        return SelfSupervising(recipe)
    raise UsageError(f"objective {recipe.objective} cannot be planned yet")


def _parameters(sketch: Sketch) -> int:
    return sum(p.numel() for p in sketch.model.parameters() if p.requires_grad)


def _flops_per_step(kind: Kind, device: Device, bf16: bool, batches: BatchPlan) -> int:
    """Counted with one layer and with two: every further layer costs the same, and a micro-batch as the next."""
    with pretended(device.type, bf16=bf16, compiled=False, whole_loss=True):
        one, two = (count_flops(kind.sketch(META, bf16, layers), batches.micro_batch) for layers in (1, 2))
    layers = len(kind.head_plan.per_layer)
    return (one + (layers - 1) * (two - one)) * batches.accumulation * batches.processes


def _reckoned_hours(
    flops: int, steps: int | None, peak: float | None, processes: int
) -> tuple[float | None, float | None]:
    if steps is None or peak is None:
        return None, None
    return flops * steps / (SHARE_OF_PEAK * peak * processes) / 3600, SHARE_OF_PEAK


class Memory:
    """Of one process of a recipe on a device."""

    def __init__(self, recipe: BaseRecipe, kind: Kind, device: Device, bf16: bool) -> None:
        self._kind, self._device, self._bf16 = kind, device, bf16
        self._shapes = ShapeMemory()
        self._compiled = would_compile(recipe.train.compile, device.type)

    def limit(self, processes: int) -> int | None:
        """Processes on the CPU share its memory; each GPU has its own."""
        usable = self._device.usable
        return usable // processes if usable and self._device.type == "cpu" else usable

    def peak(self, batches: BatchPlan) -> Peak:
        with pretended(self._device.type, bf16=self._bf16, compiled=self._compiled):
            return trace_memory(
                self._kind.sketch(META, self._bf16),  # a new one: models keep tables that they made
                batches.micro_batch,
                self._shapes,
                keeps_gradients=batches.accumulation > 1 or batches.processes > 1,
                muon_dtype=torch.bfloat16 if self._device.uses_bf16("auto") else torch.float32,
            )

    def largest(self, batches: BatchPlan, peak: Peak) -> int:
        """The largest micro_batch that fits: reckoned from two sizes, since memory grows evenly, then traced."""
        limit = self.limit(batches.processes) or 0
        share, multiple = batches.batch // batches.processes, self._kind.multiple
        sizes = [n for n in range(multiple, batches.micro_batch, multiple) if share % n == 0]
        if not sizes:
            return 0
        smallest = self.peak(self._split(batches, sizes[0])).total
        if smallest > limit:
            return 0
        slope = (peak.total - smallest) / (batches.micro_batch - sizes[0])
        for size in reversed(sizes):
            if smallest + slope * (size - sizes[0]) <= limit * 1.02 and (
                self.peak(self._split(batches, size)).total <= limit
            ):
                return size
        return sizes[0]

    def _split(self, batches: BatchPlan, micro_batch: int) -> BatchPlan:
        return plan_batches(batches.batch, micro_batch, batches.processes, self._kind.multiple)
