"""lm-eval's own tasks. The paper's benchmarks are read from its definitions one by one, over our documents; any other
name is looked up in its index, which takes it seconds to build."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.group import GroupConfig
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from lapcli.evaluation.harness.answers import pass_at
from lapcli.evaluation.harness.documents import Document, Documents
from lapcli.evaluation.harness.files import unreachable
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError, UsageError

DEFINITIONS = Path(lm_eval.tasks.__file__).parent
FILES = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "humaneval": "humaneval/humaneval.yaml",
}
SPLITS = {  # what the definitions ask for
    "arc_easy": ("test",),
    "arc_challenge": ("test",),
    "mmlu": ("test", "dev"),
    "gsm8k": ("test", "train"),
    "humaneval": ("test",),
}

Loaded = dict[str, Any]  # as `evaluate` takes it: tasks, groups, group_map


def stock_task(name: str, splits: dict[str, Documents], judge: Callable[..., Any] | None) -> Loaded:
    """One of the paper's benchmarks as lm-eval defines it."""
    if name == "mmlu":
        return _mmlu(splits)
    definition = load_yaml(DEFINITIONS / FILES[name], resolve_func=False)
    if judge is not None:
        definition = _with_our_sandbox(definition, judge)
    task = ConfigurableTask(config=_over(definition, splits))
    return {"tasks": {name: task}, "groups": {}, "group_map": {}}


def other_task(name: str, allow_unsafe: bool) -> Loaded:
    """By lm-eval's index, its documents by the hub's library."""
    print(f"looking for {name} among lm-eval's tasks", file=sys.stderr)
    if allow_unsafe:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # read by the metric's own code, when the task is loaded
    manager = _index()
    if name not in manager.all_tasks and not Path(name).is_file():
        raise UsageError(
            f"--tasks: {name[:60]!r} is neither a task of `lap` nor one of lm-eval's; `lm-eval ls tasks` lists those"
        )
    with _offline_if_there_is_no_hub():
        try:
            loaded: Any = manager.load([name])
        except Exception as error:  # whatever a task's own code, the hub's library or the connection raise
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"lm-eval could not load {name} ({first[:200]}); check the network, or download its data set elsewhere"
            ) from error
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False) and not allow_unsafe:
            raise UsageError(
                f"{name} runs generated code in lm-eval's own process; add --unsafe-code-execution to accept that, or "
                "use humaneval, which runs in a sandbox"
            )
    return dict(loaded)


@cache
def _index() -> TaskManager:
    """Of thousands of files, which takes seconds; not paid for the tasks of `lap`."""
    return TaskManager()


def _over(definition: dict[str, Any], splits: dict[str, Documents]) -> dict[str, Any]:
    """The definition with our documents; splits that it would only draw few-shot examples from are left out."""

    def load(**_: Any) -> dict[str, Documents]:
        return splits

    changed = {key: value for key, value in definition.items() if key not in ("tag", "dataset_path", "dataset_name")}
    for key in ("training_split", "validation_split", "fewshot_split"):
        if changed.get(key) not in splits:
            changed.pop(key, None)
    return {**changed, "custom_dataset": load}


def _mmlu(splits: dict[str, Documents]) -> Loaded:
    """57 subjects in four groups, each group and the whole weighted by size."""
    folder = DEFINITIONS / "mmlu" / "default"
    top = load_yaml(folder / "_mmlu.yaml")
    groups = {name: load_yaml(folder / f"_{name}.yaml") for name in top["task"]}
    whole = Group.from_config(GroupConfig(**top))
    parts = {name: Group.from_config(GroupConfig(**definition)) for name, definition in groups.items()}
    by_tag = {definition["task"][0]: parts[name] for name, definition in groups.items()}
    by_subject = {split: documents.by("subject") for split, documents in splits.items()}
    tasks: dict[str, Any] = {}
    seen: set[str] = set()
    for path in sorted(folder.glob("mmlu_*.yaml")):
        definition = load_yaml(path)
        subject = definition["dataset_name"]
        mine = {split: by_subject[split][subject] for split in splits if subject in by_subject[split]}
        if "test" not in mine:
            continue
        task = ConfigurableTask(config=_over(definition, mine))
        tasks[definition["task"]] = task
        by_tag[definition["tag"]].add(task)
        seen.add(subject)
    unknown = by_subject["test"].keys() - seen
    if unknown:
        raise DataError(f"mmlu: lm-eval knows no subject {min(unknown)[:60]!r}; use --protocol paper, or check --data")
    for part in parts.values():
        if len(part):
            whole.add(part)
    used = {whole.name: whole, **{name: part for name, part in parts.items() if len(part)}}
    return {"tasks": tasks, "groups": used, "group_map": {name: group.child_names for name, group in used.items()}}


def _with_our_sandbox(definition: dict[str, Any], judge: Callable[..., Any]) -> dict[str, Any]:
    """HumanEval's prompt, stops and lengths are lm-eval's; its way of running code in its own process is not."""

    def results(document: Document, verdicts: Sequence[Sequence[Any]]) -> dict[str, float]:
        return {"pass@1": pass_at(1, [verdict["passed"] for verdict in verdicts[0]])}

    return {
        **{key: value for key, value in definition.items() if key != "unsafe_code"},
        "filter_list": [{"name": "create_test", "filter": [{"function": "custom", "filter_fn": judge}]}],
        "process_results": results,
        "metric_list": [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}],
    }


def program_of(document: Document, answer: str) -> str:
    return str(document["prompt"]) + answer


@contextmanager
def _offline_if_there_is_no_hub() -> Iterator[None]:
    """Else its library tries for half a minute before it looks at what is on this machine."""
    import datasets
    import huggingface_hub.constants

    if hub_is_offline() or unreachable() is None:
        yield
        return
    places = [(datasets.config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
