"""Reads runs: their recipes, and every number measured on their last or best weights.

The names of numbers show where they come from:

    top1, arc_easy, linear ...         `eval/*.json`
    validation_loss ...                `summary.json`, the validation at the end of training
    spectrum.k_0.99, snr.snr ...       `analysis/*.json` of the run or of the folder of runs, last layer
    cost.peak_memory ...               `run.json`, `metrics.jsonl` and the head plan: report/costs.py

A missing number is not in the dictionary: it becomes a gap in the tables, never a zero. Only finished runs have
numbers; what was measured on other weights than the chosen ones is left out, with a note.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lapcli.analysis.measurement import Measurement
from lapcli.analysis.measurements import MEASUREMENTS
from lapcli.evaluation.tasks import SAMPLING
from lapcli.recipe import OBJECTIVES, recipe_to_dict
from lapcli.recipe.chat import ChatStageRecipe
from lapcli.recipe.schema import CHAT, LANGUAGE, RUN
from lapcli.report.costs import costs_of
from lapcli.report.statistics import is_number
from lapcli.results import find_paths
from lapcli.runs import INFO, SWEEP, Run, read_run, read_summary
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import read_json
from lapcli.training.metrics import read_metrics

Which = Literal["last", "best"]


@dataclass(frozen=True)
class Number:
    value: float
    conditions: tuple[tuple[str, str], ...] = ()  # other than the default; only equal conditions are compared
    count: int | None = None  # examples
    source: str = ""  # the file
    seed: int = 0  # of an analysis: it chooses the images of --limit
    is_fraction: bool | None = None  # of an evaluation: its unit and direction; None: not recorded
    higher_is_better: bool | None = None


@dataclass
class RunResult:
    """One run: its recipe and its numbers."""

    name: str
    path: Path
    objective: str
    status: str
    seed: str  # of all stages: `0`, or for a chat run `1+42+42`, its pretraining first
    recipe: dict[str, Any]  # as data; a chat run's `start` is the recipe that it started from
    info: dict[str, Any]
    numbers: dict[str, Number] = field(default_factory=dict)
    by_layer: dict[str, dict[int, float]] = field(default_factory=dict)  # of analyses
    series: dict[str, list[float]] = field(default_factory=dict)  # of analyses, last layer: eigenvalues
    curve: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl
    figures: dict[str, Path] = field(default_factory=dict)  # of analyses of this run alone, by name
    identity: dict[str, str] | None = None  # keys that have to agree for an average; computed once, by `identity_of`
    pretraining: dict[str, Any] = field(default_factory=dict)  # `run.json` of the first stage, or its own
    best_step: int | None = None  # of its scores, if they are those of the best weights and not of the last
    is_search: bool = False  # of a sweep's search: it only chose values for others, and is not a result

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"


@dataclass
class Collection:
    runs: list[RunResult]
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    figures: dict[tuple[str, str], Path] = field(default_factory=dict)  # of comparisons, by folder and measurement
    compared: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # the names of the runs in those figures
    folders: list[Path] = field(default_factory=list)


def collect(names: Sequence[str], runs_dir: Path, which: Which = "last") -> Collection:
    """Read the runs with these names, folders or patterns; all runs of the folder without any."""
    paths = find_paths(names, runs_dir)
    notes: list[str] = []
    results: list[RunResult] = []
    damaged: list[str] = []  # a table without them would not show that anything is wrong
    for path in paths:
        try:
            results.append(_read(read_run(path), which, notes))
        except DataError as error:
            damaged.append(str(error))
        except UsageError as error:
            if names and str(path) in names:
                raise
            notes.append(f"{path.name} is left out: {' '.join(map(str.strip, str(error).splitlines()[:2]))}")
    if damaged:
        raise DataError("\n".join([*damaged, "or name the other runs, to report without it"]))
    if not results:
        raise UsageError(f"{runs_dir} holds no run to report on; name runs, or choose another --runs-dir")
    collection = Collection(results, notes, folders=list(dict.fromkeys(path.parent for path in paths)))
    for folder in collection.folders:
        for place in _analysis_folders(folder):
            figures: dict[str, Path] = {}
            seen = _read_analyses(place, results, which, notes, figures)
            whose = "several runs" if place.name == "analysis" else str(place.relative_to(folder / "analysis"))
            collection.figures.update({(whose, what): path for what, path in figures.items()})
            collection.compared.update({(whose, what): names for what, names in seen.items()})
    for result in results:
        # After the comparisons: of equal measurements the one in the run's own folder counts.
        for place in _analysis_folders(result.path):
            _read_analyses(place, [result], which, notes, result.figures)
    return collection


def _analysis_folders(folder: Path) -> list[Path]:
    """Return the folders of analyses, first that of the default settings."""
    return [folder / "analysis", *sorted((folder / "analysis").glob("**/"))[1:]]


def _read(run: Run, which: Which, notes: list[str]) -> RunResult:
    recipe, seeds, pretraining = _whole_recipe(run, notes)
    result = RunResult(
        run.name,
        run.path,
        run.recipe.objective,
        run.status,
        "+".join(seeds),
        recipe,
        run.info,
        curve=read_metrics(run.metrics),
        pretraining=pretraining,
        is_search=_is_search(run.path),
    )
    if not result.is_finished:
        done = f"step {run.info.get('step', 0)} of {run.info.get('steps', '?')}"
        why = f": {run.info['failure']}" if run.info.get("failure") else ""
        notes.append(f"{run.name} is {result.status} at {done}{why}; it counts as a gap")
        return result
    summary = read_summary(run)
    if which == "best" and summary.get("best_step") is None:
        notes.append(f"{run.name}: its kind of training keeps no best checkpoint; use --checkpoint last to include it")
        return result
    result.best_step = summary.get("best_step") if which == "best" else None
    for name, value in _mapping(summary.get("end" if which == "last" else "best")).items():
        if is_number(value):
            result.numbers[name] = Number(float(value), source="summary.json")
    _read_evaluations(result, run.info.get("step") if which == "last" else result.best_step, which, notes)
    result.numbers |= {name: Number(value, source=INFO) for name, value in costs_of(result).items()}
    for task in OBJECTIVES[run.recipe.objective].validated_scores:
        if task not in result.numbers and f"validation_{task}" in result.numbers:
            result.numbers[task] = result.numbers[f"validation_{task}"]
    return result


def _is_search(path: Path) -> bool:
    """Return whether a sweep marked the run as part of its search."""
    file = path / SWEEP
    return file.is_file() and read_json(file, "remove it and run the sweep again").get("search") is True


def _whole_recipe(run: Run, notes: list[str]) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Return the recipe, with the recipes of earlier stages instead of their names; the seeds of all stages, the first
    stage first; and `run.json` of the first stage, empty if that run is missing."""
    recipe = recipe_to_dict(run.recipe)
    seeds = [str(recipe.pop("seed", 0))]
    given = run.recipe.train.init_from
    if isinstance(run.recipe, ChatStageRecipe) and given is not None:
        name = given.source.removeprefix(RUN).partition("@")[0]
        before = run.path.parent / name if (run.path.parent / name / INFO).is_file() else Path(name)
        recipe["train"]["init_from"] = None
        if (before / INFO).is_file():
            recipe["start"], earlier, first = _whole_recipe(read_run(before), notes)
            return recipe, [*earlier, *seeds], first
        notes.append(f"{run.name} started from {name}, which is missing: how that was trained is not compared")
        recipe["start"] = None
        # The name stands for the unknown seeds and keeps stages of different starts apart; "+" separates seeds.
        return recipe, [Path(name).name.replace("+", "-"), *seeds], {}
    return recipe, seeds, run.info


