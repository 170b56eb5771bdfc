"""The optimizers, one file for each, by the name that a recipe gives in `optimizer.name`."""

from lapcli.training.optimizers.optimizer import OPTIMIZERS, Optimizer, Optimizers

__all__ = ["OPTIMIZERS", "Optimizer", "Optimizers"]
