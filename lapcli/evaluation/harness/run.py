"""Evaluates a language model's run: the tasks one after the other through lm-eval, each saved as it ends.

The second half turns lm-eval's results into scores with standard errors, the table with its average, and one line for
every sample.
"""

import hashlib
import json
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.api.task
import lm_eval.utils
import torch
from lm_eval import evaluator

from lapcli.data.cache import digest
from lapcli.evaluation.benchmarks import BENCHMARKS, PAPER_TASKS
from lapcli.evaluation.benchmarks.benchmark import BenchmarkRequest, BenchmarkSettings, PreparedTask, prompt_form
from lapcli.evaluation.benchmarks.bits_per_byte import METRIC, standard_error
from lapcli.evaluation.harness.adapter import LapLM
from lapcli.evaluation.harness.journal import Journal
from lapcli.evaluation.harness.lm_eval_tasks import other_task
from lapcli.evaluation.harness.workers import Worker, Workers
from lapcli.evaluation.tasks import EvaluationRequest, TaskResults, TaskScore, wilson_interval
from lapcli.runtime.errors import LapError
from lapcli.runtime.files import append, write_json, write_text
from lapcli.runtime.progress import Progress, shown_progress
from lapcli.runtime.tables import fitted, wrapped

BATCH = 16  # questions in one forward
_SAMPLING_REASON = (
    "the paper gives neither temperature nor top-k nor length; the defaults 1.0 and 50 are nanochat's own for pass@k, "
    "512 tokens its evaluation's; at temperature 0 ten samples would be ten copies"
)

PROTOCOLS = {
    "paper": "chat prompts, zero-shot; ARC and MMLU by the option letters' logits, the others by pass@k",
    "harness": "lm-eval's own prompts and metrics",
}


