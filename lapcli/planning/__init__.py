"""What a recipe would train, before anything starts: sizes, batches, rates, cost, memory, disk, download, time."""

from lapcli.planning.plan import Plan
from lapcli.planning.training import plan_training

__all__ = ["Plan", "plan_training"]
