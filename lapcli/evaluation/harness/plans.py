"""From a task's name to what lm-eval evaluates: the definition, its documents, and how prompts are made."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval.api.task import ConfigurableTask

from lapcli.evaluation.harness import paper_tasks, stock_tasks
from lapcli.evaluation.harness.code import CodeJudge
from lapcli.evaluation.harness.documents import Documents, load_documents, spelling_documents
from lapcli.evaluation.harness.files import BENCHMARKS
from lapcli.evaluation.harness.settings import Settings
from lapcli.evaluation.harness.text_task import text_documents, text_task
from lapcli.runs import Run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress
from lapcli.sandbox import choose_mode


@dataclass
class Plan:
    name: str
    loaded: dict[str, Any]  # tasks and groups, as lm-eval's `evaluate` takes them
    is_chat: bool  # prompts are conversations
    files: dict[str, str] = field(default_factory=dict)  # sha256 of the data, by file
    judge: CodeJudge | None = None
    sampling: dict[str, Any] | None = None  # of our own; lm-eval's tasks say theirs in their configuration
    runs_unsafe_code: bool = False

    @property
    def heads(self) -> list[str]:
        """What gets a line of the table: groups that are nobody's part, else every task."""
        groups = self.loaded["groups"]
        inner = {child for group in groups.values() for child in group.child_names}
        tops = [name for name in groups if name not in inner]
        alone = [name for name in self.loaded["tasks"] if name not in inner]
        return [*tops, *alone]


class Planner:
    def __init__(
        self, run: Run, settings: Settings, data: Path | None, *, allow_unsafe: bool, progress: Progress
    ) -> None:
        self._run, self._settings, self._data = run, settings, data
        self._allow_unsafe, self._progress = allow_unsafe, progress

    def plan(self, name: str) -> Plan:
        if name == "bpb":
            documents = text_documents(self._run, self._data)
            return self._own(text_task(name, documents), documents, is_chat=False)
        if name == "spelling":
            return self._spelling()
        if name not in BENCHMARKS:
            return self._other(name)
        return self._paper(name) if self._settings.protocol == "paper" else self._stock(name)

    def _paper(self, name: str) -> Plan:
        documents = load_documents(name, "test", self._data)
        settings = self._settings
        if name in ("arc_easy", "arc_challenge", "mmlu"):
            return self._own(paper_tasks.letters_task(name, documents), documents)
        if name == "gsm8k":
            return self._own(paper_tasks.number_task(name, documents, settings), documents, sampling=settings.to_dict())
        judge = self._judge(paper_tasks.program_of)
        task = paper_tasks.code_task(name, documents, settings, judge.__call__)
        return self._own(task, documents, sampling=settings.to_dict(), judge=judge)

    def _spelling(self) -> Plan:
        if self._run.recipe.objective != "chat":
            raise UsageError("spelling is asked in chat form, which this run has not learned; use the run of `lap sft`")
        settings = self._settings
        if settings.protocol == "harness":  # which has no such task: the likeliest answer
            settings = Settings("paper", samples=1, temperature=0.0, top_k=None, seed=settings.seed)
        documents = spelling_documents()
        task = paper_tasks.number_task("spelling", documents, settings)
        return self._own(task, documents, sampling=settings.to_dict())

    def _stock(self, name: str) -> Plan:
        splits = {split: load_documents(name, split, self._data) for split in stock_tasks.SPLITS[name]}
        files = {file: sha for documents in splits.values() for file, sha in documents.files.items()}
        judge = self._judge(stock_tasks.program_of) if name == "humaneval" else None
        loaded = stock_tasks.stock_task(name, splits, judge.__call__ if judge else None)
        return self._seeded(Plan(name, loaded, False, files, judge))

    def _other(self, name: str) -> Plan:
        if self._settings.protocol != "harness":
            raise UsageError(
                f"--tasks: {name[:60]!r} is none of the paper's tasks ({', '.join(BENCHMARKS)}, spelling, bpb); "
                "lm-eval's other tasks need --protocol harness"
            )
        if self._data is not None:
            raise UsageError(f"--data is not for {name}, whose files lm-eval finds itself; call it without")
        loaded = stock_tasks.other_task(name, self._allow_unsafe)
        unsafe = any(getattr(task, "UNSAFE_CODE", False) for task in loaded["tasks"].values())
        return self._seeded(Plan(name, loaded, False, runs_unsafe_code=unsafe))

    def _judge(self, program_of: Any) -> CodeJudge:
        return CodeJudge(choose_mode(self._allow_unsafe), program_of, self._progress)

    def _own(
        self,
        definition: dict[str, Any],
        documents: Documents,
        *,
        is_chat: bool = True,
        sampling: dict[str, Any] | None = None,
        judge: CodeJudge | None = None,
    ) -> Plan:
        name = definition["task"]
        loaded = {"tasks": {name: ConfigurableTask(config=definition)}, "groups": {}, "group_map": {}}
        return Plan(name, loaded, is_chat, documents.files, judge, sampling)

    def _seeded(self, plan: Plan) -> Plan:
        for task in plan.loaded["tasks"].values():
            task.set_fewshot_seed(seed=self._settings.seed)
        return plan
