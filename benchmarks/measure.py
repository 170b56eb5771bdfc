"""Measuring tools of the benchmarks: alternating runs for times, allocator events for memory.

This machine and yours are shared and noisy, so times are only compared within one process: the
candidates take turns, and the fastest turn of each counts, since other load can only add time.
"""

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch


def alternate(candidates: dict[str, Callable[[], object]], rounds: int = 9, warmup: int = 1) -> dict[str, float]:
    """Seconds of each candidate's fastest turn out of `rounds`."""
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
    """Seconds of each candidate relative to the first: the median over rounds of the ratio of adjacent turns.

    For differences of a percent. The machine's speed drifts over seconds, so only turns of one round are compared;
    memory placement matters too, so each candidate is built several times, in changing order. Single-threaded
    code may be timed by `time.process_time`, which other processes hardly affect.
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
    """Peak of torch's CPU allocator during `run`, above its level before."""
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
    """Peak memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"
