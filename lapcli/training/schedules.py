"""What changes with the step: learning-rate multiplier and Muon's momentum. Steps count from 0, before the update."""

from lapcli.recipe.schema import MuonSection, PlateauSchedule


def learning_rate_multiplier(schedule: PlateauSchedule, step: int, steps: int) -> float:
    """Linear warm-up, a plateau of 1, then linearly down to `final` at the end of the run."""
    warmup, warmdown = round(schedule.warmup * steps), round(schedule.warmdown * steps)
    if step < warmup:
        return (step + 1) / warmup
    if step <= steps - warmdown:
        return 1.0
    left = (steps - step) / warmdown
    return left + (1 - left) * schedule.final


def muon_momentum(optimizer: MuonSection, step: int) -> float:
    if step >= optimizer.momentum_warmup:
        return optimizer.momentum
    share = step / optimizer.momentum_warmup
    return (1 - share) * optimizer.momentum_start + share * optimizer.momentum
