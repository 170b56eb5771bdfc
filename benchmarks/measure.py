"""How the benchmarks measure: alternating runs for times, the allocator's own events for memory.

This machine and yours are shared and noisy, so a time is only ever compared with another of the same process: the
candidates take turns, and what is compared is the fastest turn of each: what others do to the machine only ever adds.
"""

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch


def alternate(candidates: dict[str, Callable[[], object]], rounds: int = 9, warmup: int = 1) -> dict[str, float]:
    """Seconds of the fastest of `rounds` turns of each candidate."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in seconds.items()}


def compare(
    builders: dict[str, Callable[[], Callable[[], object]]],
    builds: int = 6,
    rounds: int = 12,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of each candidate relative to the first: the median over rounds of what neighbours in time took.

    For differences of a percent. The machine's speed drifts over seconds, so only turns of one round are compared;
    where a candidate's memory happens to lie counts too, so each is built several times, in changing order. What runs
    in one thread may be timed by `time.process_time`, to which other processes add next to nothing.
    """
    names = list(builders)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for build in range(builds):
        order = [names[(build + place) % len(names)] for place in range(len(names))]
        runs = {name: builders[name]() for name in order}
        for turn in range(rounds + 1):
            seconds = {}
            for name, run in runs.items():
                start = clock()
                run()
                seconds[name] = clock() - start
            if turn:
                for name in names:
                    ratios[name].append(seconds[name] / seconds[names[0]])
    return {name: statistics.median(values) for name, values in ratios.items()}


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch's CPU allocator held during `run`, above what it held before."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peak_rss() -> int:
    """The most memory this process ever had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"
