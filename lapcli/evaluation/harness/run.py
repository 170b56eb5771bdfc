"""Evaluates a language model's run: the tasks one after the other through lm-eval, each saved as it ends."""

import json
import logging
import sys
from collections.abc import Iterator
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
from lapcli.evaluation.harness.adapter import LapLM
from lapcli.evaluation.harness.crew import Crew
from lapcli.evaluation.harness.journal import Journal
from lapcli.evaluation.harness.plans import Plan, Planner
from lapcli.evaluation.harness.record import average, prompts_of, sample_lines, scores_of, table
from lapcli.evaluation.harness.settings import REASON, Settings, read_settings
from lapcli.evaluation.harness.worker import Worker
from lapcli.evaluation.tasks import Measured, Request, Score
from lapcli.kinds import LoadedModel
from lapcli.kinds.opening import open_run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_json
from lapcli.runtime.progress import Progress, shown_progress

BATCH = 16  # questions at once

PROTOCOLS = {
    "paper": "chat prompts, zero-shot; ARC and MMLU by the option letters' logits, the others by pass@k",
    "harness": "lm-eval's own prompts and metrics",
}


def evaluate(request: Request) -> Measured:
    settings = read_settings(request.run.recipe.objective, request.options)
    _check_samples_out(request.options.get("samples_out"))
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    loaded = open_run(request.run, request.checkpoint, request.world.device)
    with _progress(request.world.is_main) as progress:
        worker = Worker(*loaded.language_model(), request.batch or BATCH, request.world.rank, progress)
        crew = Crew(request.world, worker.work)
        if not request.world.is_main:
            crew.serve()
            return Measured([], "", "")
        try:
            measured = Evaluation(request, settings, loaded, crew, progress).measure()
        except BaseException as error:
            crew.stop(error)
            raise
        crew.stop()
        return measured


