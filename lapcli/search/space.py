"""The search space: recipe keys with their domains, and the mapping from Optuna's parameters to recipe values.

A space is a YAML file of dotted keys, or `--over KEY=DOMAIN` in the same notation:

    optimizer.lr: {from: 1e-3, to: 1e-1, log: true}      a range; integers if both ends are integers
    train.batch: [32, 64]                                choices, any values that the recipe accepts
    model.laplacian_heads: {per_layer: [0, 4]}           a number for each layer
    model.laplacian_heads: {total: [0, 16]}              a total, placed in the first layers, in the last, or spread
    model.laplacian_heads: {linear: [0, 4]}              linear(a, b), with a and b in this range
    model.laplacian_heads: {constant: [0, 4]}            the same number in every layer
    model.operators: {per_layer: [0, 4], operator: [laplacian, exclusive]}

Optuna proposes values of parameters; a key may have several (`model.laplacian_heads.layer0`). The control of a head
plan is the same number of Laplacian heads in every layer, zero included.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapcli.heads.operators import OPERATORS
from lapcli.heads.plan import HeadPlan
from lapcli.recipe import BaseRecipe, RecipeError, canonical_json, recipe_loader, recipe_to_dict
from lapcli.recipe.reading import Document, Problem, Unreadable, in_reading_order, quoted, read_file
from lapcli.recipe.schema import TransformerModel
from lapcli.runtime.errors import UsageError
from lapcli.sweep.grid import LAPLACIAN_HEADS, Over, override
from lapcli.sweep.grid import OPERATORS as OPERATORS_KEY

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

PLANS = ("per_layer", "total", "linear", "constant")
PLACES = ("first", "last", "spread")
Params = dict[str, Any]  # parameter name to value, for one trial
_FORMS = (
    "expected a list of choices, {from:, to:, log:}, or for head plans "
    "{per_layer: [0, 4]}, {total: [0, 16]}, {linear: [0, 4]} or {constant: [0, 4]}"
)
_MOST_LISTED = 10_000  # a larger space is not enumerated


@dataclass(frozen=True)
class Parameter:
    """A parameter that Optuna proposes: one of several JSON texts, or a number in a range."""

    name: str
    # As JSON: Optuna's categories should not be lists or mappings, and it cannot tell 1, 1.0 and true apart.
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    whole: bool = True

    def distribution(self) -> "BaseDistribution":
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def values(self) -> list[Any] | None:
        """Return all values, or None for a range of real numbers."""
        if self.choices:
            return list(self.choices)
        return list(range(int(self.low), int(self.high) + 1)) if self.whole else None

    def ends(self) -> list[Any]:
        """Return the values with which the domain is checked: every choice, or both ends of the range."""
        return list(self.choices) or [int(end) if self.whole else end for end in (self.low, self.high)]


@dataclass(frozen=True)
class Domain:
    """The values that one key of the recipe may take."""

    key: str
    parameters: tuple[Parameter, ...]
    plan: str | None = None  # one of PLANS
    layers: int = 0
    heads: int = 0
    where: str = "--over"

    @property
    def is_plan(self) -> bool:
        """Whether the key sets the head plan, for which there is a control."""
        return self.key in (LAPLACIAN_HEADS, OPERATORS_KEY)

    def value(self, params: Mapping[str, Any]) -> Any:
        """Return the recipe value for these parameters."""
        own = {parameter.name.removeprefix(f"{self.key}."): params[parameter.name] for parameter in self.parameters}
        if self.plan is None:
            (only,) = self.parameters
            return json.loads(params[only.name]) if only.choices else params[only.name]
        counts: Any
        if self.plan == "per_layer":
            counts = [own[f"layer{layer}"] for layer in range(self.layers)]
        elif self.plan == "total":
            counts = placed(own["total"], json.loads(own["place"]), self.layers, self.heads)
        elif self.plan == "linear":
            counts = f"linear({own['first']}, {own['last']})"
        else:
            counts = own["each"]
        if self.key == LAPLACIAN_HEADS:
            return counts
        return {json.loads(own["operator"]): {"heads": counts}}


def placed(total: int, place: str, layers: int, heads: int) -> list[int]:
    """Distribute `total` heads: fill layers from the first or the last on, or spread them as evenly as possible."""
    if place == "spread":
        # Differences of rounded-down cumulative shares: they sum to `total` exactly.
        return [total * (layer + 1) // layers - total * layer // layers for layer in range(layers)]
    filled = [min(heads, max(0, total - heads * layer)) for layer in range(layers)]
    return filled if place == "first" else filled[::-1]


@dataclass
class Space:
    """The domains of a search, and the recipe that they are applied to."""

    recipe: Path
    base: BaseRecipe
    domains: tuple[Domain, ...]
    options: tuple[str, ...] = ()  # the command's `--set` options, applied to every trial
    loader: Any = field(repr=False, default=None)

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for domain in self.domains for parameter in domain.parameters]

    def distributions(self) -> "dict[str, BaseDistribution]":
        return {parameter.name: parameter.distribution() for parameter in self.parameters}

    def size(self) -> int | None:
        """Return the number of combinations, or None if it is infinite."""
        values = [parameter.values() for parameter in self.parameters]
        return None if any(each is None for each in values) else math.prod(len(each) for each in values if each)

    def every(self) -> list[Params] | None:
        """Return all combinations, or None if there are too many to list."""
        if (size := self.size()) is None or size > _MOST_LISTED:
            return None
        names = [parameter.name for parameter in self.parameters]
        combinations = product(*(parameter.values() or [] for parameter in self.parameters))
        return [dict(zip(names, values, strict=True)) for values in combinations]

    def overrides(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the trial's changes to the recipe in the notation of `--set`."""
        values: dict[str, Any] = {}
        for domain in self.domains:
            if domain.key == OPERATORS_KEY:  # otherwise the recipe's own laplacian_heads would be a second plan
                values[LAPLACIAN_HEADS] = 0
            if domain.key == LAPLACIAN_HEADS:
                values[OPERATORS_KEY] = None
            values[domain.key] = domain.value(params)
        # The trial's values last: of two `--set` for one key the later one counts.
        return (*self.options, *(override(key, value) for key, value in values.items()))

    def load(self, params: Mapping[str, Any], seed: int | None = None) -> BaseRecipe:
        recipe = self.loader(self.overrides(params), seed)  # a given seed replaces the recipe's
        assert isinstance(recipe, BaseRecipe)
        return recipe

    def control(self) -> "Space":
        """Return the control arm's space: the head plan is one number for all layers, the other domains are the same.

        Without a head plan in the space, the control is the recipe itself.
        """
        others = tuple(domain for domain in self.domains if not domain.is_plan)
        if len(others) == len(self.domains):
            return Space(self.recipe, self.base, (), self.options, self.loader)
        model: Any = getattr(self.base, "model")  # noqa: B009
        constant = plan_domain(LAPLACIAN_HEADS, "constant", 0, model.heads, model.layers, model.heads)
        return Space(self.recipe, self.base, (constant, *others), self.options, self.loader)

    def plain(self) -> Params:
        """Return where the control starts: plain attention, and the recipe's own values where the space has them."""
        values = recipe_to_dict(self.base)
        params: Params = {}
        for domain in self.domains:
            own: Any = values
            for part in domain.key.split("."):
                own = own.get(part) if isinstance(own, Mapping) else None
            (parameter,) = domain.parameters
            # As `_domain` writes choices: another form of the same value would not be found.
            own = 0 if domain.plan is not None else canonical_json(domain.key, own) if parameter.choices else own
            if own in parameter.choices if parameter.choices else _is_in(own, parameter):
                params[parameter.name] = own
        return params

    def describe(self) -> dict[str, Any]:
        """Return the part of a search's record that must not change when the search is resumed."""
        return {
            parameter.name: list(parameter.choices) or [parameter.low, parameter.high, "log" if parameter.log else ""]
            for parameter in self.parameters
        }