def evaluate(request: EvaluationRequest, settings: BenchmarkSettings) -> TaskResults:
    """Return the scores on rank 0; the other processes compute the jobs that it hands out."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with shown_progress(request.world.is_main) as progress:
        worker = Worker(*request.loaded.language_model(), request.batch or BATCH, request.world.rank, progress)
        workers = Workers(request.world, worker.work)
        if not request.world.is_main:
            workers.serve()
            return TaskResults([], "", "")
        try:
            measured = BenchmarkEvaluation(request, settings, workers, progress).measure()
        except BaseException as error:
            # Ctrl-C too: the other ranks wait in a collective until they are told to stop.
            workers.stop(error)
            raise
        workers.stop()
        return measured


class BenchmarkEvaluation:
    """The tasks of one evaluation. Only rank 0 has one; the other processes answer its questions."""

    def __init__(
        self, request: EvaluationRequest, settings: BenchmarkSettings, workers: Workers, progress: Progress
    ) -> None:
        assert request.run is not None
        self._request, self._settings, self._workers, self._progress = request, settings, workers, progress
        self._run, self._loaded = request.run, request.loaded
        self._model, self._tokenizer = request.loaded.language_model()
        self._dtype = str(self._model.embed.weight.dtype).removeprefix("torch.")
        self._notes: dict[str, str] = {}

    def measure(self) -> TaskResults:
        request = self._request
        tasks = [self._prepare(name) for name in request.tasks]  # all first: missing data fails before any computation
        self._describe(tasks)
        samples_out: Path | None = request.options.get("samples_out")
        if samples_out is not None:
            write_text(samples_out, "")  # emptied once; each task appends its samples
        scores: list[TaskScore] = []
        for prepared in tasks:
            scores += self._task(prepared, samples_out)
        files = {file: sha for prepared in tasks for file, sha in prepared.files.items()}
        return TaskResults(
            scores,
            _list_of(list(files)) or "lm-eval's own",
            digest(*sorted(files.items())),
            self._record(scores),
            table(scores),
            self._notes,
            f"{self._settings.protocol}-{digest(self._settings.to_dict())[:6]}",
        )

    def _prepare(self, name: str) -> PreparedTask:
        settings = self._settings
        allow_unsafe = bool(self._request.options.get("unsafe_code_execution"))
        if name not in BENCHMARKS:
            return other_task(name, allow_unsafe, settings.seed)
        benchmark = BENCHMARKS[name]
        request = BenchmarkRequest(self._run, settings, self._request.data, allow_unsafe, self._progress)
        return benchmark.paper_task(request) if settings.protocol == "paper" else benchmark.lm_eval_task(request)

    def _describe(self, tasks: list[PreparedTask]) -> None:
        settings, notes = self._settings, self._notes
        notes["protocol"] = f"{settings.protocol}: {PROTOCOLS[settings.protocol]}"
        if sampled := next((prepared.sampling for prepared in tasks if prepared.sampling), None):
            top_k = "all tokens" if sampled["top_k"] is None else f"the {sampled['top_k']} likeliest"
            notes["sampling"] = (
                f"{sampled['samples']} samples, temperature {sampled['temperature']:g}, among {top_k}, at most "
                f"{sampled['max_new_tokens']} tokens, seed {sampled['seed']}"
            )
            if settings.protocol == "paper":
                notes["sampling"] += f"\n             ({_SAMPLING_REASON})"
        for prepared in tasks:
            if prepared.judge is not None:
                notes["sandbox"] = str(prepared.judge.mode)
            if prepared.runs_unsafe_code:
                notes["sandbox"] = f"{prepared.name}: unsafe: no sandbox"
        if self._dtype != "float32":
            notes["precision"] = f"{self._dtype}: numbers may change with the batch size and the number of processes"
        for name in ("protocol", "sampling", "sandbox"):
            if name in notes:
                print(f"{name:<12} {notes[name]}", file=sys.stderr)

    def _task(self, prepared: PreparedTask, samples_out: Path | None) -> list[TaskScore]:
        request = self._request
        folder = self._run.path / "eval" / f"{prepared.name.replace('/', '_')[:60]}-{self._key(prepared)[:16]}"
        if request.options.get("fresh"):
            Journal(folder).clear()
        if prepared.judge is not None:
            prepared.judge.journal = folder
        model = self._model
        lm = LapLM(
            self._tokenizer,
            model.config.context,
            self._workers,
            task=prepared.name,
            seed=self._settings.seed,
            journal=folder,
        )
        with _swift_lm_eval():
            # `simple_evaluate` would reseed all generators. One task a call: lm-eval asks all before it scores any.
            results: Any = evaluator.evaluate(
                lm=lm,
                task_dict=prepared.loaded,
                limit=request.limit,
                apply_chat_template=prepared.is_chat,
                confirm_run_unsafe_code=prepared.runs_unsafe_code,
            )
        if lm.resumed:
            print(f"{prepared.name}: {lm.resumed:,} saved answers are reused (--fresh asks again)", file=sys.stderr)
        if lm.truncated:
            print(f"{prepared.name}: {lm.truncated:,} prompts lost their start to fit the context", file=sys.stderr)
        scores = scores_of(prepared, results, self._details(prepared, lm))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "result.json", {**self._record(scores), "tasks": [score.to_dict() for score in scores]})
        for prompt in prompts_of(prepared, results, request.options.get("show_prompt") or 0):
            print(f"--- {prepared.name}\n{prompt}\n---", file=sys.stderr)
        if samples_out is not None:
            for line in sample_lines(prepared, results):
                append(samples_out, (json.dumps(line, default=str) + "\n").encode())
        return scores

    def _details(self, prepared: PreparedTask, lm: LapLM) -> dict[str, Any]:
        unsafe = "unsafe" if prepared.runs_unsafe_code else None
        return {
            "protocol": self._settings.protocol,
            **({"prompt_form": prompt_form(self._run)} if self._settings.protocol == "paper" else {}),
            "sampling": prepared.sampling,
            "files": prepared.files,
            "prompts_cut": lm.truncated,
            "prompts_beyond_context": lm.beyond_context,
            "code_execution": str(prepared.judge.mode) if prepared.judge else unsafe,
            "limit": self._request.limit,
        }

    def _record(self, scores: list[TaskScore]) -> dict[str, Any]:
        mean = average(scores)
        return {
            "protocol": self._settings.protocol,
            "settings": self._settings.to_dict(),
            "dtype": self._dtype,
            "same_for_any_batch_and_world_size": self._dtype == "float32",
            "world_size": self._request.world.size,
            "batch": self._request.batch or BATCH,
            "versions": {"lm_eval": version("lm-eval"), "torch": torch.__version__},
            "tokenizer_sha256": self._tokenizer.sha256,
            "weights_sha256": self._loaded.weights_sha256,
            "average": None if mean is None else {"value": mean[0], "stderr": mean[1], "is_the_papers": mean[2]},
        }

    def _key(self, prepared: PreparedTask) -> str:
        """Hash all that a task's answers and verdicts depend on, except the prompts, which are in each line's key."""
        versions = {name: task.VERSION for name, task in prepared.loaded["tasks"].items()}
        return digest(
            self._loaded.weights_sha256,
            self._tokenizer.sha256,
            self._dtype,
            prepared.name,
            self._settings.protocol,
            self._settings.to_dict(),
            versions,
            sorted(prepared.files.values()),
            version("lm-eval"),
        )


def _list_of(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


@contextmanager
def _swift_lm_eval() -> Iterator[None]:
    """Make lm-eval compile a prompt's template once, not once a document (MMLU: half a minute), and hide its progress
    bar, which would be drawn over ours."""
    task: Any = lm_eval.api.task
    templates: Any = lm_eval.utils.env
    bar = task.tqdm
    task.tqdm = partial(bar, disable=True)
    templates.from_string = cache(templates.from_string)  # on the instance, where it hides the class's method
    try:
        yield
    finally:
        task.tqdm = bar
        del templates.from_string


_UNNAMED = ("none", "verdicts", "create_test")  # filters that are not shown beside a metric


def scores_of(prepared: PreparedTask, results: Mapping[str, Any], details: Mapping[str, Any]) -> list[TaskScore]:
    scores = []
    for head in prepared.heads:
        # A group without aggregate_metric_list has no numbers of its own.
        names = [head] if _metrics(prepared, head, results) else _tasks_under(prepared, head)
        scores += [_score(prepared, name, results, details) for name in names if _metrics(prepared, name, results)]
    if not scores:
        raise LapError(f"lm-eval has no metric with a number for {prepared.name}; choose another task")
    return scores


def _metrics(prepared: PreparedTask, head: str, results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metrics of a task or group: value, standard error, unit and direction."""
    numbers, directions = results["results"][head], results["higher_is_better"].get(head, {})
    metrics: dict[str, dict[str, Any]] = {}
    for key, value in numbers.items():
        # Beside metrics ("acc,none") there are names, counts and "N/A".
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = numbers.get(f"{metric}_stderr,{filter_name}")
        shown = metric if filter_name in _UNNAMED else f"{metric} ({filter_name})"
        metrics[shown] = {
            "value": float(value),
            "stderr": float(error) if isinstance(error, int | float) else None,
            "is_fraction": all(_is_fraction(task, key, results) for task in _tasks_under(prepared, head)),
            "higher_is_better": directions.get(metric),
        }
    if METRIC in metrics:
        pairs = [sample[METRIC] for sample in results["samples"][head]]
        metrics[METRIC]["stderr"] = standard_error(pairs)
    return metrics


