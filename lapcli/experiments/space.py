"""The space of a search: recipe keys with their domains, and the mapping from Optuna's parameters to recipe values.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from lapcli.experiments.cells import LAPLACIAN_HEADS, OPERATORS, Over, overrides_of, value_at
from lapcli.heads.operators import OPERATORS as KNOWN_OPERATORS
from lapcli.recipe import BaseRecipe, RecipeError, canonical_json, recipe_loader, recipe_to_dict
from lapcli.recipe.reading import Document, Problem, Unreadable, in_reading_order, quoted, read_file
from lapcli.runtime.errors import UsageError

PLANS = {"per_layer": (), "total": ("total",), "linear": ("first", "last"), "constant": ("each",)}  # parameters of each
Params = Mapping[str, Any]  # parameter name to value, for one trial
_FORMS = (
    "expected a list of choices, {from:, to:, log:}, or for head plans "
    "{per_layer: [0, 4]}, {total: [0, 16]}, {linear: [0, 4]} or {constant: [0, 4]}"
)
_MOST_LISTED = 10_000  # a larger space is not enumerated


@dataclass(frozen=True)
class Domain:
    """The values that one key of the recipe may take."""

    key: str
    parameters: dict[str, Any]  # Optuna's distribution of each; choices are JSON texts, since it takes no lists
    plan: str | None = None  # one of PLANS
    layers: int = 0
    heads: int = 0

    @property
    def is_plan(self) -> bool:
        """Whether the key sets the head plan, for which there is a control."""
        return self.key in (LAPLACIAN_HEADS, OPERATORS)

    def value(self, params: Params) -> Any:
        """Return the recipe value for these parameters."""
        own = {name.removeprefix(f"{self.key}."): params[name] for name in self.parameters}
        own = {name: json.loads(value) if isinstance(value, str) else value for name, value in own.items()}
        if self.plan is None:
            return own[self.key]
        counts: Any
        if self.plan == "per_layer":
            counts = [own[f"layer{layer}"] for layer in range(self.layers)]
        elif self.plan == "total":
            counts = placed(own["total"], own["place"], self.layers, self.heads)
        elif self.plan == "linear":
            counts = f"linear({own['first']}, {own['last']})"
        else:
            counts = own["each"]
        return counts if self.key == LAPLACIAN_HEADS else {own["operator"]: {"heads": counts}}


def placed(total: int, place: str, layers: int, heads: int) -> list[int]:
    """Distribute `total` heads: fill layers from the first or the last on, or spread them as evenly as possible."""
    if place == "spread":
        # Differences of rounded-down cumulative shares: they sum to `total` exactly.
        return [total * (layer + 1) // layers - total * layer // layers for layer in range(layers)]
    filled = [min(heads, max(0, total - heads * layer)) for layer in range(layers)]
    return filled if place == "first" else filled[::-1]


@dataclass(frozen=True)
class Space:
    """The domains of a search, and the recipe that they are applied to."""

    recipe: Path
    base: BaseRecipe
    domains: tuple[Domain, ...]
    options: tuple[str, ...]  # the command's `--set` options, applied to every trial
    loader: Any = field(repr=False)

    @property
    def distributions(self) -> dict[str, Any]:
        return {name: each for domain in self.domains for name, each in domain.parameters.items()}

    def every(self) -> list[dict[str, Any]] | None:
        """Return all combinations, or None if there are too many to list."""
        values, count = {}, 1
        for name, each in self.distributions.items():
            choices = getattr(each, "choices", None)
            size = len(choices) if choices else each.high - each.low + 1 if isinstance(each.low, int) else _MOST_LISTED
            count *= size
            if count >= _MOST_LISTED:
                return None
            values[name] = choices or range(each.low, each.high + 1)
        return [dict(zip(values, each, strict=True)) for each in product(*values.values())]

    def overrides(self, params: Params) -> tuple[str, ...]:
        """Return the trial's changes to the recipe in the notation of `--set`."""
        values: dict[str, Any] = {}
        for domain in self.domains:
            if domain.key == OPERATORS:  # otherwise the recipe's own laplacian_heads would be a second plan
                values[LAPLACIAN_HEADS] = 0
            if domain.key == LAPLACIAN_HEADS:
                values[OPERATORS] = None
            values[domain.key] = domain.value(params)
        # The trial's values last: of two `--set` for one key the later one counts.
        return (*self.options, *overrides_of(values))

    def load(self, params: Params, seed: int | None = None) -> BaseRecipe:
        """Load the recipe with these values; a given seed replaces the recipe's."""
        recipe = self.loader(self.overrides(params), seed)
        assert isinstance(recipe, BaseRecipe)
        return recipe

    def control(self) -> "Space":
        """Return the control arm's space: the head plan is one number for all layers, the other domains are the same.

        Without a head plan in the space, the control is the recipe itself.
        """
        others = tuple(domain for domain in self.domains if not domain.is_plan)
        if len(others) == len(self.domains):
            return replace(self, domains=())
        model: Any = getattr(self.base, "model")  # noqa: B009
        return replace(self, domains=(_plan_domain(LAPLACIAN_HEADS, "constant", 0, model.heads, model), *others))

    def plain(self) -> dict[str, Any]:
        """Return where the control starts: plain attention, and the recipe's own values where the space has them."""
        values, params = recipe_to_dict(self.base), {}
        for domain in self.domains:
            ((name, each),) = domain.parameters.items()
            own = value_at(values, domain.key)
            # As `_domain` writes choices: another form of the same value would not be found.
            own = 0 if domain.plan else canonical_json(domain.key, own) if hasattr(each, "choices") else own
            if own in each.choices if hasattr(each, "choices") else _is_number(own) and each.low <= own <= each.high:
                params[name] = own
        return params


