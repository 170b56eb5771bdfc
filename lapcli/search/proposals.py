"""What is tried next and what is stopped early: an Optuna study that is made anew, in memory, from the trials.

The study is told every trial in the order of the numbers: its parameters, its validations one by one, and how it ended.
Then a sampler with a seed of (search, arm, number) proposes. So a proposal is a function of the search's seed and of
what the trial's record says was known, and can be computed again from the run directories.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from lapcli.runtime.errors import UsageError
from lapcli.search.space import Params
from lapcli.search.trials import CONTROL, SearchSpec, Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna import Trial as OptunaTrial

_STARTUP = 5  # random proposals before the sampler models anything
_FACTOR = 3  # of the trials at a rung one in so many is trained on
_TRIES = 20  # proposals of what is known already, before another one is drawn


def check_installed() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UsageError("a search needs Optuna; install it: pip install 'lapcli[search]'") from None


def propose(spec: SearchSpec, arm: str, trials: Sequence[Trial]) -> Params | None:
    """The parameters of the arm's next trial; none if every combination has been tried."""
    space, number = spec.arm(arm), len(trials)
    known = [trial.params for trial in trials]
    every = space.every()
    if every is not None and all(params in known for params in every):
        return None
    study = _study(spec, arm, trials)
    seed = _seed(spec.seed, arm, number)
    study.sampler = _sampler(spec.sampler, seed)
    if arm == CONTROL and number == 0:
        return {**study.ask(space.distributions()).params, **space.plain()}
    for _ in range(_TRIES):
        params = dict(study.ask(space.distributions()).params)
        if params not in known:
            return params
    draw = Random(seed)
    if every is not None:
        return draw.choice([params for params in every if params not in known])
    return params  # a space without end: the same again, to the last digit, is next to impossible


def proposed_again(spec: SearchSpec, arm: str, trials: Sequence[Trial], number: int) -> Params | None:
    """What trial `number` was proposed, from the record of what was known then: equal to its own parameters."""
    by_number = {trial.number: trial for trial in trials}
    then = []
    for other, state, reports in by_number[number].told:
        trial = by_number[other]
        then.append(replace(trial, state=state, reports=trial.reports[:reports]))
    return propose(spec, arm, then)


def should_prune(spec: SearchSpec, arm: str, trials: Sequence[Trial], number: int) -> bool:
    """Whether successive halving stops that trial at its newest validation."""
    trial = next(trial for trial in trials if trial.number == number)
    if spec.pruner == "none" or not trial.reports:
        return False
    study = _study(spec, arm, [other for other in trials if other.number != number])
    return _tell(study, spec, arm, trial)[1]


def rung(spec: SearchSpec) -> int | None:
    """The steps of the first rung, a validation; none if a trial has no validation between its ends."""
    every, steps = spec.space.base.validation.every, spec.space.base.train.steps
    return None if every is None or (steps is not None and every >= steps) else every


def _study(spec: SearchSpec, arm: str, trials: Sequence[Trial]) -> "Study":
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=rung(spec) or 1, reduction_factor=_FACTOR)
    study = optuna.create_study(
        direction="maximize" if spec.higher_is_better else "minimize",
        sampler=optuna.samplers.RandomSampler(seed=0),  # asked for nothing: parameters are given
        pruner=optuna.pruners.NopPruner() if spec.pruner == "none" or rung(spec) is None else halving,
    )
    for trial in trials:
        told, _ = _tell(study, spec, arm, trial)
        if trial.state == "finished":
            study.tell(told, trial.value)
        elif trial.state in ("pruned", "diverged"):  # diverged: stopped without a value, the worst there is
            study.tell(told, state=optuna.trial.TrialState.PRUNED)
        elif trial.state == "failed":
            study.tell(told, state=optuna.trial.TrialState.FAIL)
    return study


def _tell(study: "Study", spec: SearchSpec, arm: str, trial: Trial) -> "tuple[OptunaTrial, bool]":
    """The trial in the study with its parameters and validations, and whether the last of these stops it."""
    study.enqueue_trial(trial.params)
    told = study.ask(spec.arm(arm).distributions())
    stops = False
    if trial.state != "diverged":
        for step, value in trial.reports:
            told.report(value, step)
            stops = told.should_prune()
    return told, stops


def _sampler(name: str, seed: int) -> Any:
    import optuna

    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP, multivariate=True, constant_liar=True)


def _seed(seed: int, arm: str, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{arm}/{number}".encode()).digest()[:4], "big")
