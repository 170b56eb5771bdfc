"""Evaluates a language model task by task through lm-eval, each with a journal and a file of samples.

Its results become scores with their units and directions. Below: loading lm-eval's tasks, with its definitions of
our benchmarks over our documents, or any task by name or file.
"""

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval import evaluator
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from lapcli.data.files import digest
from lapcli.evaluation.adapter import LapLM, Workers
from lapcli.evaluation.benchmarks import BENCHMARKS, Documents, PreparedTask
from lapcli.evaluation.benchmarks.bits_per_byte import METRIC
from lapcli.evaluation.tasks import SEED, Request, Score, wilson_interval
from lapcli.objectives.objective import LoadedModel
from lapcli.runtime.errors import DataError, LapError, UsageError
from lapcli.runtime.files import write_text
from lapcli.runtime.progress import Progress, shown_progress
from lapcli.runtime.ranks import World

BATCH = 16  # questions in one forward
Found = tuple[list[Score], dict[str, Any]]  # and details of the evaluation


def measure_language(request: Request, loaded: LoadedModel, world: World) -> Found:
    """Evaluate all tasks; called on every process."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with world.together():  # all tasks first: missing data fails before any computation
        tasks = [_prepare(name, request) for name in request.tasks]
    world.require_same({task.name: digest(sorted(task.files.values())) for task in tasks})
    with shown_progress(world.is_main) as progress:
        try:
            return _ask(request, loaded, tasks, Workers(world), progress)
        except LapError as error:
            error.is_echo = not world.is_main  # all ranks fail alike
            raise


def _ask(
    request: Request, loaded: LoadedModel, tasks: Sequence[PreparedTask], workers: Workers, progress: Progress
) -> Found:
    is_main = workers.world.is_main
    model, tokenizer = loaded.language_model()
    dtype = str(model.embed.weight.dtype).removeprefix("torch.")
    scores: list[Score] = []
    for task in tasks:
        # Everything on which answers and verdicts depend, except prompts, which are in each line's key.
        key = digest(
            *(loaded.weights_sha256, tokenizer.sha256, dtype, task.name, request.protocol, str(task.sampling)),
            *(
                request.seed,
                {name: each.VERSION for name, each in task.loaded["tasks"].items()},
                sorted(task.files.values()),
            ),
            version("lm-eval"),
        )
        folder = request.run.path / "eval" / f"{task.name.replace('/', '_')[:60]}-{key[:16]}"
        if task.judge is not None:
            task.judge.journal, task.judge.progress, task.judge.on_main = folder, progress, workers.on_main
        known: Any = {"task": task.name, "seed": request.seed, "journal": folder, "progress": progress}
        lm = LapLM(model, tokenizer, workers, batch=request.batch or BATCH, **known)
        # `simple_evaluate` would reseed all generators. One task per call: lm-eval scores only after all requests.
        results: Any = evaluator.evaluate(
            lm=lm,
            task_dict=task.loaded,
            limit=request.limit,
            apply_chat_template=task.is_chat,
            bootstrap_iters=100_000 if is_main else 0,  # of standard errors
        )
        if lm.resumed and is_main:
            print(f"{task.name}: reusing {lm.resumed:,} saved answers from {folder}", file=sys.stderr)
        if lm.truncated and is_main:
            print(
                f"{task.name}: {lm.truncated:,} prompts were truncated at the start to fit the context", file=sys.stderr
            )
        samples = folder / f"samples{'' if request.limit is None else f'-limit{request.limit}'}.jsonl"
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(samples, "".join(json.dumps(line, default=str) + "\n" for line in sample_lines(task, results)))
        details = {"prompts_cut": lm.truncated, "samples": str(samples)}
        scores += scores_of(request, task, results, details)
    return scores, {
        "protocol": request.protocol,
        "dtype": dtype,
        "versions": {"lm_eval": version("lm-eval")},
        "tokenizer_sha256": tokenizer.sha256,
    }


def _prepare(name: str, request: Request) -> PreparedTask:
    if name not in BENCHMARKS:
        return other_task(name, request)
    benchmark = BENCHMARKS[name]
    return benchmark.paper_task(request) if request.protocol == "paper" else benchmark.lm_eval_task(request)


_UNNAMED = ("none", "verdicts")  # filters that are not shown beside a metric


def scores_of(
    request: Request, prepared: PreparedTask, results: Mapping[str, Any], details: Mapping[str, Any]
) -> list[Score]:
    """Return a score for each group and for each task outside all groups."""
    groups = prepared.loaded["groups"]
    members = {child for group in groups.values() for child in group.child_names}
    scores = []
    for top in (*groups, *prepared.loaded["tasks"]):
        if top in members:
            continue
        # A group without aggregate_metric_list has no scores itself.
        names = [top] if _metrics(prepared, top, results) else _tasks_under(prepared, top)
        names = [name for name in names if _metrics(prepared, name, results)]
        scores += [_score(request, prepared, name, results, details) for name in names]
    if not scores:
        raise LapError(f"lm-eval has no numeric metric for {prepared.name}; choose another task")
    return scores


def _score(
    request: Request, prepared: PreparedTask, name: str, results: Mapping[str, Any], details: Mapping[str, Any]
) -> Score:
    metrics = _metrics(prepared, name, results)
    # The score of a task is pass@k with the largest k, else the first metric that lm-eval lists.
    first = max(metrics, key=lambda each: int(each[5:]) if each.startswith("pass@") else -1)
    value, error, unit, direction = (metrics[first][key] for key in ("value", "stderr", "unit", "direction"))
    tasks = _tasks_under(prepared, name)
    count = sum(results["n-samples"][task]["effective"] for task in tasks)
    interval = None if error is None else (value - 1.96 * error, value + 1.96 * error)
    if unit == "fraction":
        interval = wilson_interval(value * count, count)
    conditions = {} if prepared.sampling is None or request.protocol != "paper" else prepared.sampling.conditions()
    conditions |= {} if request.seed == SEED else {"seed": request.seed}
    described = {
        "metric": first,
        "metrics": metrics,
        "num_fewshot": results["n-shot"].get(tasks[0], 0),
        "sampling": None if prepared.sampling is None else prepared.sampling.model_dump(),
        "files": prepared.files,
        "code_execution": str(prepared.judge.mode) if prepared.judge else None,
        **details,
    }
    files = list(prepared.files)
    data = ", ".join(files[:6]) + (f" and {len(files) - 6} more" if len(files) > 6 else "") or "lm-eval's own"
    identity = digest(*sorted(prepared.files.items()))
    known = {"unit": unit, "direction": direction, "protocol": request.protocol, "conditions": conditions}
    return Score(name, value, count, interval, data, identity, described, **known)


def _metrics(prepared: PreparedTask, name: str, results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metrics of a task or group: value, standard error, unit and direction."""
    numbers, directions = results["results"][name], results["higher_is_better"].get(name, {})
    metrics: dict[str, dict[str, Any]] = {}
    for key, value in numbers.items():
        # Besides metrics ("acc,none") there are names, counts and "N/A".
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = numbers.get(f"{metric}_stderr,{filter_name}")
        is_fraction = all(_is_fraction(task, key, results) for task in _tasks_under(prepared, name))
        metrics[metric if filter_name in _UNNAMED else f"{metric} ({filter_name})"] = {
            "value": float(value),
            "stderr": float(error) if isinstance(error, int | float) else None,
            "unit": "fraction" if is_fraction else None,
            "direction": {True: "higher", False: "lower"}.get(directions.get(metric)),
        }
    if METRIC in metrics:
        metrics[METRIC]["unit"] = "bits"
    return metrics