def read_space(recipe: Path, space: Path | Over, options: Sequence[str]) -> Space:
    """Return the space of a file or of `--over`, where a single mapping in a known notation is a domain."""
    problems: list[Problem] = []
    if isinstance(space, Path):
        try:
            document, problems = read_file(space)
        except Unreadable as error:
            raise RecipeError(str(space), [error.problem]) from None
    else:
        entries = {key: values[0] if _is_domain(key, values) else values for key, values in space.items()}
        document = Document(entries, {(): "--over"})
    loader = recipe_loader(recipe)
    base = loader(options, None)
    if not isinstance(base, BaseRecipe):
        raise UsageError(f"{recipe} has stages, which start from a run; search over a recipe of a single run")
    read = Space(recipe, base, (), tuple(options), loader)
    for key, value in document.values.items():
        where = document.place((key,))
        try:
            domain = _domain(key, value, read.base)
        except ValueError as error:
            problems.append(Problem(where, key, str(error)))
            continue
        # Each domain by itself, so that a refused recipe can be blamed on one key; values that do not fit together
        # are failed trials.
        found = _refused(replace(read, domains=(domain,)))
        problems += list(dict.fromkeys(Problem(where, key, message) for message in found))
        read = replace(read, domains=(*read.domains, domain))
    if {LAPLACIAN_HEADS, OPERATORS} <= set(document.values):
        message = f"{LAPLACIAN_HEADS} is shorthand for its laplacian operator; search over one of the two"
        problems.append(Problem(document.place((OPERATORS,)), OPERATORS, message))
    if problems:
        source = str(space) if isinstance(space, Path) else "--over"
        raise RecipeError(source, in_reading_order(problems, source))
    return read


def _is_domain(key: str, values: Sequence[Any]) -> bool:
    is_mapping = len(values) == 1 and isinstance(values[0], Mapping)
    return is_mapping and (bool({"from", "to", *PLANS} & set(values[0])) or key != OPERATORS)


def _refused(space: Space) -> list[str]:
    """Return why the recipe refuses ends of a domain: one parameter varies, the others keep their first value."""
    ends = {name: getattr(each, "choices", None) or (each.low, each.high) for name, each in space.distributions.items()}
    usual = {name: values[0] for name, values in ends.items()}
    messages = []
    for name, values in ends.items():
        for end in values:
            try:
                space.load({**usual, name: end})
            except RecipeError as error:
                messages += [problem.message for problem in error.problems]
    return messages


def _domain(key: str, value: Any, base: BaseRecipe) -> Domain:
    """Return the domain of a key; raise ValueError with the expected form."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if key == "seed":
        raise ValueError("the seed cannot be searched, because the winner is confirmed on other seeds; remove it")
    if isinstance(value, list):
        texts = tuple(canonical_json(key, choice) for choice in value)
        if not texts or len(set(texts)) < len(texts):
            raise ValueError(f"expected distinct choices, got {quoted(value)}")
        return Domain(key, {key: CategoricalDistribution(texts)})
    if isinstance(value, Mapping) and (plans := [name for name in PLANS if name in value]):
        return _plan(key, value, plans[0], base)
    if not isinstance(value, Mapping) or not {"from", "to"} <= set(value) <= {"from", "to", "log"}:
        raise ValueError(f"{_FORMS}, got {quoted(value)}")
    low, high, log = value["from"], value["to"], value.get("log", False)
    if not (_is_number(low) and _is_number(high) and isinstance(log, bool)):
        raise ValueError(f"from and to must be numbers, and log true or false, got {quoted(value)}")
    if not low < high or (log and low <= 0):
        raise ValueError(f"from must be less than to, and above 0 if log is true, got from {low} to {high}")
    is_whole = isinstance(low, int) and isinstance(high, int)
    return Domain(key, {key: (IntDistribution if is_whole else FloatDistribution)(low, high, log=log)})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plan(key: str, value: Mapping[str, Any], plan: str, base: BaseRecipe) -> Domain:
    model: Any = getattr(base, "model", None)
    if key not in (LAPLACIAN_HEADS, OPERATORS):
        raise ValueError(f"{plan} is a head plan; use it with {LAPLACIAN_HEADS} or {OPERATORS}")
    if others := set(value) - {plan} - ({"operator"} if key == OPERATORS else set()):
        raise ValueError(f"{', '.join(sorted(map(str, others)))} cannot be combined with {plan}")
    ends = value[plan]
    most = model.heads * (model.layers if plan == "total" else 1)
    # `type`, because isinstance(True, int) holds.
    is_pair = isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends)
    if not is_pair or not 0 <= ends[0] < ends[1] <= most:
        raise ValueError(f"{plan}: expected two integers from 0 to {most}, the lower first, got {quoted(ends)}")
    named = value.get("operator", "laplacian")
    operators = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if not operators or (wrong := [name for name in operators if name not in KNOWN_OPERATORS]):
        known = ", ".join(KNOWN_OPERATORS.built_in())
        raise ValueError(f"operator: expected one or more of {known}; got {quoted(wrong if operators else named)}")
    return _plan_domain(key, plan, ends[0], ends[1], model, operators if key == OPERATORS else ())


def _plan_domain(key: str, plan: str, low: int, high: int, model: Any, operators: Sequence[str] = ()) -> Domain:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    names = PLANS[plan] or [f"layer{layer}" for layer in range(model.layers)]
    parameters: dict[str, Any] = {f"{key}.{name}": IntDistribution(low, high) for name in names}
    if plan == "total":
        parameters[f"{key}.place"] = CategoricalDistribution(('"first"', '"last"', '"spread"'))
    if operators:
        parameters[f"{key}.operator"] = CategoricalDistribution(tuple(map(json.dumps, operators)))
    return Domain(key, parameters, plan, model.layers, model.heads)
