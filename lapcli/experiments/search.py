"""Search over head plans and other recipe keys: Optuna proposes trials of two arms, and each trial is an ordinary run.

    runs/NAME.search/journal.log   Optuna's journal: what was proposed and finished
    runs/NAME-t004/                trial 4 of the search
    runs/NAME-c004/                trial 4 of the control
    runs/NAME-winner004-seed1/     confirms trial 4 of the search on seed 1; NAME-control002-seed1 is its control

A space is given as `--over KEY=DOMAIN`:

    train.batch: 32,64                                   choices, any values that the recipe accepts
    optimizer.lr: {from: 1e-3, to: 1e-1, log: true}      a range; integers if both ends are integers
    model.laplacian_heads: {per_layer: [0, 4]}           a number for each layer
    model.laplacian_heads: {linear: [0, 4]}              linear(a, b), with a and b in this range

A trial with the status running is resumed by the next start, or by another process that shares the search. The
best of many trials at one seed is partly luck. Therefore the control has the same number of Laplacian heads in every
layer, or none, and the same budget; the best of each arm is retrained with unused seeds, and
the winner counts as better only if the interval of the paired difference excludes zero.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lapcli.experiments.cells import (
    LAPLACIAN_HEADS,
    OPERATORS,
    Cell,
    Over,
    last_scores,
    lock_cell,
    overrides_of,
    progress,
    value_at,
)
from lapcli.experiments.runner import Chooser
from lapcli.recipe import (
    BaseRecipe,
    RecipeError,
    canonical_json,
    recipe_hash,
    recipe_loader,
    recipe_to_dict,
    recipe_to_yaml,
)
from lapcli.recipe.reading import quoted
from lapcli.recipe.schema import TransformerModel
from lapcli.runtime.errors import LapError, UsageError, known_names
from lapcli.runtime.files import write_text

ARMS = {"search": "t", "control": "c"}
CONFIRMED = {"search": "winner", "control": "control"}
PLANS = ("per_layer", "linear")
Params = Mapping[str, Any]  # Optuna's parameter name to value, for one trial
_STARTUP = 5  # random proposals before TPE fits its model
_TRIES = 50  # duplicate or invalid proposals in a row, after which the space counts as exhausted


@dataclass(frozen=True)
class Domain:
    """The values that one key of the recipe may take."""

    key: str
    parameters: dict[str, Any]  # Optuna's distribution of each; choices are JSON texts, since it takes no lists
    plan: str | None = None  # one of PLANS

    def value(self, params: Params) -> Any:
        """Return the recipe value for these parameters."""
        own = [params[name] for name in self.parameters]
        if self.plan is None:
            return json.loads(own[0]) if isinstance(own[0], str) else own[0]
        return own if self.plan == "per_layer" else f"linear({own[0]}, {own[1]})"


@dataclass(frozen=True)
class Space:
    """The domains of a search and the recipe to which they apply."""

    recipe: Path
    base: BaseRecipe
    domains: tuple[Domain, ...]
    options: tuple[str, ...]  # the command's `--set` options, applied to every trial
    loader: Any = field(repr=False)

    @property
    def distributions(self) -> dict[str, Any]:
        return {name: each for domain in self.domains for name, each in domain.parameters.items()}

    def overrides(self, params: Params) -> tuple[str, ...]:
        """Return the trial's changes to the recipe in the notation of `--set`; the later value of a key wins."""
        return (*self.options, *overrides_of({domain.key: domain.value(params) for domain in self.domains}))

    def load(self, params: Params, seed: int | None = None) -> BaseRecipe:
        """Load the recipe with these values; a given seed replaces the recipe's."""
        recipe = self.loader(self.overrides(params), seed)
        assert isinstance(recipe, BaseRecipe)
        return recipe

    def control(self) -> "Space":
        """Return the control arm's space: as many heads in every layer; without a head plan, the recipe itself."""
        from optuna.distributions import IntDistribution

        others = tuple(domain for domain in self.domains if domain.key not in (LAPLACIAN_HEADS, OPERATORS))
        if len(others) == len(self.domains):
            return replace(self, domains=())
        model: Any = getattr(self.base, "model")  # noqa: B009
        heads = Domain(LAPLACIAN_HEADS, {LAPLACIAN_HEADS: IntDistribution(0, model.heads)})
        return replace(self, domains=(heads, *others))

    def plain(self) -> dict[str, Any]:
        """Return the control's starting point: plain attention, and the recipe's values within the space."""
        values, params = recipe_to_dict(self.base), {}
        for domain in self.domains:
            ((name, each),) = domain.parameters.items()
            own = 0 if domain.key == LAPLACIAN_HEADS else value_at(values, domain.key)
            if hasattr(each, "choices"):
                own = canonical_json(domain.key, own)
                is_known = own in each.choices
            else:
                is_known = own is not None and each.low <= own <= each.high
            if is_known:
                params[name] = own
        return params


