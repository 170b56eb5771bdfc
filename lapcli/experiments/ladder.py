"""Ladders: does a change of the model help, and does it still help at a larger scale?

    base: ../quickstart.yaml            # recipe, beside this file
    set: {tokenizer.vocab: 512}         # in every run
    rungs:                              # from small to large; head counts of arms scale with a rung's heads
      c1: {model.layers: 2, model.width: 64, model.heads: 4}
      c2: {model.layers: 3, model.width: 96, model.heads: 6}
    arms:                               # the first is the baseline
      plain: {}
      laplacian: {model.operators: {laplacian: half}}
    tokens_per_parameter: 20            # of the baseline's matrices, or epochs
    pairs: {c1: 5, c2: 4}
    tune: {over: {optimizer.lr: [0.01, 0.02, 0.04]}, on: [c1, c2]}
    outcome: validation_bits_per_byte
    margin: 0.003

Every cell is an ordinary run, `LADDER-rung-arm-values-seed`. First each arm is tuned with the same number of runs,
on the lowest rungs; an arm that sets a tuned key itself keeps its value. Then come the pairs of each rung, each arm at
its own optimum and, on the rungs of `controls`, at the baseline's; there the baseline is also compared with itself on
other seeds (A/A). Equal cells are one run. The held-out rung is run last. Only the runs are stored: remaining cells,
optima and verdicts are read from them, so that an interrupted ladder ends like any other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from lapcli.experiments.cells import LAPLACIAN_HEADS, OPERATORS, Cell, cell_name, last_scores, overrides_of, progress
from lapcli.experiments.referee import Rung, Trend, detectable, planned_power
from lapcli.experiments.runner import Chooser
from lapcli.experiments.simulation import DEVIATIONS
from lapcli.models.gpt import GPT
from lapcli.objectives.language_model import gpt_config
from lapcli.planning import TrainingPlan, plan_training
from lapcli.recipe import Problem, RecipeError, recipe_loader
from lapcli.recipe.loading import check_recipe, find_recipe, read_with_parents
from lapcli.recipe.reading import Unreadable, in_reading_order, quoted
from lapcli.recipe.schema import GPTRecipe
from lapcli.recipe.section import Count, Positive, Section, Text, Whole
from lapcli.runs import METRICS
from lapcli.runtime.devices import Device
from lapcli.runtime.errors import LapError, UsageError, known_names
from lapcli.training.metrics import read_metrics

Overrides = dict[str, Any]
#: Added to the recipe's seed: tuned values are not measured on the seed that chose them.
TUNING_SEED, AA_SEED = 1000, 2000
AA, SHARED = "A/A", "shared rate"  # the baseline against itself; an arm at the baseline's rate
_PARTS_OF_AN_OCTAVE = 4  # optima are rounded, so that equal ones are equal
_LONGEST_PROBE = 2e12  # FLOPs of a step that is measured to estimate hours on a CPU


class Tuning(Section):
    """Keys to tune for each arm, one at a time, with the others at the recipe's values."""

    over: Annotated[dict[str, Annotated[list[Positive], Field(min_length=2, max_length=20)]], Field(min_length=1)]
    on: Annotated[list[Text], Field(min_length=1)]  # the lowest rungs


class LadderFile(Section):
    base: Text
    set: Overrides = Field(default_factory=dict)
    rungs: Annotated[dict[str, Overrides], Field(min_length=1)]
    arms: Annotated[dict[str, Overrides], Field(min_length=2)]
    tokens_per_parameter: Positive | None = None
    epochs: Positive | None = None  # without either, the recipe's own length
    pairs: Annotated[dict[str, Count], Field(min_length=1)]  # a rung without pairs can be a target
    tune: Tuning | None = None
    controls: list[Text] | None = None  # null: every rung but the held-out one
    outcome: Text  # a metric of the last validation
    margin: Positive  # a difference below it does not matter
    held_out: Text | None = None
    # The rate on an untuned rung: the rate of the last tuned rung times (width ratio)^power.
    carry: Literal["same"] | dict[Literal["width"], float] = Field("same", description="`same` or {width: POWER}")
    transfer_within: Annotated[float, Field(ge=1, le=100)] = 1.5  # how far optima of tuned rungs may be apart


