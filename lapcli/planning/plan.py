"""A plan as text and as JSON, for `lap plan` and `lap train --dry-run`."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from lapcli.heads.plan import HeadPlan
from lapcli.objectives.objective import BatchPlan, PlanFacts
from lapcli.runtime.tables import wrapped

_SMALLER = "try --set train.recompute=blocks, and with several GPUs --set train.shard=weights"
COMPILED_NOTE = "assumes that compiled code keeps as much for the backward as uncompiled code does"


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The contents and the cost of a run of a recipe; `facts` are those of its objective."""

    objective: str
    facts: PlanFacts
    # model
    parameters: int
    heads: HeadPlan | None  # of a transformer
    operator_flops: int  # added by head operators for a token, with elementwise operations, which FLOPs leave out
    # batches
    batches: BatchPlan
    learning_rates: dict[str, float]
    # cost
    flops_per_step: int
    # memory, bytes of each process
    device: str
    precision: str
    memory: dict[str, int]  # bytes by part at the peak of a step
    memory_peak_in: str  # forward, backward or update
    memory_limit: int | None
    largest_micro_batch: int | None  # that fits, if this one does not; 0: none does
    compiles: bool
    # disk
    checkpoint_bytes: int
    disk_bytes: int  # of all checkpoints that exist at the same time
    # time
    hours: float | None
    mfu: float | None  # fraction of the peak that the hours assume; None: the peak is unknown, or a step was measured
    reading_cores: int | None  # that decode images as fast as the devices train on them
    cost: float | None  # in the currency of the given price
    probe: dict[str, float] | None = None  # a measurement that replaces the estimate

    @property
    def steps(self) -> int | None:
        return self.facts.steps

    @property
    def memory_total(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool | None:
        """Whether the memory is enough; None if the memory of the device is not known."""
        return None if self.memory_limit is None else self.memory_total <= self.memory_limit

    @property
    def flops(self) -> float | None:
        return None if self.steps is None else float(self.flops_per_step) * self.steps

    @property
    def flops_per_unit(self) -> int:
        return self.flops_per_step // (self.batches.batch * self.facts.units_per_example)

    def to_dict(self) -> dict[str, Any]:
        facts, heads = self.facts, self.heads
        fields = {key: value for key, value in vars(self).items() if key not in ("facts", "heads", "batches")}
        plan = {} if heads is None else {"laplacian_heads": list(heads.per_layer), "heads": heads.heads}
        if heads is not None and not heads.is_laplacian:
            plan["operators"] = [heads.operator_names(layer) for layer in range(len(heads.per_layer))]
        return {
            **fields,
            **plan,
            **asdict(self.batches),
            "head_grid": None if heads is None else heads.grid(),
            "steps": self.steps,
            "epochs": facts.epochs,
            "flops": self.flops,
            f"flops_per_{facts.unit}": self.flops_per_unit,
            "fits": self.fits,
            "memory_total": self.memory_total,
            "download": facts.download,
            "download_bytes": facts.download_bytes,
            "data": facts.data,
            "notes": dict(facts.lines),
            **facts.values,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self) -> str:
        flops = f"{self.flops_per_unit:,} for each {self.facts.unit}"
        lines = [
            ("parameters", f"{self.parameters:,}"),
            *self._heads(),
            ("steps", self._steps()),
            ("batch", self._batch()),
            *self.facts.lines.items(),
            ("learning rate", _rates(self.learning_rates)),
            ("FLOPs", flops + ("" if self.flops is None else f", {self.flops:.3e} in all")),
            ("memory", self._memory()),
            ("disk", f"{gigabytes(self.disk_bytes)} for checkpoints of {gigabytes(self.checkpoint_bytes)}"),
            ("download", self.facts.download),
            *self._reading(),
            ("time", self._time()),
            ("data", self.facts.data),
        ]
        return "\n".join(
            part
            for name, text in lines
            for number, line in enumerate(text.splitlines())
            for part in wrapped(line, f"{name if number == 0 else '':<15}")
        )

    def _heads(self) -> list[tuple[str, str]]:
        if self.heads is None:
            return []
        laplacian, heads = sum(self.heads.per_layer), self.heads.heads * len(self.heads.per_layer)
        if self.heads.is_laplacian:
            return [("heads", f"{laplacian} of {heads} Laplacian (L)\n{self.heads.grid()}")]
        letters = {c.operator.name: c.operator.letter for layer in self.heads.layers for c in layer}
        words = ", ".join(f"{count} {name} ({letters[name]})" for name, count in self.heads.counts().items())
        added = f"operators add {self.operator_flops:,} FLOPs for each token"
        return [("heads", f"of {heads}: {words}, the rest attention (A)\n{self.heads.grid()}\n{added}")]

    def _steps(self) -> str:
        steps = "by epochs, known once the data is there" if self.steps is None else f"{self.steps:,}"
        return steps + (f", {self.facts.epochs:g} epochs" if self.facts.epochs else "")

    def _batch(self) -> str:
        batches, facts = self.batches, self.facts
        units = batches.batch * facts.units_per_example
        whole = f"{batches.batch:,} {facts.example}"
        whole += f", {units:,} {facts.unit}s a step" if facts.units_per_example > 1 else ""
        processes = f"{batches.processes} process{'es' if batches.processes > 1 else ''}"
        return f"{whole}\n{processes} x {batches.micro_batch} {facts.example} x {batches.accumulation} accumulated"

    def _memory(self) -> str:
        total = f"{gigabytes(self.memory_total)} a process, estimated, in {self.precision}"
        lines = [
            f"{total}; peak in the {self.memory_peak_in}",
            ", ".join(f"{part} {gigabytes(size)}" for part, size in self.memory.items()),
            self._fit(),
        ]
        return "\n".join([*lines, COMPILED_NOTE] if self.compiles else lines)

    def _fit(self) -> str:
        if self.memory_limit is None:
            return f"how much memory {self.device} has is not known here"
        limit = f"the {gigabytes(self.memory_limit)} that a process has on {self.device}"
        if self.fits:
            return f"fits into {limit}"
        if not self.largest_micro_batch:
            return f"does not fit into {limit}, nor does any smaller micro_batch; {_SMALLER}"
        return f"does not fit into {limit}; --set train.micro_batch={self.largest_micro_batch} does, or {_SMALLER}"

    def _reading(self) -> list[tuple[str, str]]:
        if self.reading_cores is None:
            return []
        each = f"{1 / self.facts.read_seconds:,.0f} {self.facts.example} a second and core"
        text = f"{self.reading_cores:,} cores keep up with the devices, at {each}; with fewer the loader is the limit"
        return [("reading", text)]

    def _time(self) -> str:
        if self.probe is not None:
            measured = f"{self.probe['seconds_per_step']:.3g} s a step, measured here without reading data"
            held = f", {gigabytes(int(self.probe['memory']))} of memory"
            return measured + held + ("" if self.hours is None else f": {duration(self.hours)} in all")
        if self.hours is None:
            return (
                "known once --probe has measured a step" if self.steps is not None else "known once the data is there"
            )
        cost = "" if self.cost is None else f", {self.cost:,.2f} at the given price"
        return f"{duration(self.hours)}{cost}, if the FLOPs reach {self.mfu:.0%} of the peak of {self.device} (--mfu)"


def _rates(rates: dict[str, float]) -> str:
    """Format a line for each rate; groups that differ only in their weight decay are named once."""
    names: dict[float, list[str]] = {}
    for group, rate in rates.items():
        name = group.removesuffix(", no decay")
        if name not in names.setdefault(rate, []):
            names[rate].append(name)
    return "\n".join(f"{rate:.6g} {', '.join(groups)}" for rate, groups in names.items())


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 5e6 else f"{count / 1e6:.2f} MB"


def duration(hours: float) -> str:
    if hours >= 48:
        return f"{hours:,.0f} hours ({hours / 24:.1f} days)"
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"