def read_space(recipe: Path, over: Over, options: Sequence[str]) -> Space:
    """Return the space of `--over`, where a single mapping is a domain and several values are choices."""
    loader = recipe_loader(recipe)
    base = loader(options, None)
    if not isinstance(base, BaseRecipe):
        raise UsageError(f"{recipe} has stages, which start from a run; search over a recipe of a single run")
    if {LAPLACIAN_HEADS, OPERATORS} <= set(over):
        raise UsageError(f"{LAPLACIAN_HEADS} is short for the laplacian of {OPERATORS}; search over one of the two")
    space = Space(recipe, base, (), tuple(options), loader)
    for key, values in over.items():
        domain = _domain(key, values, base)
        # Each domain separately, at its ends: invalid combinations are failed trials.
        ends = [getattr(each, "choices", None) or (each.low, each.high) for each in domain.parameters.values()]
        for number in range(max(map(len, ends))):
            params = {name: end[min(number, len(end) - 1)] for name, end in zip(domain.parameters, ends, strict=True)}
            try:
                replace(space, domains=(domain,)).load(params)
            except RecipeError as error:
                raise UsageError(f"--over {key}: {error.problems[0].message}") from None
        space = replace(space, domains=(*space.domains, domain))
    return space


def _domain(key: str, values: Sequence[Any], base: BaseRecipe) -> Domain:
    """Return the domain of a key; UsageError with the expected form."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if key == "seed":
        raise UsageError("--over seed: the seed cannot be searched, since the winner is confirmed on other seeds")
    value = values[0]
    is_mapping = len(values) == 1 and isinstance(value, Mapping)
    if is_mapping and (plan := next((name for name in PLANS if name in value), None)):
        model: Any = getattr(base, "model", None)
        ends = value[plan]
        # `type`, because isinstance(True, int) holds.
        is_pair = isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends)
        if key != LAPLACIAN_HEADS or not is_pair or not 0 <= ends[0] < ends[1] <= model.heads or len(value) > 1:
            form = f"{plan}: [A, B] of {LAPLACIAN_HEADS}, with integers A < B from 0 to its heads"
            raise UsageError(f"--over {key}: expected {form}, got {quoted(value)}")
        names = ("first", "last") if plan == "linear" else [f"layer{layer}" for layer in range(model.layers)]
        return Domain(key, {f"{key}.{name}": IntDistribution(*ends) for name in names}, plan)
    if is_mapping and {"from", "to"} <= set(value) <= {"from", "to", "log"}:
        low, high = value["from"], value["to"]
        kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
        try:
            return Domain(key, {key: kind(low, high, log=bool(value.get("log")))})
        except (ValueError, TypeError) as error:
            raise UsageError(f"--over {key}: {error}") from None
    texts = tuple(canonical_json(key, choice) for choice in values)
    if len(set(texts)) < len(texts):
        raise UsageError(f"--over {key}: expected distinct choices, got {quoted(values)}")
    return Domain(key, {key: CategoricalDistribution(texts)})


@dataclass(frozen=True)
class Settings:
    name: str
    space: Space
    metric: str
    trials: int = 20  # of each arm
    confirm: int = 3

    @property
    def direction(self) -> str:
        known = self.space.base.metrics
        if self.metric not in known:
            wrong = f"{self.metric[:60]!r} is not a validation metric of this recipe"
            raise UsageError(f"{wrong}{known_names(self.metric, known)}")
        return known[self.metric][1]


class Search(Chooser):
    """Chooses the trials of a search."""

    def __init__(self, settings: Settings, runs_dir: Path) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        super().__init__([], runs_dir)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.settings, self.states = settings, optuna.trial.TrialState
        self.spaces = {"search": settings.space, "control": settings.space.control()}
        self.folder = self.runs_dir / f"{settings.name}.search"
        self.folder.mkdir(parents=True, exist_ok=True)
        file = str(self.folder / "journal.log")
        self.journal = optuna.storages.JournalStorage(JournalFileBackend(file, JournalFileOpenLock(file)))
        self.studies = {arm: self._study(arm) for arm in ARMS}
        self._trials: dict[str, tuple[str, int]] = {}  # name to arm and number, of trials that were handed out

    def _study(self, arm: str) -> Any:
        """Open the arm's study; UsageError if it belongs to another search."""
        from optuna import create_study
        from optuna.distributions import distribution_to_json

        settings, space = self.settings, self.spaces[arm]
        study = create_study(
            study_name=arm,
            storage=self.journal,
            direction="maximize" if settings.direction == "higher" else "minimize",
            load_if_exists=True,
        )
        # `--trials` and `--confirm` are not part of it: a search may be resumed with more of them.
        identity = {
            "recipe": recipe_hash(space.base),
            "space": {name: distribution_to_json(each) for name, each in space.distributions.items()},
            "metric": settings.metric,
        }
        for key, value in identity.items():
            if study.user_attrs.get(key, value) != value:
                raise UsageError(
                    f"{self.folder} is a search with a different {key}; repeat the original options, or choose "
                    "another --name"
                )
        for key in identity.keys() - study.user_attrs.keys():
            study.set_user_attr(key, identity[key])
        if arm == "control" and not study.trials:
            # Independent of the sampler: without plain attention the control could miss the baseline.
            study.enqueue_trial(space.plain())
        return study

    def cell(self, arm: str, number: int, params: Params) -> Cell:
        space, name = self.spaces[arm], f"{self.settings.name}-{ARMS[arm]}{number:03d}"
        return Cell(name, space.recipe, space.overrides(params), params, space.load(params), is_search=True)

    def next(self) -> list[Cell]:
        """Return an unfinished trial, else a new one, for the arm with fewer trials first."""
        while (lock := lock_cell(f"{self.settings.name}.search", self.runs_dir)) is None:  # another one is proposing
            time.sleep(0.05)
        with lock:
            for arm, study in self.studies.items():
                for trial in study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
                    if (arm, trial.number) not in self._trials.values():
                        return [self._handed_out(arm, trial)]
            for arm in sorted(ARMS, key=lambda arm: (len(self.counted(arm)), arm)):
                if len(self.counted(arm)) < self.settings.trials and (trial := self.propose(arm)) is not None:
                    return [self._handed_out(arm, trial)]
        return []

    def _handed_out(self, arm: str, trial: Any) -> Cell:
        cell = self.cell(arm, trial.number, trial.params)
        self._trials[cell.name] = arm, trial.number
        return cell

    def counted(self, arm: str) -> list[Any]:
        """Return the arm's trials, without rejected combinations."""
        states = self.states
        return self.studies[arm].get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED, states.RUNNING))

    def propose(self, arm: str) -> Any:
        """Return a new trial, or None if no new valid combination is found; an invalid one is a failed trial."""
        from optuna.samplers import TPESampler

        study, space = self.studies[arm], self.spaces[arm]
        for _ in range(_TRIES):
            known = [trial for trial in study.trials if trial.state != self.states.WAITING]
            # A new sampler for each proposal: after a kill the old sampler's state would be lost.
            digest = hashlib.sha256(f"{arm}/{len(known)}".encode()).digest()
            seed = int.from_bytes(digest[:4], "big")
            # multivariate: the layers of a plan are sampled jointly. constant_liar: trials that are still running count
            # as bad ones, so that two processes do not propose neighbouring values.
            study.sampler = TPESampler(seed=seed, n_startup_trials=_STARTUP, multivariate=True, constant_liar=True)
            trial = study.ask(space.distributions)
            if trial.params in [each.params for each in known]:
                problem = "tried before"
            else:
                try:
                    space.load(trial.params)
                    return trial
                except RecipeError as error:  # alone each of the values was checked at the start
                    problem = error.problems[0].message
            trial.set_user_attr("refused", problem)
            study.tell(trial, state=self.states.FAIL)
        return None

    def state(self, cell: Cell) -> str | None:
        arm, number = self._trials[cell.name]
        trial = self.studies[arm].trials[number]
        return super().state(cell) if trial.state == self.states.RUNNING else self.word(trial)

    def word(self, trial: Any) -> str:
        states = self.states
        words = {states.COMPLETE: "finished", states.PRUNED: "diverged", states.FAIL: "failed"}
        return words.get(trial.state, "unfinished")

    def settled(self, cell: Cell, state: str) -> str:
        arm, number = self._trials[cell.name]
        study = self.studies[arm]
        if study.trials[number].state != self.states.RUNNING or state not in ("finished", "diverged"):
            return ""  # one that failed or was interrupted stays begun, and the next start resumes it
        value = math.nan if state == "diverged" else self.score(cell)
        if math.isfinite(value):
            study.tell(number, value)
            return f"{self.settings.metric} {value:.4f}"
        study.tell(number, state=self.states.PRUNED)  # TPE ranks it last
        return "the loss is not finite"

    def score(self, cell: Cell) -> float:
        """Return a finished run's final validation metric."""
        numbers = last_scores([cell.name], self.runs_dir)[cell.name]
        if self.settings.metric not in numbers:
            raise LapError(f"the last validation of {cell.name} has no {self.settings.metric}; see validation.every")
        return numbers[self.settings.metric][0]

    def best(self, arm: str) -> Any:
        """Return the best finished trial, the first among equals; LapError if there is none."""
        finished = [trial for trial in self.counted(arm) if trial.state == self.states.COMPLETE]
        if not finished:
            states = ", ".join(f"{trial.number} {self.word(trial)}" for trial in self.counted(arm)[:5])
            raise LapError(
                f"no trial of the {arm} arm has finished ({states or 'none was started'}); narrow the space if they "
                "diverged, else see the logs in .sweeps and run the same command to retry"
            )
        return (max if self.settings.direction == "higher" else min)(finished, key=lambda trial: trial.value)

    def confirmation(self) -> dict[str, list[Cell]]:
        """Return runs of each arm's best trial on fresh seeds; none if both arms found the same model."""
        best = {arm: self.best(arm) for arm in ARMS}
        if _plain_values(self, "search", best) == _plain_values(self, "control", best):
            return {}
        # All trials use the base seed, so these seeds had no influence on the choice.
        seeds = [self.settings.space.base.seed + 1 + number for number in range(self.settings.confirm)]
        return {arm: [self._confirming(arm, best[arm], seed) for seed in seeds] for arm in ARMS}

    def _confirming(self, arm: str, trial: Any, seed: int) -> Cell:
        space, name = self.spaces[arm], f"{self.settings.name}-{CONFIRMED[arm]}{trial.number:03d}-seed{seed}"
        overrides = (*space.overrides(trial.params), *overrides_of({"seed": seed}))
        return Cell(name, space.recipe, overrides, trial.params, space.load(trial.params, seed))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trial, finished ones first, from best to worst."""
        rows = []
        for arm, study in self.studies.items():
            for trial in study.get_trials(deepcopy=False):
                refused = trial.user_attrs.get("refused")
                if trial.state == self.states.WAITING or refused == "tried before":
                    continue
                values = {domain.key: domain.value(trial.params) for domain in self.spaces[arm].domains}
                name = f"{self.settings.name}-{ARMS[arm]}{trial.number:03d}"
                told = {"trial": name, "arm": arm, "state": "invalid" if refused else self.word(trial)}
                rows.append({**told, "values": values, "value": trial.value, "reason": refused})
        sign = -1 if self.settings.direction == "higher" else 1
        return sorted(rows, key=lambda row: (row["state"] != "finished", sign * (row["value"] or 0), row["trial"]))

    def result(self, cells: Mapping[str, Sequence[Cell]]) -> dict[str, Any]:
        """Judge the winner by its confirmation runs, and write all trials and the winner's recipe."""
        settings, rows, winner = self.settings, self.rows(), self.best("search")
        values = {
            arm: {each.loaded.seed: self.score(each) for each in own if progress(each, self.runs_dir).is_trained}
            for arm, own in cells.items()
        }
        judged = verdict(values.get("search", {}), values.get("control", {}), settings.metric, settings.direction)
        if not cells:
            judged["verdict"] = "The winner is the control itself: no other recipe in the search space was better."
        write_text(self.folder / "winner.yaml", recipe_to_yaml(self.spaces["search"].load(winner.params)))
        files = [str(self.folder / "winner.yaml")]
        told = {"search": settings.name, "metric": settings.metric, "trials": rows, "confirmation": values}
        return {**told, **judged, "files": files}