def _is_fraction(task: str, key: str, results: Mapping[str, Any]) -> bool:
    """Return whether the metric is a mean of numbers from 0 to 1, one for each document."""
    metric, _, filter_name = key.partition(",")
    values = [sample.get(metric) for sample in results["samples"][task] if sample["filter"] == filter_name]
    if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in values):
        return False
    value = results["results"][task].get(key)  # a group's metric may be one that not all of its tasks have
    return value is None or math.isclose(math.fsum(values), value * len(values), abs_tol=1e-6)


def _score(prepared: PreparedTask, head: str, results: Mapping[str, Any], details: Mapping[str, Any]) -> TaskScore:
    metrics = _metrics(prepared, head, results)
    # The score of a task is pass@k with the largest k, else the first metric that lm-eval lists.
    first = max(metrics, key=_pass_size) if any(name.startswith("pass@") for name in metrics) else next(iter(metrics))
    value, error, is_fraction = (metrics[first][key] for key in ("value", "stderr", "is_fraction"))
    tasks = _tasks_under(prepared, head)
    count = sum(results["n-samples"][task]["effective"] for task in tasks)
    interval = None if error is None else (value - 1.96 * error, value + 1.96 * error)
    if is_fraction:
        interval = wilson_interval(value * count, count)
    described = {
        "metric": first,
        "stderr": error,
        "metrics": metrics,
        "of": sum(results["n-samples"][task]["original"] for task in tasks),
        "version": results["versions"].get(head),
        "num_fewshot": results["n-shot"].get(tasks[0], 0),
        "prompt_sha256": prompt_sha256(results["samples"][task] for task in tasks),
    }
    if len(tasks) > 1:
        described["subtasks"] = {
            task: {k: v for k, v in results["results"][task].items() if "," in k} for task in tasks
        }
    described |= details
    return TaskScore(head, value, count, interval, described, is_fraction, metrics[first]["higher_is_better"])