def plan_of(recipe: BaseRecipe) -> HeadPlan | None:
    """Return the head plan of a recipe, or None if its kind of model has none."""
    model = getattr(recipe, "model", None)
    return model.head_plan() if isinstance(model, TransformerModel) else None


def _is_in(value: Any, parameter: Parameter) -> bool:
    return isinstance(value, int | float) and parameter.low <= value <= parameter.high


def plan_domain(
    key: str, plan: str, low: int, high: int, layers: int, heads: int, operators: Sequence[str] = (), where: str = ""
) -> Domain:
    names = {
        "per_layer": [f"layer{layer}" for layer in range(layers)],
        "total": ["total"],
        "linear": ["first", "last"],
        "constant": ["each"],
    }[plan]
    parameters = [Parameter(f"{key}.{name}", low=low, high=high) for name in names]
    if plan == "total":
        parameters.append(Parameter(f"{key}.place", tuple(map(json.dumps, PLACES))))
    if operators:
        parameters.append(Parameter(f"{key}.operator", tuple(map(json.dumps, operators))))
    return Domain(key, tuple(parameters), plan, layers, heads, where)


def space_from_options(recipe: Path, over: Over, options: Sequence[str]) -> Space:
    """Return the space of `--over`: a single mapping in a known notation is a domain, all else a list of choices."""
    entries = {}
    for key, values in over.items():
        is_domain = len(values) == 1 and isinstance(values[0], Mapping) and _looks_like_a_domain(key, values[0])
        entries[key] = values[0] if is_domain else values
    return _space(recipe, Document(entries, {(): "--over"}), options, "--over")