def _plain_values(search: Search, arm: str, best: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with one notation for head plans: `2` and `[2, 2, 2]` are the same."""
    recipe = search.spaces[arm].load(best[arm].params)
    model: Any = getattr(recipe, "model", None)
    plan = {"model": model.head_plan().recipe_keys()} if isinstance(model, TransformerModel) else {}
    values = recipe_to_dict(recipe)
    return {**values, "model": {**values.get("model", {}), **plan.get("model", {})}}


def verdict(winner: Mapping[int, float], control: Mapping[int, float], metric: str, direction: str) -> dict[str, Any]:
    """Compare the two arms over the seeds that both have finished, by the paired t-test."""
    from scipy.stats import ttest_rel

    seeds = sorted(winner.keys() & control.keys())
    if not seeds:
        return {"better": False, "verdict": "Not confirmed: no fresh seed has finished in both arms."}
    a, b = ([values[seed] for seed in seeds] for values in (winner, control))
    difference = math.fsum(x - y for x, y in zip(a, b, strict=True)) / len(seeds)
    text = f"{metric} {difference:+.4f} against the control over {len(seeds)} fresh seeds"
    # Equal differences have no variance to judge by: most likely the seed has no effect.
    if len(seeds) < 2 or len({x - y for x, y in zip(a, b, strict=True)}) < 2:
        text = f"Not confirmed: {text}, too few for an interval; give --confirm 3 or more."
        return {"better": False, "difference": difference, "verdict": text}
    test = ttest_rel(a, b)
    low, high = map(float, test.confidence_interval(0.95))
    text += f", 95% interval [{low:+.4f}, {high:+.4f}]"
    is_better, is_worse = (low > 0, high < 0) if direction == "higher" else (high < 0, low > 0)
    most = f"; no effect beyond ±{max(abs(low), abs(high)):.4f}"
    text = f"Better: {text}." if is_better else f"Worse: {text}." if is_worse else f"Not better: {text}{most}."
    return {
        "better": is_better,
        "difference": difference,
        "interval": [low, high],
        "p": float(test.pvalue),
        "verdict": text,
    }
