"""What each of the jobs of a sweep may use: its share of the GPUs, or of the cores."""

import os
from dataclasses import dataclass

from lapcli.runtime.machine import usable_cores


@dataclass(frozen=True)
class Slot:
    """One place in which a cell runs at a time; `environment` is what its processes get on top of ours."""

    environment: dict[str, str]


def share_machine(jobs: int) -> tuple[list[Slot], str]:
    """Slots of equal size, and in words what each has; one job has everything, and needs to be told nothing."""
    if jobs == 1:
        return [Slot({})], "one cell at a time, on all there is"
    share = str(max(1, usable_cores() // jobs))
    threads = {"LAP_CORES": share}  # of all processes of a cell, and of those that read its data
    if "OMP_NUM_THREADS" not in os.environ:
        threads["OMP_NUM_THREADS"] = share
    gpus = visible_gpus()
    if not gpus:
        count = threads.get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS"))
        return [Slot(dict(threads)) for _ in range(jobs)], f"{jobs} cells at a time, {count} CPU threads each"
    each = len(gpus) // jobs
    if each == 0:  # small models: several on a GPU
        parts = [[gpus[number % len(gpus)]] for number in range(jobs)]
        words = f"{jobs} cells at a time, sharing {len(gpus)} GPUs"
    else:  # equal shares: a cell that goes on later finds as many as it had
        parts = [gpus[number * each : (number + 1) * each] for number in range(jobs)]
        idle = len(gpus) - each * jobs
        words = f"{jobs} cells at a time, {each} GPU{'s' if each > 1 else ''} each" + (f", {idle} idle" if idle else "")
    return [Slot({**threads, "CUDA_VISIBLE_DEVICES": ",".join(part)}) for part in parts], words


def visible_gpus() -> list[str]:
    """Numbers or names, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() and name.strip() != "-1"]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