def _pass_size(name: str) -> int:
    return int(name.removeprefix("pass@")) if name.startswith("pass@") else -1


def _tasks_under(prepared: PreparedTask, head: str) -> list[str]:
    group = prepared.loaded["groups"].get(head)
    return [head] if group is None else [task.task_name for task in group.get_all_tasks()]


def prompt_sha256(samples: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """Hash everything that the model was asked, in the order of the documents."""
    digest = hashlib.sha256()
    for task in samples:
        for sample in sorted(_once(task), key=lambda sample: sample["doc_id"]):
            digest.update(json.dumps([list(map(str, arguments)) for arguments in sample["arguments"]]).encode())
    return digest.hexdigest()


def _once(samples: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield each sample once: lm-eval logs it again for every filter."""
    first = samples[0]["filter"] if samples else None
    return (sample for sample in samples if sample["filter"] == first)


def prompts_of(prepared: PreparedTask, results: Mapping[str, Any], count: int) -> list[str]:
    """Return the prompts of the first documents, with special tokens visible."""
    samples = [sample for task in prepared.loaded["tasks"] for sample in _once(results["samples"][task])]
    return [str(sample["arguments"][0][0]) for sample in samples[:count]]


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


def average(scores: Sequence[TaskScore]) -> tuple[float, float | None, bool] | None:
    """Return the plain mean over the paper's tasks, its standard error, and whether all five tasks of its table were
    measured."""
    counted = [score for score in scores if score.task in PAPER_TASKS]
    if len(counted) < 2:
        return None
    errors = [score.details["stderr"] for score in counted]
    error = None if None in errors else math.sqrt(sum(each**2 for each in errors)) / len(errors)
    return sum(score.value for score in counted) / len(counted), error, len(counted) == len(PAPER_TASKS)


def table(scores: Sequence[TaskScore]) -> list[str]:
    rows = [["task", "metric", "value", "stderr", "documents"]]
    for score in scores:
        for number, (metric, numbers) in enumerate(score.details["metrics"].items()):
            name, count = (score.task, f"{score.count:,}") if number == 0 else ("", "")
            form = ".2%" if numbers["is_fraction"] else ".4f"
            shown = "-" if numbers["stderr"] is None else format(numbers["stderr"], form)
            rows.append([name, metric, format(numbers["value"], form), shown, count])
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
