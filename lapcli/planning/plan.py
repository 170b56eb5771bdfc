"""A plan: what a recipe would train and what that takes. One text for `lap plan` and for `lap train --dry-run`."""

import json
from dataclasses import asdict, dataclass
from typing import Any

GPU_NOTE = "estimated, not measured on such a GPU"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all kinds of training have; the kinds add their own counts."""

    objective: str
    # model
    parameters: int
    laplacian_heads: list[int]
    heads: int
    head_grid: str
    # batches
    steps: int | None  # none: so many epochs of data that was not looked at
    batch: int
    micro_batch: int
    accumulation: int
    processes: int
    # rates
    learning_rates: dict[str, float]
    # cost
    flops_per_step: int
    flops: float | None
    # memory, bytes of each process
    device: str
    precision: str
    memory: dict[str, int]  # by part, at the fullest moment of a step
    memory_peak_in: str  # forward, backward or update
    memory_limit: int | None
    fits: bool | None  # none: nobody knows how much memory there is
    largest_micro_batch: int | None  # that fits, where this one does not; 0: none does
    # disk
    checkpoint_bytes: int
    disk_bytes: int  # of all checkpoints that are there at once
    # download
    download_bytes: int | None  # none: not known without asking the hub
    download: str
    # time
    hours: float | None
    share_of_peak: float | None  # at which the hours are reckoned
    probe: dict[str, float] | None = None  # what was measured instead
    data: str = ""

    #: Of what a micro-batch consists.
    example = "examples"

    @property
    def memory_total(self) -> int:
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "memory_total": self.memory_total}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self) -> str:
        lines = [
            ("parameters", f"{self.parameters:,}"),
            ("heads", f"{sum(self.laplacian_heads)} of {self.heads * len(self.laplacian_heads)} Laplacian (L)"),
            ("", self.head_grid),
            ("steps", self._steps()),
            ("batch", self._batch()),
            ("", self._split()),
            *self._own_lines(),
            ("learning rate", _rates(self.learning_rates)),
            ("FLOPs", self._flops()),
            ("memory", self._memory()),
            ("", ", ".join(f"{part} {gigabytes(size)}" for part, size in self.memory.items())),
            ("", self._fit()),
            ("disk", f"{gigabytes(self.disk_bytes)} for checkpoints of {gigabytes(self.checkpoint_bytes)}"),
            ("download", self.download),
            ("time", self._time()),
            ("data", self.data),
        ]
        return "\n".join(
            f"{name if i == 0 else '':<15}{line}" for name, text in lines for i, line in enumerate(text.splitlines())
        )

    def _steps(self) -> str:
        return "by epochs, known once the data is there" if self.steps is None else f"{self.steps:,}"

    def _batch(self) -> str:
        return f"{self.batch:,} {self.example}"

    def _split(self) -> str:
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"{processes} x {self.micro_batch} {self.example} x {self.accumulation} accumulated"

    def _own_lines(self) -> list[tuple[str, str]]:
        return []

    def _per_unit(self) -> str:
        return f"{self.flops_per_step:,} a step"

    def _flops(self) -> str:
        return self._per_unit() + ("" if self.flops is None else f", {self.flops:.3e} in all")

    def _memory(self) -> str:
        fullest = f"fullest in the {self.memory_peak_in}"
        return f"{gigabytes(self.memory_total)} a process, estimated, in {self.precision}; {fullest}"

    def _fit(self) -> str:
        if self.memory_limit is None or self.fits is None:
            return f"how much {self.device} has is not known here"
        limit = f"the {gigabytes(self.memory_limit)} that a process has on {self.device}"
        if self.fits:
            return f"fits into {limit}"
        if not self.largest_micro_batch:
            return f"does not fit into {limit}, nor does any smaller micro_batch"
        return f"does not fit into {limit}; --set train.micro_batch={self.largest_micro_batch} does"

    def _time(self) -> str:
        if self.probe is not None:
            measured = f"{self.probe['seconds_per_step']:.3g} s a step, measured here without reading data"
            held = f", {gigabytes(int(self.probe['memory']))} of memory"
            return measured + held + ("" if self.hours is None else f": {duration(self.hours)} in all")
        if self.hours is None:
            return "not known before --probe" if self.steps is not None else "known once the data is there"
        return f"{duration(self.hours)} at {self.share_of_peak:.0%} of the peak of {self.device}, {GPU_NOTE}"


@dataclass(frozen=True, kw_only=True)
class LanguagePlan(Plan):
    tokens_per_step: int
    tokens: int | None
    flops_per_token: int

    example = "sequences"

    def _batch(self) -> str:
        return f"{self.batch:,} sequences, {self.tokens_per_step:,} tokens a step"

    def _own_lines(self) -> list[tuple[str, str]]:
        return [("tokens", "-" if self.tokens is None else f"{self.tokens:,}")]

    def _per_unit(self) -> str:
        return f"{self.flops_per_token:,} a token"


@dataclass(frozen=True, kw_only=True)
class ImagePlan(Plan):
    epochs: float | None
    images: int | None  # seen in all
    tokens_per_image: int
    flops_per_image: int  # forward and backward
    notes: dict[str, str]

    example = "images"

    def _steps(self) -> str:
        return super()._steps() + (f", {self.epochs:g} epochs" if self.epochs else "")

    def _own_lines(self) -> list[tuple[str, str]]:
        seen = "" if self.images is None else f", {self.images:,} images in all"
        return [("tokens", f"{self.tokens_per_image} an image{seen}"), *self.notes.items()]

    def _per_unit(self) -> str:
        return f"{self.flops_per_image:,} an image"


def _rates(rates: dict[str, float]) -> str:
    """A line for each rate; groups that differ in their decay alone stand together."""
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
