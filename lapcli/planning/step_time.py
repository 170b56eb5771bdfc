"""Estimates the time of a training step on a GPU, part by part, from counted FLOPs and bytes.

    matrix products    their FLOPs, at a share of the peak
    attention          the part of T x T that its kernels compute, at a smaller share
    elementwise        bytes that everything else reads and writes, at a share of the memory's bandwidth
    optimizer          the update: products of Newton-Schulz, divided among the processes, and its bytes
    communication      summing gradients as far as the backward does not hide it, and gathering Muon's updates
    waiting for images the time by which reading exceeds all of that, if the number of cores is known

It is arithmetic, not a measurement: no such GPU was at hand.
"""

from dataclasses import asdict, dataclass
from typing import Any

from lapcli.planning.step_trace import StepTrace, UpdateTrace
from lapcli.runtime.devices import Device

# The shares of the data sheet that kernels reach, as commonly reported: large bf16 products of cuBLAS 600 to 700 of an
# H100's 989 TFLOP/s, less where a matrix has 1,280 rows; flash attention 300 to 400, its backward the smaller; a fused
# elementwise kernel 80 to 90% of the bandwidth; NCCL's sums 70 to 80% of NVLink or PCIe.
SHARE_OF_PRODUCTS = 0.7
SHARE_OF_ATTENTION = 0.35
SHARE_OF_BANDWIDTH = 0.8
SHARE_OF_LINK = 0.7
# Bytes of compiled code by those of the same code uncompiled, forward and backward in bf16, by Inductor's count for a
# CPU: in the blocks, and around them, where the loss is most of it. Norms and activations of ViTs are fused already.
FUSED = {"language_model": (0.34, 0.04), "chat": (0.34, 0.04), "self_supervised": (0.67, 0.25)}
FUSED_OTHERS = (0.8, 0.8)
#: The backward's share of a forward and backward, during which gradients become ready to be summed.
BACKWARD = 2 / 3


@dataclass(frozen=True)
class Reading:
    """The cost of reading examples, in time of the processor's cores."""

    seconds: float  # of one core, for an example
    cores: int | None  # None: the plan is for another machine

    def wanted(self, examples: int, seconds: float) -> int:
        """Return the number of cores that read that many examples in that many seconds."""
        return max(1, -int(-self.seconds * examples // seconds))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, and the share of the peak that the model's FLOPs reach."""

    parts: dict[str, float]
    share_of_peak: float
    examples_per_second: float
    reading_cores: int | None = None  # that the loader needs; None: nothing is decoded
    has_cores: bool | None = None  # whether the machine has them; None: not known

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


@dataclass(frozen=True)
class Counted:
    """Counts of what one process computes and sends in a step."""

    micro: StepTrace
    update: UpdateTrace
    accumulation: int
    processes: int
    prepared: float  # bytes that making a micro-batch moves on the device
    gradients: int  # bytes
    orthogonalised: int  # bytes that Muon gathers, 0 without it
    objective: str
    compiles: bool
    bf16: bool


def estimate_time(counted: Counted, device: Device, examples: int, reading: Reading | None) -> StepTime | None:
    """Estimate a step of `examples` over all processes; None if the device's peak or bandwidth is not known."""
    peak, bandwidths = device.peak(counted.bf16), device.bandwidths
    if peak is None or bandwidths is None:
        return None
    micro, turns, processes = counted.micro, counted.accumulation, counted.processes
    bandwidth, link = SHARE_OF_BANDWIDTH * bandwidths[0], SHARE_OF_LINK * bandwidths[1]
    products = (micro.flops - micro.attention.whole) / (SHARE_OF_PRODUCTS * peak)
    attention = micro.attention.computed / (SHARE_OF_ATTENTION * peak)
    elementwise = _bytes(counted) / bandwidth
    newton_schulz = counted.update.flops / processes / (SHARE_OF_PRODUCTS * peak)
    # A ring passes each byte around once to sum it and once to spread the sum; a gather is half of that.
    sent = (processes - 1) / processes / link
    hidden = BACKWARD * (products + attention + elementwise)
    parts = {
        "matrix products": turns * products,
        "attention": turns * attention,
        "elementwise": turns * elementwise,
        "optimizer": newton_schulz + counted.update.traffic / bandwidth,
        "communication": max(0.0, 2 * sent * counted.gradients - hidden) + sent * counted.orthogonalised,
    }
    computing = sum(parts.values())
    wanted = has_cores = None
    if reading is not None:
        wanted = reading.wanted(examples, computing)
        has_cores = None if reading.cores is None else reading.cores >= wanted
        if reading.cores is not None:
            parts["waiting for images"] = max(0.0, reading.seconds * examples / reading.cores - computing)
    seconds = sum(parts.values())
    return StepTime(parts, turns * micro.flops / (seconds * peak), examples / seconds, wanted, has_cores)


def _bytes(counted: Counted) -> float:
    micro = counted.micro
    if not counted.compiles:
        return micro.traffic + counted.prepared
    blocks, around = FUSED.get(counted.objective, FUSED_OTHERS)
    outside = micro.traffic - micro.traffic_of_layers
    return blocks * micro.traffic_of_layers + around * outside + counted.prepared
