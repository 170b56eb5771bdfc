"""Plans a recipe before anything starts."""

from lapcli.planning.plan import TrainingPlan, plan_training

__all__ = ["TrainingPlan", "plan_training"]