class Evaluation:
    """On rank 0."""

    def __init__(
        self, request: Request, settings: Settings, loaded: LoadedModel, crew: Crew, progress: Progress
    ) -> None:
        self._request, self._settings, self._loaded, self._crew = request, settings, loaded, crew
        self._progress = progress
        self._model, self._tokenizer = loaded.language_model()
        self._dtype = str(self._model.embed.weight.dtype).removeprefix("torch.")
        self._notes: dict[str, str] = {}

    def measure(self) -> Measured:
        request = self._request
        is_unsafe = bool(request.options.get("unsafe_code_execution"))
        planner = Planner(request.run, self._settings, request.data, allow_unsafe=is_unsafe, progress=self._progress)
        plans = [planner.plan(name) for name in request.tasks]  # all data is found before anything is computed
        self._describe(plans)
        samples_out: Path | None = request.options.get("samples_out")
        if samples_out is not None:
            samples_out.write_text("", encoding="utf-8")
        scores: list[Score] = []
        for plan in plans:
            scores += self._task(plan, samples_out)
        files = {file: sha for plan in plans for file, sha in plan.files.items()}
        return Measured(
            scores,
            _list_of(list(files)) or "lm-eval's own",
            digest(*sorted(files.items())),
            self._record(scores),
            table(scores),
            self._notes,
            f"{self._settings.protocol}-{digest(self._settings.to_dict())[:6]}",
        )

    def _describe(self, plans: list[Plan]) -> None:
        settings, notes = self._settings, self._notes
        notes["protocol"] = f"{settings.protocol}: {PROTOCOLS[settings.protocol]}"
        if sampled := next((plan.sampling for plan in plans if plan.sampling), None):
            top_k = "all tokens" if sampled["top_k"] is None else f"the {sampled['top_k']} likeliest"
            notes["sampling"] = (
                f"{sampled['samples']} samples, temperature {sampled['temperature']:g}, among {top_k}, at most "
                f"{sampled['max_new_tokens']} tokens, seed {sampled['seed']}"
            )
            if settings.protocol == "paper":
                notes["sampling"] += f"\n             ({REASON})"
        for plan in plans:
            if plan.judge is not None:
                notes["sandbox"] = str(plan.judge.mode)
            if plan.runs_unsafe_code:
                notes["sandbox"] = f"{plan.name}: unsafe: no sandbox"
        if self._dtype != "float32":
            notes["precision"] = f"{self._dtype}: numbers may change with the batch size and the number of processes"
        for name in ("protocol", "sampling", "sandbox"):
            if name in notes:
                print(f"{name:<12} {notes[name]}", file=sys.stderr)

    def _task(self, plan: Plan, samples_out: Path | None) -> list[Score]:
        request = self._request
        folder = request.run.path / "eval" / f"{plan.name.replace('/', '_')[:60]}-{self._key(plan)[:16]}"
        if request.options.get("fresh"):
            Journal(folder).clear()
        if plan.judge is not None:
            plan.judge.journal = folder
        model = self._model
        lm = LapLM(
            self._tokenizer,
            model.config.context,
            self._crew,
            task=plan.name,
            seed=self._settings.seed,
            journal=folder,
        )
        with _swift_lm_eval():
            results: Any = evaluator.evaluate(
                lm=lm,
                task_dict=plan.loaded,
                limit=request.limit,
                apply_chat_template=plan.is_chat,
                confirm_run_unsafe_code=plan.runs_unsafe_code,
            )
        if lm.resumed:
            print(f"{plan.name}: {lm.resumed:,} answers were there already (--fresh asks again)", file=sys.stderr)
        if lm.truncated:
            print(f"{plan.name}: {lm.truncated:,} prompts beyond the context lost their beginning", file=sys.stderr)
        scores = scores_of(plan, results, self._details(plan, lm))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "result.json", {**self._record(scores), "tasks": [score.to_dict() for score in scores]})
        for prompt in prompts_of(plan, results, request.options.get("show_prompt") or 0):
            print(f"--- {plan.name}\n{prompt}\n---", file=sys.stderr)
        if samples_out is not None:
            with samples_out.open("a", encoding="utf-8") as file:
                for line in sample_lines(plan, results):
                    file.write(json.dumps(line, default=str) + "\n")
        return scores

    def _details(self, plan: Plan, lm: LapLM) -> dict[str, Any]:
        return {
            "protocol": self._settings.protocol,
            "sampling": plan.sampling,
            "files": plan.files,
            "prompts_cut": lm.truncated,
            "prompts_beyond_context": lm.beyond_context,
            "code_execution": str(plan.judge.mode) if plan.judge else "unsafe" if plan.runs_unsafe_code else None,
            "limit": self._request.limit,
        }

    def _record(self, scores: list[Score]) -> dict[str, Any]:
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

    def _key(self, plan: Plan) -> str:
        """Of all that answers and verdicts of a task depend on, but for the prompts, which each line has."""
        versions = {name: task.VERSION for name, task in plan.loaded["tasks"].items()}
        return digest(
            self._loaded.weights_sha256,
            self._tokenizer.sha256,
            self._dtype,
            plan.name,
            self._settings.protocol,
            self._settings.to_dict(),
            versions,
            sorted(plan.files.values()),
            version("lm-eval"),
        )


def _check_samples_out(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"--samples-out {path}: there is no folder {path.parent}; make it first")


def _list_of(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


@contextmanager
def _progress(is_shown: bool) -> Iterator[Progress]:
    if is_shown:
        with shown_progress() as progress:
            yield progress
    else:
        yield lambda doing, done, total: None


@contextmanager
def _swift_lm_eval() -> Iterator[None]:
    """Compiles a prompt's template once, not once a document (MMLU: half a minute); draws no bar into ours."""
    task: Any = lm_eval.api.task
    templates: Any = lm_eval.utils.env
    bar = task.tqdm
    task.tqdm = partial(bar, disable=True)
    templates.from_string = cache(templates.from_string)  # of the instance, before the class's own
    try:
        yield
    finally:
        task.tqdm = bar
        del templates.from_string