def _is_fraction(task: str, key: str, results: Mapping[str, Any]) -> bool:
    """Return whether the metric is a mean of per-document numbers from 0 to 1."""
    metric, _, filter_name = key.partition(",")
    values = [sample.get(metric) for sample in results["samples"][task] if sample["filter"] == filter_name]
    if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in values):
        return False
    value = results["results"][task].get(key)  # a group's metric may be one that not all of its tasks have
    return value is None or math.isclose(math.fsum(values), value * len(values), abs_tol=1e-6)


def _tasks_under(prepared: PreparedTask, name: str) -> list[str]:
    group = prepared.loaded["groups"].get(name)
    return [name] if group is None else [task.task_name for task in group.get_all_tasks()]


def sample_lines(prepared: PreparedTask, results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every prompt with its answers and verdicts."""
    for task in prepared.loaded["tasks"]:
        for sample in sorted(results["samples"][task], key=lambda sample: (sample["doc_id"], sample["filter"])):
            choices = [arguments[1] for arguments in sample["arguments"] if len(arguments) > 1]
            are_choices = choices and all(isinstance(choice, str) for choice in choices)
            yield {
                "task": task,
                "document": sample["doc_id"],
                "prompt": str(sample["arguments"][0][0]),
                **({"choices": choices} if are_choices else {}),
                "answers": [answer for answers in sample["resps"] for answer in answers],
                "verdicts": list(sample["filtered_resps"]),
                "filter": sample["filter"],
                "target": sample["target"],
                "scores": {metric: sample[metric] for metric in sample["metrics"]},
            }


# Tasks as lm-eval defines them.

DEFINITIONS = Path(lm_eval.tasks.__file__).parent


@cache
def index() -> TaskManager:
    """Build lm-eval's index of 14,000 files, which takes seconds; the benchmarks of `lap` do not need it."""
    return TaskManager()


def read_definition(file: str) -> dict[str, Any]:
    """Read lm-eval's definition in a file below its folder of tasks; its own Python functions are left as names."""
    # Resolved, they would be imported, and humaneval/utils.py downloads and runs a metric at import.
    return load_yaml(DEFINITIONS / file, resolve_func=False)


def task_over(definition: dict[str, Any], splits: Mapping[str, Documents], fewshot_seed: int) -> ConfigurableTask:
    """Return the task over our documents; splits used only for few-shot examples are omitted."""
    changed = {key: value for key, value in definition.items() if key not in ("tag", "dataset_path", "dataset_name")}
    for key in ("training_split", "validation_split", "fewshot_split"):
        if changed.get(key) not in splits:
            changed.pop(key, None)
    # lm-eval passes the task's metadata.
    task = ConfigurableTask(config={**changed, "custom_dataset": lambda **_: splits})
    # Only lm-eval's `simple_evaluate` sets the seed; `evaluate` leaves it to the caller.
    task.set_fewshot_seed(seed=fewshot_seed)
    return task


def other_task(name: str, request: Request) -> PreparedTask:
    """Load a task from lm-eval's index or a file, with documents loaded by the hub's library."""
    try:
        loaded: Any = index().load([name])
    except Exception as error:  # whatever a task's own code, the hub's library or the connection raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"lm-eval could not load {name} ({first[:200]}); check the network, or download its data set elsewhere and "
            "set HF_HUB_OFFLINE=1"
        ) from error
    if any(getattr(task, "UNSAFE_CODE", False) for task in loaded["tasks"].values()):
        raise UsageError(f"{name} runs generated code in lm-eval's own process; use humaneval, which has a sandbox")
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=request.seed)
    return PreparedTask(name, dict(loaded))
