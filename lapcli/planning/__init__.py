"""Plans a recipe before anything starts: sizes, batches, rates, cost, memory, disk, download, time."""

from lapcli.planning.estimate import plan_training
from lapcli.planning.plan import TrainingPlan

__all__ = ["TrainingPlan", "plan_training"]
