"""Compares two runs, and ranks several by a measure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lapcli.catalogue.listing import lower_is_better
from lapcli.recipe import differing_keys, recipe_to_dict
from lapcli.report.collect import collect
from lapcli.runs import Run
from lapcli.runtime.errors import UsageError
from lapcli.training.metrics import read_metrics

Row = tuple[str, Any, Any]  # name, value in the first run, value in the second
#: Keys of `run.json`: the data, and the machine that trained.
_DATA = ("data", "data_sha256", "held_out_sha256", "tokenizer_sha256")
_MACHINE = ("device", "world_size", "threads")


@dataclass(frozen=True)
class Difference:
    recipe: list[Row]
    data: list[Row]
    versions: list[Row]
    scores: list[Row]  # all scores, also equal ones

    def sections(self) -> dict[str, list[Row]]:
        return {"recipe": self.recipe, "data": self.data, "versions": self.versions, "scores": self.scores}


def difference(a: Run, b: Run) -> Difference:
    """Compare two runs: keys of the recipe, data and versions that differ, and the scores of the last weights."""
    recipe = differing_keys(recipe_to_dict(a.recipe), recipe_to_dict(b.recipe))
    data = [(key, a.info.get(key), b.info.get(key)) for key in _DATA]
    versions = differing_keys(a.info.get("versions", {}), b.info.get("versions", {}))
    versions += [(key, a.info.get(key), b.info.get(key)) for key in _MACHINE]
    scores_a, scores_b = _scores(a), _scores(b)
    names = list(dict.fromkeys((*scores_a, *scores_b)))
    return Difference(
        recipe,
        [row for row in data if row[1] != row[2]],
        [row for row in versions if row[1] != row[2]],
        [("step", a.info.get("step"), b.info.get("step"))]
        + [(name, scores_a.get(name), scores_b.get(name)) for name in names],
    )


def _scores(run: Run) -> dict[str, float]:
    """Return every number of a finished run, or the numbers of the last validation of an unfinished one."""
    if run.is_finished:
        frame = collect([str(run.path)], run.path.parent).frame
        return dict(zip(frame["measure"], frame["value"], strict=True))
    curve = read_metrics(run.metrics)
    last: dict[str, Any] = next((line for line in reversed(curve) if any(map(_is_validation, line))), {})
    return {name: value for name, value in last.items() if _is_validation(name)}


def _is_validation(name: str) -> bool:
    return name.startswith("validation_")


@dataclass(frozen=True)
class Ranked:
    run: str
    path: Path
    kind: str
    value: float


@dataclass(frozen=True)
class Ranking:
    metric: str
    lower_is_better: bool
    runs: list[Ranked]  # the best first
    without: list[str] = field(default_factory=list)  # runs that do not have this number


def rank(runs_dir: Path, names: Sequence[str], metric: str, lowest: bool | None = None) -> Ranking:
    """Rank finished runs by a number of their last weights; `lowest`: lower is better; None: as its evaluation says."""
    collection = collect(names, runs_dir)
    finished = {run.name: run for run in collection.runs if run.run.is_finished and not run.is_search}
    frame = collection.frame[collection.frame["run"].isin(list(finished))]
    metric = _known_metric(metric, sorted(set(frame["measure"])), runs_dir)
    measured = frame[frame["measure"] == metric].drop_duplicates("run", keep="last")
    direction = measured["direction"].iloc[0]  # recorded with the number
    is_lower = lowest if lowest is not None else lower_is_better(metric) if not direction else direction == "lower"
    ranked = measured.sort_values(["value", "run"], ascending=[is_lower, True])
    return Ranking(
        metric,
        is_lower,
        [
            Ranked(name, finished[name].run.path, finished[name].objective, value)
            for name, value in zip(ranked["run"], ranked["value"], strict=True)
        ],
        [run.name for run in collection.runs if run.name not in set(measured["run"])],
    )


def _known_metric(metric: str, known: Sequence[str], runs_dir: Path) -> str:
    for name in (metric, f"validation_{metric}"):
        if name in known:
            return name
    if not known:
        raise UsageError(f"no finished run in {runs_dir} has a score yet; train one, or see lap eval")
    near = get_close_matches(metric, known, 1, cutoff=0.4)
    hint = f"did you mean {near[0]}? Known" if near else "known"
    raise UsageError(f"no finished run in {runs_dir} has the measure {metric[:60]!r}; {hint}: {', '.join(known)}")