class Optimum(NamedTuple):
    value: float
    tried: dict[float, float | None]  # outcome; None: the run diverged
    is_bracketed: bool  # else better values may lie beyond those tried


class Planned(NamedTuple):
    phase: str  # tuning, A/A, pairs, shared rate or held out
    rung: str
    arm: str
    cell: Cell
    pair: int = 0


class Ladder:
    """A ladder file with its runs so far; `arms` selects some of the arms, `options` are `--set`."""

    def __init__(self, path: Path, runs_dir: Path, options: Sequence[str] = (), arms: Sequence[str] = ()) -> None:
        self.path, self.runs_dir, self.options, self.name = path, runs_dir, tuple(options), path.stem
        try:
            self._document, problems = read_with_parents(path)
        except Unreadable as error:
            raise RecipeError(str(path), [error.problem]) from None
        file, wrong = check_recipe(LadderFile, self._document)
        if file is not None:
            wrong = list(_unknown_rungs(file, self._document.place))
        if file is None or problems or wrong:
            raise RecipeError(str(path), in_reading_order([*problems, *wrong], str(path)))
        self.file, self.baseline = file, next(iter(file.arms))
        if unknown := [name for name in arms if name not in file.arms]:
            raise UsageError(f"--arms: {path} has no arm {quoted(unknown[0])}; its arms are {', '.join(file.arms)}")
        self.arms = [name for name in file.arms if name in (*arms, self.baseline) or not arms]
        self.rungs = [name for name in file.rungs if name in file.pairs]
        self.pairs = {name: file.pairs[name] for name in self.rungs}
        self._loader = recipe_loader(find_recipe(path.parent / file.base))
        self._recipes: dict[tuple[str, ...], Any] = {}
        self._check()

    @property
    def controls(self) -> list[str]:
        chosen = self.rungs if self.file.controls is None else self.file.controls
        return [name for name in self.rungs if name in chosen and name != self.file.held_out]

    def _check(self) -> None:
        problems: list[Problem] = []
        for rung in self.file.rungs:
            for arm in self.arms:
                try:
                    first = {key: values[0] for key, values in self._tuned(arm).items()}
                    metrics = self.cell(rung, arm, 0, first).loaded.metrics
                except RecipeError as error:
                    placed = [replace(each, where=self._where(each, rung, arm)) for each in error.problems]
                    problems += [problem for problem in placed if problem not in problems]
                    continue
                if self.file.outcome not in metrics:
                    hint = known_names(self.file.outcome, metrics)
                    message = f"{quoted(self.file.outcome)} is not a validation metric{hint}"
                    problems.append(Problem(self._document.place(("outcome",)), "outcome", message))
        if problems:
            raise RecipeError(str(self.path), in_reading_order(list(dict.fromkeys(problems)), str(self.path)))

    def _where(self, problem: Problem, rung: str, arm: str) -> str:
        """Return where the value of a problem was written; the cell itself got it by `--set`."""
        arms, rungs, common = self.file.arms[arm], self.file.rungs[rung], self.file.set
        for path, values in ((("arms", arm), arms), (("rungs", rung), rungs), (("set",), common)):
            for key in values:
                if problem.where == "--set" and f"{problem.key}.".startswith((f"{key}.", f"{key}[")):
                    return self._document.place((*path, key))
        return problem.where

    # --- cells ---

    def cell(
        self, rung: str, arm: str, seed: int, tuned: Mapping[str, float], phase: str = "", *, is_search: bool = False
    ) -> Cell:
        """Build a cell; `phase` is part of the name of a cell whose tuned values are not known yet."""
        own = {key: self._scaled(rung, key, value) for key, value in self.file.arms[arm].items()}
        values = {**tuned, "seed": self._rung_recipe(rung, ()).seed + seed}
        overrides = (*self._of_rung(rung), *overrides_of({**own, **self.length(rung), **values}))
        name = cell_name(f"{self.name}-{rung}-{arm}{phase}", values)
        return Cell(name, self.path.parent / self.file.base, overrides, values, self._load(overrides), (), is_search)

    def _of_rung(self, rung: str) -> tuple[str, ...]:
        return (*overrides_of({**self.file.set, **self.file.rungs[rung]}), *self.options)

    def _rung_recipe(self, rung: str, more: tuple[str, ...]) -> Any:
        return self._load((*self._of_rung(rung), *more))

    def _load(self, overrides: tuple[str, ...]) -> Any:
        if overrides not in self._recipes:
            self._recipes[overrides] = self._loader(overrides, None)
        return self._recipes[overrides]

    def _scaled(self, rung: str, key: str, value: Any) -> Any:
        """Resolve `half`, `all` and fractions of the rung's heads."""
        if key == OPERATORS and isinstance(value, dict):
            return {name: self._scaled(rung, LAPLACIAN_HEADS, each) for name, each in value.items()}
        if key != LAPLACIAN_HEADS:
            return value
        if isinstance(value, dict) and "heads" in value:
            return {**value, "heads": self._scaled(rung, key, value["heads"])}
        share = {"half": 0.5, "all": 1.0}.get(value) if isinstance(value, str) else value
        heads = self._rung_recipe(rung, ()).model.heads
        return math.floor(share * heads + 0.5) if isinstance(share, float) and 0 <= share <= 1 else value

    @cache  # noqa: B019 (a ladder lives as long as its command)
    def length(self, rung: str) -> Overrides:
        """Return the steps of a rung, the same for all arms: tokens for each parameter of the baseline's matrices."""
        if self.file.epochs is not None:
            return {"train.steps": None, "train.epochs": self.file.epochs}
        if self.file.tokens_per_parameter is None:
            return {}
        recipe = self._rung_recipe(rung, overrides_of(self.file.arms[self.baseline]))
        if not isinstance(recipe, GPTRecipe):
            where = self._document.place(("tokens_per_parameter",))
            message = "is for language models; give epochs"
            raise RecipeError(str(self.path), [Problem(where, "tokens_per_parameter", message)])
        with torch.device("meta"):
            parameters = GPT(gpt_config(recipe)).matrix_parameters()
        tokens = self.file.tokens_per_parameter * parameters
        return {"train.steps": max(1, round(tokens / (recipe.train.batch * recipe.model.context)))}

    def _tuned(self, arm: str) -> dict[str, list[float]]:
        tune = self.file.tune
        return {} if tune is None else {k: v for k, v in tune.over.items() if k not in self.file.arms[arm]}

    def tuning(self, rung: str, arm: str) -> dict[str, dict[float, Cell]]:
        """Return the cell of each candidate value, by key."""
        return {
            key: {value: self.cell(rung, arm, TUNING_SEED, {key: value}, is_search=True) for value in values}
            for key, values in self._tuned(arm).items()
            if self.file.tune and rung in self.file.tune.on
        }

    def planned(self, *, with_unknown: bool = False) -> list[Planned]:
        """Return the fully specified cells in the order to run them; `with_unknown`: all others too,
        with the recipe's values in place of optima."""
        planned = [
            Planned("tuning", rung, arm, cell)
            for rung in self.rungs
            for arm in self.arms
            for cells in self.tuning(rung, arm).values()
            for cell in cells.values()
        ]
        is_known = self._all_tried(planned)
        if is_known or with_unknown:
            planned += [each for r in self.rungs if r != self.file.held_out for each in self._pairs(r, is_known)]
            if self.file.held_out in self.rungs and (with_unknown or self._all_tried(planned)):
                planned += self._pairs(self.file.held_out, is_known)
        unique: dict[str, Planned] = {}
        for each in planned:
            unique.setdefault(each.cell.name, each)
        return list(unique.values())

    def _all_tried(self, planned: Sequence[Planned]) -> bool:
        return all(progress(each.cell, self.runs_dir).is_tried for each in planned)

    @property
    def is_finished(self) -> bool:
        return self._all_tried(self.planned(with_unknown=True))

    def _pairs(self, rung: str, is_known: bool = True) -> Iterator[Planned]:
        def cell(arm: str, seed: int) -> Cell:
            return self.tuned_cell(rung, arm, seed) if is_known else self.cell(rung, arm, seed, {})

        phase = "held out" if rung == self.file.held_out else "pairs"
        for seed in range(self.pairs[rung]):
            for arm in self.arms:
                yield Planned(phase, rung, arm, cell(arm, seed), seed)
            if rung not in self.controls:
                continue
            yield Planned(AA, rung, self.baseline, cell(self.baseline, AA_SEED + seed), seed)
            for arm in self.arms[1:] if self.file.tune else ():
                if is_known and self._tuned(arm):
                    yield Planned(SHARED, rung, arm, self.tuned_cell(rung, arm, seed, of=self.baseline), seed)
                elif self._tuned(arm):
                    yield Planned(SHARED, rung, arm, self.cell(rung, arm, seed, {}, "-shared"), seed)

    def tuned_cell(self, rung: str, arm: str, seed: int, of: str | None = None) -> Cell:
        """Return a cell at the arm's own optimum, or at that of another arm."""
        return self.cell(rung, arm, seed, {key: self.carried(of or arm, key, rung) for key in self._tuned(arm)})

    # --- tuning ---

    @cached_property
    def optima(self) -> dict[str, dict[str, dict[str, Optimum]]]:
        """Return the optimum by arm, key and tuned rung; read once, when all runs that tune have been tried."""
        found: dict[str, dict[str, dict[str, Optimum]]] = {}
        for rung in self.rungs:
            for arm in self.arms:
                for key, cells in self.tuning(rung, arm).items():
                    scores = self.outcomes(list(cells.values()))
                    tried = {value: scores.get(cell.name) for value, cell in cells.items()}
                    if not scores:
                        raise LapError(f"{arm} on {rung}: all runs that tune {key} diverged; give lower values")
                    found.setdefault(arm, {}).setdefault(key, {})[rung] = fit_optimum(tried)
        return found

    def carried(self, arm: str, key: str, rung: str) -> float:
        """Return the optimum of a rung, or that of the last tuned one by the rule of `carry`."""
        optima = self.optima[arm][key]
        source = rung if rung in optima else list(optima)[-1]
        return float(f"{optima[source].value * self._carry(source, rung):.3g}")

    def _carry(self, source: str, rung: str) -> float:
        power = 0.0 if self.file.carry == "same" else self.file.carry["width"]
        return float((self._rung_recipe(rung, ()).model.width / self._rung_recipe(source, ()).model.width) ** power)

    def tuned(self) -> Iterator[tuple[str, str, dict[str, Optimum]]]:
        """Yield arm, key, and the optimum by rung."""
        for arm, keys in self.optima.items():
            for key, optima in keys.items():
                yield arm, key, optima

    def moves(self) -> dict[str, float]:
        """Return by arm and key how far a tuned rung's optimum is from the value carried up from the rung below."""
        found = {}
        for arm, key, optima in self.tuned():
            for low, high in zip(optima, list(optima)[1:], strict=False):
                ratio = optima[high].value / (optima[low].value * self._carry(low, high))
                found[f"{arm}, {key}, {low} to {high}"] = max(ratio, 1 / ratio)
        return found

    # --- outcomes ---

    def outcomes(self, cells: Sequence[Cell]) -> dict[str, float]:
        """Return the outcome of each finished cell as a loss: 1 minus a score where higher is better."""
        names = [cell.name for cell in cells if progress(cell, self.runs_dir).is_trained]
        found = {}
        for name, scores in last_scores(names, self.runs_dir).items():
            if self.file.outcome not in scores:
                raise LapError(f"the last validation of {name} has no {self.file.outcome}; see validation.every")
            value, direction = scores[self.file.outcome]
            found[name] = 1 - value if direction == "higher" else value
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def judged_rungs(self) -> tuple[dict[str, list[Rung]], dict[str, list[Rung]]]:
        """Return the pairs of each arm and of A/A; and those at the baseline's rate."""
        scores = self.outcomes([each.cell for each in self.planned()])
        own: dict[str, list[Rung]] = {}
        shared: dict[str, list[Rung]] = {}
        for rung in sorted(self.rungs, key=self.compute):
            entries = [each for each in self._pairs(rung) if each.cell.name in scores]
            base = {each.pair: each.cell for each in entries if each.arm == self.baseline and each.phase != AA}
            for phase, arm in dict.fromkeys((each.phase, each.arm) for each in entries):
                cells = [each for each in entries if (each.phase, each.arm) == (phase, arm) and each.pair in base]
                if not cells or (arm == self.baseline and phase != AA):
                    continue
                sides = [[base[each.pair] for each in cells], [each.cell for each in cells]]
                numbers = [[scores[cell.name] for cell in side] for side in sides]
                times = [[self.seconds(cell) for cell in side] for side in sides]
                rungs = (shared if phase == SHARED else own).setdefault(AA if phase == AA else arm, [])
                rungs.append(Rung(rung, self.compute(rung), *numbers, *times))
        return own, shared

    def seconds(self, cell: Cell) -> float:
        """Return a finished run's training time, without validations, saves and interruptions."""
        lines = [line for line in read_metrics(self.runs_dir / cell.name / METRICS) if "loss" in line]
        return len(lines) * median([line["seconds"] for line in lines if "seconds" in line] or [0.0])

    # --- cost ---

    @cache  # noqa: B019
    def plan(self, rung: str, device: Device | None = None) -> TrainingPlan:
        """Plan a run of the baseline; head operators change the cost only slightly."""
        return plan_training(self.cell(rung, self.baseline, 0, {}).loaded, 1, device)

    @cache  # noqa: B019
    def compute(self, rung: str, device: Device | None = None) -> float:
        """Return the FLOPs of a baseline run."""
        plan = self.plan(rung, device)
        if plan.flops is not None:
            return plan.flops
        cells = [each.cell for each in self.planned(with_unknown=True) if each.rung == rung]
        steps = [steps for cell in cells if (steps := progress(cell, self.runs_dir).steps)]
        if not steps:
            raise UsageError(
                f"the steps of {rung} are unknown until its data is downloaded; give train.steps in its rung"
            )
        return float(plan.flops_per_step) * steps[0]

    def hours(self, rung: str, device: Device | None) -> float | None:
        """Return a run's hours: planned, else extrapolated from a few steps of the lowest rung on this machine."""
        plan = self.plan(rung, device)
        if plan.hours is not None or device is not None or self._seconds_per_flop is None:
            return plan.hours
        return self.compute(rung) * self._seconds_per_flop / 3600

    @cached_property
    def _seconds_per_flop(self) -> float | None:
        plan = self.plan(self.rungs[0])
        if plan.flops_per_step <= _LONGEST_PROBE:
            plan.measure(3)
        return None if plan.seconds_per_step is None else plan.seconds_per_step / plan.flops_per_step

    def keep_within(self, budget: float, device: Device | None = None) -> str:
        """Skip the first rung that exceeds `budget` hours in total and all later ones; return a message."""
        spent, kept = 0.0, []
        for rung in self.cost(device)["rungs"]:
            if rung["hours_left"] is None:
                raise UsageError("--budget: hours are not known on this machine; give --gpu, or see --dry-run")
            spent += rung["hours_left"]
            if spent > budget:
                break
            kept.append(rung["rung"])
        if not [rung for rung in kept if rung != self.file.held_out]:
            raise UsageError(f"--budget: {self.rungs[0]} alone takes more than the {budget:g} hours given")
        fits = f"{', '.join(kept)} fit into {budget:g} hours"
        left_out = self.rungs[len(kept) :]
        self.rungs, self.pairs = kept, {rung: self.pairs[rung] for rung in kept}
        return f"{fits}; {', '.join(left_out)} left out" if left_out else fits

    def cost(self, device: Device | None = None) -> dict[str, Any]:
        """Return runs, hours, disk use and the smallest detectable difference of each rung, before anything runs."""
        planned, rungs = self.planned(with_unknown=True), []
        deviation, source = self.expected_deviation()
        freedom = sum(self.pairs.values()) - len(self.pairs)
        for rung in self.rungs:
            own = [each.cell for each in planned if each.rung == rung]
            left = sum(not progress(cell, self.runs_dir).is_tried for cell in own)
            plan, hours = self.plan(rung, device), self.hours(rung, device) if left else 0.0
            total = None if hours is None else hours * left
            facts = {"rung": rung, "steps": plan.steps, "flops": plan.flops, "runs": len(own), "runs_left": left}
            visible = None if deviation is None else detectable(deviation, 1 / self.pairs[rung], freedom)
            costs = {"hours_left": total, "disk": plan.disk_bytes * len(own)}
            rungs.append({**facts, **costs, "visible": visible})
        fitted = {name: count for name, count in self.pairs.items() if name != self.file.held_out}
        can_tell = sum(fitted.values()) > len(fitted) and all(rung["flops"] for rung in rungs)
        by_trend = None
        if deviation is not None and can_tell:
            computes = {name: self.compute(name, device) for name in fitted}
            by_trend = planned_power(deviation, fitted, computes, len(self.arms) - 1 + bool(self.controls))
        return {"rungs": rungs, "deviation": deviation, "deviation_from": source, "visible_by_the_trend": by_trend}

    def expected_deviation(self) -> tuple[float | None, str]:
        """Return the standard deviation of a paired difference: from A/A if available, else from earlier runs."""
        if all(progress(each.cell, self.runs_dir).is_tried for each in self.planned() if each.phase == "tuning"):
            own, _ = self.judged_rungs()
            if AA in own and math.isfinite(deviation := Trend(own[AA]).deviation):
                return deviation, "the A/A arm"
        if self.file.outcome == "validation_bits_per_byte":
            return DEVIATIONS["laplacian"], "an earlier study of Laplacian heads"
        return None, "not known before the A/A arm"