def _read_evaluations(result: RunResult, step: Any, which: Which, notes: list[str]) -> None:
    by_task: dict[str, list[tuple[float, Number]]] = {}
    for path, record in _json_files(result.path / "eval"):
        if not isinstance(record.get("tasks"), dict):
            continue
        if record.get("step") != step:
            notes.append(f"{result.name}: {path.name} is of step {record.get('step')}, not of the {which} weights")
            continue
        if which == "last" and record.get("weights_sha256") != result.info.get("weights_sha256"):
            notes.append(f"{result.name}: {path.name} was measured on other weights than its last ones")
            continue
        for task, score in record["tasks"].items():
            if isinstance(score, dict) and is_number(score.get("value")):
                number = Number(
                    float(score["value"]),
                    _conditions(task, score, record, result.info),
                    score.get("count"),
                    path.name,
                    is_fraction=score.get("is_fraction"),
                    higher_is_better=score.get("higher_is_better"),
                )
                by_task.setdefault(task, []).append((path.stat().st_mtime, number))
    for task, numbers in by_task.items():
        by_conditions: dict[Any, Number] = {}
        for _, number in sorted(numbers, key=lambda pair: pair[0]):  # of equal conditions the newest one stays
            by_conditions[number.conditions] = number
        for number in by_conditions.values():
            result.numbers[numbered_name(task, number.conditions)] = number


