"""From the global batch of a recipe to what one process takes at once."""

from lapcli.errors import UsageError
from lapcli.objectives.objective import BatchPlan


def plan_batches(batch: int, micro_batch: int, processes: int) -> BatchPlan:
    """The largest micro-batch within the recipe's that divides a process's share; the rest is accumulation."""
    if batch % processes:
        nearest = max(processes, round(batch / processes) * processes)
        raise UsageError(
            f"a global batch of {batch} cannot be shared evenly by {processes} processes; "
            f"use --set train.batch={nearest} or another --nproc"
        )
    share = batch // processes
    micro = next(size for size in range(min(micro_batch, share), 0, -1) if share % size == 0)
    return BatchPlan(batch, micro, share // micro, processes)
