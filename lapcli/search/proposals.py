"""Propose trials and prune them, with an in-memory Optuna study that is rebuilt from the run directories each time.

The study is told all trials in the order of their numbers: parameters, validations and final state. A sampler seeded by
(search, arm, number) then makes the proposal. A proposal thus depends only on the search's seed and on the trials known
when it was made, which the trial's record lists, and it can be recomputed from the run directories.
"""

import hashlib
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from lapcli.recipe import RecipeError
from lapcli.runtime.errors import UsageError
from lapcli.search.space import Params, Space
from lapcli.search.trials import CONTROL, SearchSpec, Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna import Trial as OptunaTrial

_STARTUP = 5  # random proposals before TPE fits its model
_FACTOR = 3  # successive halving promotes one in three trials of a rung
_TRIES = 20  # duplicate or invalid proposals accepted from the sampler before one is drawn at random
_DRAWS = 1000  # from a space that cannot be listed, until one is valid


def check_installed() -> None:
    """Raise UsageError with the install command if Optuna is missing."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UsageError("a search needs Optuna; install it: pip install 'lapcli[search]'") from None


def propose(spec: SearchSpec, arm: str, trials: Sequence[Trial]) -> Params | None:
    """Return the parameters of the arm's next trial, or None if every valid combination has been tried."""
    space, number = spec.arm(arm), len(trials)
    known = [trial.params for trial in trials]
    every = space.every()
    if every is not None and all(params in known for params in every):
        return None
    study = _study(spec, arm, trials)
    seed = _seed(spec.seed, arm, number)
    # A new sampler for each proposal: the state of a lasting one would depend on when the search was restarted.
    study.sampler = _sampler(spec.sampler, seed)
    # Whatever the sampler would propose: without a trial of plain attention the control could miss the baseline.
    plain = space.plain() if arm == CONTROL and number == 0 else {}
    for _ in range(_TRIES):
        params = {**study.ask(space.distributions()).params, **plain}
        if params not in known and _is_valid(space, params):
            return params
    if every is None:
        study.sampler = _sampler("random", seed)
        drawn = (dict(study.ask(space.distributions()).params) for _ in range(_DRAWS))
        return next((params for params in drawn if _is_valid(space, params)), None)
    left = [params for params in every if params not in known]
    return next((params for params in Random(seed).sample(left, len(left)) if _is_valid(space, params)), None)


def _is_valid(space: Space, params: Params) -> bool:
    """Return whether a recipe may have these values together; alone each of them was checked at the start."""
    try:
        space.load(params)
    except RecipeError:
        return False
    return True


def should_prune(spec: SearchSpec, arm: str, trials: Sequence[Trial], number: int) -> bool:
    """Return whether successive halving stops trial `number` at its latest validation."""
    trial = next(trial for trial in trials if trial.number == number)
    if spec.pruner == "none" or not trial.reports:
        return False
    # The others first: halving compares a value with those that other trials have recorded at the same rung.
    study = _study(spec, arm, [other for other in trials if other.number != number])
    return _tell(study, spec, arm, trial)[1]


def rung(spec: SearchSpec) -> int | None:
    """Return the step of the first rung, the first validation; None if no validation falls before the last step."""
    every, steps = spec.space.base.validation.every, spec.space.base.train.steps
    return None if every is None or (steps is not None and every >= steps) else every


def _study(spec: SearchSpec, arm: str, trials: Sequence[Trial]) -> "Study":
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=rung(spec) or 1, reduction_factor=_FACTOR)
    study = optuna.create_study(
        direction="maximize" if spec.higher_is_better else "minimize",
        sampler=optuna.samplers.RandomSampler(seed=0),  # never samples: the parameters are enqueued
        pruner=optuna.pruners.NopPruner() if spec.pruner == "none" or rung(spec) is None else halving,
    )
    for trial in trials:
        told, _ = _tell(study, spec, arm, trial)
        if trial.state == "finished":
            study.tell(told, trial.value)
        elif trial.state in ("pruned", "diverged"):  # diverged: pruned without a value, which TPE ranks last
            study.tell(told, state=optuna.trial.TrialState.PRUNED)
        elif trial.state == "failed":
            study.tell(told, state=optuna.trial.TrialState.FAIL)
    # Running and interrupted trials are told no end: they stay RUNNING in the study, which `constant_liar` counts.
    return study


def _tell(study: "Study", spec: SearchSpec, arm: str, trial: Trial) -> "tuple[OptunaTrial, bool]":
    """Add the trial with its validations to the study; return it and whether its last validation prunes it."""
    study.enqueue_trial(trial.params)
    told = study.ask(spec.arm(arm).distributions())
    stops = False
    if trial.state != "diverged":
        for step, value in trial.reports:
            told.report(value, step)
            # Called for every trial, even if nobody reads the answer: in Optuna this call records the trial's value at
            # a rung, with which later trials are compared.
            stops = told.should_prune()
    return told, stops


def _sampler(name: str, seed: int) -> Any:
    import optuna

    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    # multivariate: the layers of a plan are sampled jointly, not each by itself. constant_liar: trials that are still
    # running count as bad ones, so that two processes do not propose neighbours.
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP, multivariate=True, constant_liar=True)


def _seed(seed: int, arm: str, number: int) -> int:
    # Not `hash`, which differs between processes. Four bytes, because numpy's RandomState takes seeds below 2^32.
    return int.from_bytes(hashlib.sha256(f"{seed}/{arm}/{number}".encode()).digest()[:4], "big")
