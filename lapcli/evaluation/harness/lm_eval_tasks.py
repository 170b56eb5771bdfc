"""Tasks as lm-eval loads them: its definitions of our benchmarks one by one, over our documents, and any other task of
its by name or file."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from lapcli.evaluation.benchmarks.benchmark import Documents, PreparedTask
from lapcli.evaluation.tasks import Request
from lapcli.runtime.errors import DataError, UsageError

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
