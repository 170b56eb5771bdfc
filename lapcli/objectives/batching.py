"""From the global batch of a recipe to what one process takes at once."""

from lapcli.objectives.objective import BatchPlan
from lapcli.runtime.errors import UsageError


def plan_batches(batch: int, micro_batch: int, processes: int, multiple: int = 1) -> BatchPlan:
    """The largest micro-batch within the recipe's that divides a process's share; the rest is accumulation.

    `multiple`: of how many examples a micro-batch consists at least, where they come in pairs.
    """
    if batch % (processes * multiple):
        nearest = max(1, round(batch / (processes * multiple))) * processes * multiple
        whole = f" in groups of {multiple}" if multiple > 1 else ""
        raise UsageError(
            f"a global batch of {batch} cannot be shared evenly by {processes} processes{whole}; "
            f"use --set train.batch={nearest} or another number of processes"
        )
    share = batch // processes
    micro = next(size for size in range(min(micro_batch, share), 0, -1) if share % size == 0 and size % multiple == 0)
    return BatchPlan(batch, micro, share // micro, processes)