def _mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is a dictionary; a damaged file may hold something else, which counts as empty."""
    return value if isinstance(value, dict) else {}


def numbered_name(task: str, conditions: tuple[tuple[str, str], ...]) -> str:
    """Return `arc_easy`, or `arc_easy [limit 100, protocol harness]`: two measurements never share a name."""
    words = ", ".join(f"{key} {value}" for key, value in conditions)
    return f"{task} [{words}]" if words else task


def _conditions(
    task: str, score: Mapping[str, Any], record: Mapping[str, Any], info: Mapping[str, Any]
) -> tuple[tuple[str, str], ...]:
    """Return how the measurement differs from the default one of that name; empty for the default one."""
    details = _mapping(score.get("details"))
    conditions: dict[str, str] = {}
    if record.get("limit") is not None:
        conditions["limit"] = str(record["limit"])
    if record.get("protocol") is not None:
        kind = str(record.get("objective"))
        if record["protocol"] != ("paper" if kind in OBJECTIVES and CHAT in OBJECTIVES[kind].gives else "harness"):
            conditions["protocol"] = str(record["protocol"])
        sampling = _mapping(details.get("sampling"))
        metric = str(details.get("metric", ""))
        if sampling and metric.startswith("pass@") and metric != f"pass@{SAMPLING['samples']}":
            conditions["metric"] = metric
        for key in ("temperature", "top_k", "max_tokens"):
            if key in sampling and sampling[key] != SAMPLING[key]:
                conditions[key] = str(sampling[key])
    elif task != "ade20k":  # it always has its own scenes, whatever the run was trained on
        first = str(record.get("data", "")).split("; ")[0]
        if first and info.get("data") not in (None, first):
            conditions["on"] = first
    for key, value in _mapping(_mapping(details.get("protocol")).get("changed")).items():
        used = value.get("used") if isinstance(value, dict) else value
        if key != "data":
            conditions[key] = str(used)
    return tuple(sorted(conditions.items()))


def _read_analyses(
    folder: Path, results: Sequence[RunResult], which: Which, notes: list[str], figures: dict[str, Path]
) -> dict[str, list[str]]:
    """Add the numbers of analyses to the runs; return the names of the runs in each analysis."""
    by_name = {result.name: result for result in results}
    analyses: dict[str, list[str]] = {}
    for path, record in _json_files(folder):
        what, entries = record.get("what"), record.get("runs")
        if not isinstance(what, str) or not isinstance(entries, list):
            continue
        seen: list[str] = []
        for entry in entries:
            result = by_name.get(entry.get("name"))
            if result is None or entry.get("weights") != "trained" or not result.is_finished:
                continue
            if which == "last" and entry.get("weights_sha256") != result.info.get("weights_sha256"):
                notes.append(f"{result.name}: {path.name} was measured on other weights than its last ones")
                continue
            if which == "best" and entry.get("step") != result.best_step:
                notes.append(f"{result.name}: {path.name} is of step {entry.get('step')}, not of the best weights")
                continue
            seen.append(result.name)
            _add_layers(result, what, entry, _mapping(record.get("settings")))
        if seen:
            analyses[what] = seen
            for form in (".svg", ".png"):
                if path.with_suffix(form).is_file():
                    figures.setdefault(what, path.with_suffix(form))  # the default measurement's, which comes first
                    break
    return analyses


def _add_layers(result: RunResult, what: str, entry: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    layers = [layer for layer in entry.get("layers", []) if isinstance(layer, dict) and "layer" in layer]
    if not layers:
        return
    measurement = MEASUREMENTS[what] if what in MEASUREMENTS else Measurement  # noqa: SIM401  a registry has no `get`
    skipped = {"layer", *measurement.counts}
    last = max(layers, key=lambda layer: layer["layer"])
    usual = {option.name: option.default for option in measurement.options if option.is_condition}
    usual |= {"norm": measurement.default_norm, "limit": None}
    changed = {key: str(settings[key]) for key in usual if settings.get(key) not in (None, usual[key])}
    changed |= _other_data(result, entry)
    # `by_layer` has no names for conditions, so that only default measurements go there.
    if not changed:
        _add_by_layer(result, what, layers, skipped)
    if last["layer"] != len(entry.get("laplacian_heads") or []) - 1:  # the model's last layer was not measured
        changed["layer"] = str(last["layer"])
    conditions = tuple(sorted(changed.items()))
    for name, value in last.items():
        if name in skipped:
            continue
        if is_number(value):
            source, seed = f"{what}.json", settings.get("seed") or 0
            number = Number(float(value), conditions, entry.get("sequences"), source, seed)
            result.numbers[numbered_name(f"{what}.{name}", conditions)] = number
        elif (
            not conditions
            and isinstance(value, list)
            and value
            and all(item is None or is_number(item) for item in value)
        ):
            result.series[f"{what}.{name}"] = [math.nan if item is None else float(item) for item in value]


def _add_by_layer(result: RunResult, what: str, layers: Sequence[Mapping[str, Any]], skipped: set[str]) -> None:
    """Add a measure by layer, from the file with the most layers: two measurements are not mixed."""
    names = {name for layer in layers for name, value in layer.items() if name not in skipped and is_number(value)}
    for name in names:
        values = {int(layer["layer"]): float(layer[name]) for layer in layers if is_number(layer.get(name))}
        # `>=`, so that of two files with equally many layers the later one counts, as in `numbers`.
        if len(values) >= len(result.by_layer.get(f"{what}.{name}", {})):
            result.by_layer[f"{what}.{name}"] = values


def _other_data(result: RunResult, entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the data of an analysis, unless it is the run's own validation data, or that of its pretraining."""
    other = {} if entry.get("split") in (None, "validation") else {"split": str(entry["split"])}
    name, sha256 = entry.get("data"), entry.get("data_sha256")
    if LANGUAGE in OBJECTIVES[result.objective].gives:  # text is identified by its contents
        is_other = sha256 is not None and result.pretraining.get("data_sha256") not in (None, sha256)
    else:  # images by their description: the hash of the measured part is not that of the whole set
        is_other = name is not None and result.info.get("data") not in (None, name)
    return {**other, "on": f"{str(name).split(': ')[0]} {str(sha256)[:8]}"} if is_other else other


def _json_files(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob("*.json")):
        try:
            yield path, read_json(path, "remove it and measure again")
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
