"""Tasks as lm-eval loads them: its definitions of our benchmarks one by one, over our documents, and any other task of
its by name, looked up in its index, which takes seconds to build."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from lapcli.data.source_files import unreachable
from lapcli.evaluation.benchmarks.benchmark import Documents, PreparedTask
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError, UsageError

DEFINITIONS = Path(lm_eval.tasks.__file__).parent

Loaded = dict[str, Any]  # as `evaluate` takes it: tasks, groups, group_map


def read_definition(file: str) -> dict[str, Any]:
    """Read lm-eval's definition in a file below its folder of tasks; its own Python functions are left as names."""
    # Resolved, they would be imported, and humaneval/utils.py downloads and runs a metric at import.
    return load_yaml(DEFINITIONS / file, resolve_func=False)


def with_documents(definition: dict[str, Any], splits: dict[str, Documents]) -> dict[str, Any]:
    """Return the definition over our documents; splits that it would only draw few-shot examples from are left out."""

    # lm-eval passes the task's metadata.
    def load(**_: Any) -> dict[str, Documents]:
        return splits

    changed = {key: value for key, value in definition.items() if key not in ("tag", "dataset_path", "dataset_name")}
    for key in ("training_split", "validation_split", "fewshot_split"):
        if changed.get(key) not in splits:
            changed.pop(key, None)
    return {**changed, "custom_dataset": load}


def one_task(name: str, definition: dict[str, Any], fewshot_seed: int | None = None) -> Loaded:
    task = ConfigurableTask(config=definition)
    # Only lm-eval's `simple_evaluate` sets the seed; `evaluate` leaves it to the caller.
    if fewshot_seed is not None:
        task.set_fewshot_seed(seed=fewshot_seed)
    return {"tasks": {name: task}, "groups": {}, "group_map": {}}


def other_task(name: str, allow_unsafe: bool, fewshot_seed: int) -> PreparedTask:
    """Load a task of lm-eval's index, with the documents that the hub's library loads."""
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
        task.set_fewshot_seed(seed=fewshot_seed)
    unsafe = any(getattr(task, "UNSAFE_CODE", False) for task in loaded["tasks"].values())
    return PreparedTask(name, dict(loaded), False, runs_unsafe_code=unsafe)


@cache
def _index() -> TaskManager:
    """Build lm-eval's index of thousands of files, which takes seconds; the benchmarks of `lap` do not need it."""
    return TaskManager()


@contextmanager
def _offline_if_there_is_no_hub() -> Iterator[None]:
    """Put the hub's library into offline mode if the hub is unreachable: otherwise it retries for half a minute before
    it looks at what is on this machine."""
    import datasets
    import huggingface_hub.constants

    if hub_is_offline() or unreachable() is None:
        yield
        return
    # In the modules, which have read the environment at import.
    places = [(datasets.config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
