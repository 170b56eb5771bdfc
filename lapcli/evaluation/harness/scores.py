"""Results of lm-eval as scores with their standard errors, the table with its average, and every sample as a line."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lapcli.evaluation.benchmarks import PAPER_TASKS
from lapcli.evaluation.benchmarks.benchmark import PreparedTask
from lapcli.evaluation.benchmarks.bits_per_byte import METRIC, standard_error
from lapcli.evaluation.tasks import TaskScore, wilson_interval
from lapcli.runtime.tables import fitted, wrapped

_UNNAMED = ("none", "verdicts", "create_test")  # filters that need no mention


def scores_of(prepared: PreparedTask, results: Mapping[str, Any], details: Mapping[str, Any]) -> list[TaskScore]:
    return [_score(prepared, head, results, details) for head in prepared.heads]


def _score(prepared: PreparedTask, head: str, results: Mapping[str, Any], details: Mapping[str, Any]) -> TaskScore:
    numbers = results["results"][head]
    metrics: dict[str, dict[str, float | None]] = {}
    for key, value in numbers.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = numbers.get(f"{metric}_stderr,{filter_name}")
        shown = metric if filter_name in _UNNAMED else f"{metric} ({filter_name})"
        metrics[shown] = {"value": float(value), "stderr": float(error) if isinstance(error, int | float) else None}
    if METRIC in metrics:
        pairs = [sample[METRIC] for sample in results["samples"][head]]
        metrics[METRIC]["stderr"] = standard_error(pairs)
    first = max(metrics, key=_pass_size) if any(name.startswith("pass@") for name in metrics) else next(iter(metrics))
    value, error = metrics[first]["value"], metrics[first]["stderr"]
    assert value is not None
    tasks = _tasks_under(prepared, head)
    count = sum(results["n-samples"][task]["effective"] for task in tasks)
    if 0 <= value <= 1 and first != METRIC:
        interval = wilson_interval(value * count, count)
    else:
        interval = (value - 1.96 * (error or 0.0), value + 1.96 * (error or 0.0))
    own = {
        "metric": first,
        "stderr": error,
        "metrics": metrics,
        "of": sum(results["n-samples"][task]["original"] for task in tasks),
        "version": results["versions"].get(head),
        "num_fewshot": results["n-shot"].get(tasks[0], 0),
        "prompt_sha256": prompt_sha256(results["samples"][task] for task in tasks),
    }
    if len(tasks) > 1:
        own["subtasks"] = {task: {k: v for k, v in results["results"][task].items() if "," in k} for task in tasks}
    return TaskScore(head, value, count, interval, {**own, **details})


def _pass_size(name: str) -> int:
    return int(name.removeprefix("pass@")) if name.startswith("pass@") else -1


def _tasks_under(prepared: PreparedTask, head: str) -> list[str]:
    group = prepared.loaded["groups"].get(head)
    return [head] if group is None else [task.task_name for task in group.get_all_tasks()]


def prompt_sha256(samples: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """A hash of all that the model was asked, in the order of the documents."""
    digest = hashlib.sha256()
    for task in samples:
        for sample in sorted(_once(task), key=lambda sample: sample["doc_id"]):
            digest.update(json.dumps([list(map(str, arguments)) for arguments in sample["arguments"]]).encode())
    return digest.hexdigest()


def _once(samples: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """A sample is logged for each filter."""
    first = samples[0]["filter"] if samples else None
    return (sample for sample in samples if sample["filter"] == first)


def prompts_of(prepared: PreparedTask, results: Mapping[str, Any], count: int) -> list[str]:
    """What the model saw for the first documents, special tokens visible."""
    samples = [sample for task in prepared.loaded["tasks"] for sample in _once(results["samples"][task])]
    return [str(sample["arguments"][0][0]) for sample in samples[:count]]


def sample_lines(prepared: PreparedTask, results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every prompt with its answers and verdicts."""
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


def average(scores: Sequence[TaskScore]) -> tuple[float, float | None, bool] | None:
    """The plain mean over the paper's tasks, its standard error, and whether all five of its table are there."""
    counted = [score for score in scores if score.task in PAPER_TASKS]
    if len(counted) < 2:
        return None
    errors = [score.details["stderr"] for score in counted]
    known = None if None in errors else math.sqrt(sum(error**2 for error in errors)) / len(errors)
    return sum(score.value for score in counted) / len(counted), known, len(counted) == len(PAPER_TASKS)


def table(scores: Sequence[TaskScore]) -> list[str]:
    rows = [["task", "metric", "value", "stderr", "documents"]]
    for score in scores:
        for number, (metric, numbers) in enumerate(score.details["metrics"].items()):
            name, count = (score.task, f"{score.count:,}") if number == 0 else ("", "")
            shown = f"{numbers['value']:.4f}" if metric == METRIC else f"{numbers['value']:.2%}"
            error = numbers["stderr"]
            error_shown = "-" if error is None else f"{error:.4f}" if metric == METRIC else f"{error:.2%}"
            rows.append([name, metric, shown, error_shown, count])
    notes = []
    if mean := average(scores):
        value, error, is_papers = mean
        tasks = [score for score in scores if score.task in PAPER_TASKS]
        metrics = ", ".join(dict.fromkeys(score.details["metric"] for score in tasks))
        rows.append(["average", metrics, f"{value:.2%}", "-" if error is None else f"{error:.2%}", ""])
        if not is_papers:
            missing = [name for name in PAPER_TASKS if name not in {score.task for score in tasks}]
            notes = wrapped(f"(the paper's average also has {', '.join(missing)})")
    return [*fitted(rows, right=(2, 3, 4)), *notes]