class LadderChooser(Chooser):
    """Chooses the cells of a ladder, phase by phase; a cell that diverges is settled."""

    def __init__(self, ladder: Ladder) -> None:
        super().__init__([], ladder.runs_dir)
        self.ladder, self._has_changed = ladder, True
        self._costs: dict[str, float] = {}  # FLOPs by the name of a cell
        self._later: list[float] = []

    def next(self) -> list[Cell]:
        if not self._has_changed:
            return []
        self._has_changed = False
        planned = self.ladder.planned()
        self._costs = {each.cell.name: self.ladder.compute(each.rung) for each in planned}
        unknown = self.ladder.planned(with_unknown=True)[len(planned) :]
        self._later = [self.ladder.compute(each.rung) for each in unknown]
        return [each.cell for each in planned]

    def cost(self, cell: Cell) -> float:
        return self._costs[cell.name]

    def later(self) -> list[float]:
        return self._later

    def settled(self, cell: Cell, state: str) -> str:
        self._has_changed = True
        return ""

    def state(self, cell: Cell) -> str | None:
        return "diverged" if progress(cell, self.runs_dir).diverged else super().state(cell)


def fit_optimum(tried: dict[float, float | None]) -> Optimum:
    """Return the minimum of a parabola in the logarithm of the value through the best value and its neighbours."""
    values = sorted(value for value, outcome in tried.items() if outcome is not None)
    outcomes = [outcome for value in values if (outcome := tried[value]) is not None]
    best = int(np.argmin(outcomes))
    if 0 < best < len(values) - 1:
        # Not least squares over more values: on a curve with two minima that parabola has its minimum at a bad value.
        near = slice(best - 1, best + 2)
        square, linear, _ = np.polyfit(np.log2(values[near]), outcomes[near], 2)
        if square > 0:
            rounded = 2 ** (round(float(-linear / (2 * square)) * _PARTS_OF_AN_OCTAVE) / _PARTS_OF_AN_OCTAVE)
            return Optimum(float(f"{rounded:.3g}"), tried, True)
    # Values that diverged bound the optimum too.
    return Optimum(values[best], tried, min(tried) < values[best] < max(tried))


def _unknown_rungs(file: LadderFile, place: Any) -> Iterator[Problem]:
    """Yield names that are not rungs, and invalid choices of tuned or held-out rungs."""
    named: dict[tuple[Whole | str, ...], str] = {("pairs", name): name for name in file.pairs}
    named |= {("held_out",): file.held_out} if file.held_out else {}
    named |= {("controls", number): name for number, name in enumerate(file.controls or ())}
    named |= {("tune", "on", number): name for number, name in enumerate(file.tune.on if file.tune else ())}
    for path, name in named.items():
        key = ".".join(str(step) for step in path if isinstance(step, str))
        if name not in file.rungs:
            yield Problem(place(path), key, f"{quoted(name)} is not a rung; the rungs are {', '.join(file.rungs)}")
        elif name not in file.pairs:
            yield Problem(place(path), key, f"{name} has no pairs to compare")
        elif path[0] == "tune" and name == file.held_out:
            yield Problem(place(path), key, f"{name} is held out")
    if list(file.pairs) == [file.held_out]:
        yield Problem(place(("held_out",)), "held_out", "is the only rung with pairs; add pairs on a lower one")