def space_from_file(recipe: Path, path: Path, options: Sequence[str]) -> Space:
    try:
        document, problems = read_file(path)
    except Unreadable as error:
        raise RecipeError(str(path), [error.problem]) from None
    return _space(recipe, document, options, str(path), problems)


def _looks_like_a_domain(key: str, value: Mapping[str, Any]) -> bool:
    return bool({"from", "to", *PLANS} & set(value)) or key != OPERATORS_KEY


def _space(
    recipe: Path,
    document: Document,
    options: Sequence[str],
    source: str,
    problems: Sequence[Problem] = (),
) -> Space:
    """Read and check all domains; raise RecipeError with every problem and its place."""
    entries = document.values
    if not entries:
        raise UsageError("the space is empty; give --over, e.g. --over 'model.laplacian_heads={per_layer: [0, 4]}'")
    load = recipe_loader(recipe)
    base = load(options, None)
    if not isinstance(base, BaseRecipe):
        raise UsageError(f"{recipe} has stages that start from a run's weights; search over that run's recipe instead")
    all_problems: list[Problem] = list(problems)
    domains: list[Domain] = []
    given = {text.partition("=")[0].strip() for text in options}
    for key, value in entries.items():
        where = document.place((key,))
        if key in given:
            all_problems.append(Problem(where, key, "is both searched and given by --set; remove one of them"))
        try:
            domains.append(_domain(key, value, where, base))
        except ValueError as error:
            all_problems.append(Problem(where, key, str(error)))
    if {LAPLACIAN_HEADS, OPERATORS_KEY} <= set(entries):
        message = f"{LAPLACIAN_HEADS} is shorthand for its laplacian operator; search over one of the two"
        all_problems.append(Problem(document.place((OPERATORS_KEY,)), OPERATORS_KEY, message))
    space = Space(recipe, base, tuple(domains), tuple(options), load)
    for domain in domains:
        # Each domain by itself, so that a refused recipe can be blamed on one key.
        alone = Space(recipe, base, (domain,), tuple(options), load)
        all_problems += [problem for problem in _wrong_recipes(alone, domain) if problem not in all_problems]
    if all_problems:
        raise RecipeError(source, in_reading_order(all_problems, source))
    return space


