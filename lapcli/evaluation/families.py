"""Chooses the tasks that a model can be evaluated by: families of tasks, matched by what the model gives.

torch is not imported here: a task or an option that has no effect for a run is refused before anything is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lapcli.evaluation.image_tasks import ACCURACY, PROBES
from lapcli.evaluation.language_tasks import LANGUAGE_TASKS
from lapcli.evaluation.tasks import TaskFamily
from lapcli.recipe import OBJECTIVES
from lapcli.recipe.schema import FEATURES
from lapcli.runtime.errors import UsageError

FAMILIES: tuple[TaskFamily, ...] = (ACCURACY, PROBES, LANGUAGE_TASKS)

#: The objective of `--model`, which has no run and so no kind of training: features of a stock model are measured.
STOCK = "a stock model"


@dataclass(frozen=True)
class ChosenTasks:
    """The tasks of an evaluation, by family in the order of the families, and their options."""

    names: list[str]
    by_family: list[tuple[TaskFamily, list[str]]]
    options: dict[str, Any]


def choose(objective: str, tasks: str | None, given: Mapping[str, Any], data: Path | None) -> ChosenTasks:
    """Check tasks and options as far as possible before a model is loaded. `objective`: the run's, or STOCK."""
    names, options = chosen_tasks(objective, tasks), _chosen_options(objective, given)
    by_family: dict[TaskFamily, list[str]] = {family: [] for family in families_of(objective)}
    for name in names:
        # A family that lists the name goes first: `has` of the language tasks may match any word of lm-eval's files.
        listing = [family for family in by_family if name in family.tasks]
        by_family[listing[0] if listing else next(family for family in by_family if family.has(name))].append(name)
    for family, its_tasks in by_family.items():
        if its_tasks or not options.keys().isdisjoint(family.options):  # an option without its task is refused too
            family.check(its_tasks, options, data, _gives(objective))
    return ChosenTasks(names, [(family, its_tasks) for family, its_tasks in by_family.items() if its_tasks], options)


def evaluated_objectives() -> list[str]:
    return [name for name in OBJECTIVES if families_of(name)]


def families_of(objective: str) -> list[TaskFamily]:
    return [family for family in FAMILIES if family.needs <= _gives(objective)]


def chosen_tasks(objective: str, text: str | None) -> list[str]:
    """Read a comma-separated list of tasks; by default those of the first family."""
    families = families_of(objective)
    if not families:
        raise UsageError(f"{_described(objective)} has no evaluation tasks; {', '.join(evaluated_objectives())} have")
    if text is None:
        return list(families[0].default)
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        _check_name(name, objective, families)
    return names


def _check_name(name: str, objective: str, families: Sequence[TaskFamily]) -> None:
    known = list(dict.fromkeys(task for family in families for task in family.tasks))
    if name in known:
        return
    there_are, described = f"there are {', '.join(known)}", _described(objective)
    other = next((family for family in FAMILIES if name in family.tasks), None)
    if other is not None:
        raise UsageError(f"--tasks: {name} measures {other.measures}, which {described} does not give; {there_are}")
    if not any(family.has(name) for family in families):
        near = get_close_matches(name, [task for family in families for task in family.near()], 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"--tasks: there is no task {name[:60]!r} for {described}{hint}; {there_are}")


def _chosen_options(objective: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are neither None nor False; one that no family of the model declares is an error."""
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    known = {option for family in families_of(objective) for option in family.options}
    for name in chosen:
        if name not in known:
            kinds = [kind for kind in OBJECTIVES if any(name in family.options for family in families_of(kind))]
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect for {_described(objective)}, only for "
                f"{' and '.join(kinds)}; leave it out"
            )
    return chosen


def _gives(objective: str) -> frozenset[str]:
    return frozenset({FEATURES}) if objective == STOCK else OBJECTIVES[objective].gives


def _described(objective: str) -> str:
    return objective if objective == STOCK else f"a run of {objective}"