def _wrong_recipes(space: Space, domain: Domain) -> list[Problem]:
    """Return the recipe's problems at the ends of a domain: one parameter varies, the others keep their first value."""
    usual = {parameter.name: parameter.ends()[0] for parameter in domain.parameters}
    problems = []
    for parameter in domain.parameters:
        for end in parameter.ends():
            try:
                space.load({**usual, parameter.name: end})
            except RecipeError as error:
                problems += [Problem(domain.where, domain.key, problem.message) for problem in error.problems]
    return list(dict.fromkeys(problems))


def _domain(key: str, value: Any, where: str, base: BaseRecipe) -> Domain:
    """Return the domain of a key; raise ValueError with the expected form."""
    if key == "seed":
        raise ValueError("the seed cannot be searched, because the winner is confirmed on other seeds; remove it")
    if isinstance(value, list):
        texts = tuple(canonical_json(key, choice) for choice in value)
        if not texts or len(set(texts)) < len(texts):
            raise ValueError(f"expected distinct choices, got {quoted(value)}")
        return Domain(key, (Parameter(key, texts),), where=where)
    if not isinstance(value, Mapping):
        raise ValueError(f"{_FORMS}, got {quoted(value)}")
    if plans := [name for name in PLANS if name in value]:
        return _plan(key, value, plans, base, where)
    if set(value) - {"from", "to", "log"} or not {"from", "to"} <= set(value):
        raise ValueError(f"{_FORMS}, got {quoted(value)}")
    return Domain(key, (_range(key, value),), where=where)


def _range(key: str, value: Mapping[str, Any]) -> Parameter:
    low, high, log = value["from"], value["to"], value.get("log", False)
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)):
        raise ValueError(f"from and to must be numbers, got {quoted([low, high])}")
    if not isinstance(log, bool):
        raise ValueError(f"log must be true or false, got {quoted(log)}")
    if not low < high:
        raise ValueError(f"from must be less than to, got from {low} to {high}")
    if log and low <= 0:
        raise ValueError(f"a logarithmic range must start above 0, got {low}")
    return Parameter(key, low=low, high=high, log=log, whole=all(isinstance(end, int) for end in (low, high)))


def _plan(key: str, value: Mapping[str, Any], plans: Sequence[str], base: BaseRecipe, where: str) -> Domain:
    model: Any = getattr(base, "model", None)
    if key not in (LAPLACIAN_HEADS, OPERATORS_KEY):
        raise ValueError(f"{plans[0]} is a head plan; use it with {LAPLACIAN_HEADS} or {OPERATORS_KEY}")
    allowed = {plans[0]} | ({"operator"} if key == OPERATORS_KEY else set())
    if set(value) - allowed or len(plans) > 1:
        others = ", ".join(sorted(map(str, set(value) - allowed)))
        raise ValueError(f"{others} cannot be combined with {plans[0]}")
    ends = value[plans[0]]
    most = model.heads * (model.layers if plans[0] == "total" else 1)
    # `type`, because isinstance(True, int) holds.
    is_pair = isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends)
    if not is_pair or not 0 <= ends[0] < ends[1] <= most:
        raise ValueError(f"{plans[0]}: expected two integers from 0 to {most}, the lower first, got {quoted(ends)}")
    operators: list[str] = []
    if key == OPERATORS_KEY:
        named = value.get("operator", "laplacian")
        operators = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        wrong = [name for name in operators if name not in OPERATORS]
        if wrong or not operators:
            known = ", ".join(OPERATORS.built_in())
            raise ValueError(f"operator: expected one or more of {known}; got {quoted(wrong or named)}")
    return plan_domain(key, plans[0], ends[0], ends[1], model.layers, model.heads, operators, where)
