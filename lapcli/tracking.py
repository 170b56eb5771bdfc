"""Metrics in TensorBoard, Weights & Biases or trackio: while a run is trained, or from its `metrics.jsonl` afterwards.

`metrics.jsonl` is the source of truth; a tracker may fail, and `lap runs track` replays the run into it. A resumed run
computes the steps after its checkpoint again, with the same values: TensorBoard replaces them, W&B's server ignores
known steps. The packages of trackers are extras, imported on use.
"""

import contextlib
import hashlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from lapcli.recipe import recipe_to_dict, recipe_to_yaml
from lapcli.runs import Run, read_run
from lapcli.runtime.environment import is_main_process, require_extra
from lapcli.runtime.errors import LapError
from lapcli.runtime.files import read_json
from lapcli.training import metrics

SECONDS_TO_FINISH = 9.0  # after the training, for all trackers together
_MOST_WAITING = 100_000  # lines that a slow tracker may lag behind


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `runs/NAME/tensorboard/`; `tensorboard --logdir runs` shows all runs."""

    def __init__(self, run: Run, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers drop entries of earlier sessions from `purge_step` on.
        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=first_step, flush_secs=5)
        # The text panel renders Markdown; a fence keeps the indentation of YAML.
        self._writer.add_text("recipe", f"```\n{recipe_to_yaml(run.recipe)}\n```", first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class HostedRun:
    """A run in W&B, identified by its id, or in trackio's local store, identified by its name; WANDB_PROJECT,
    WANDB_MODE and TRACKIO_DIR count."""

    def __init__(self, package: str, run: Run) -> None:
        known = {"config": recipe_to_dict(run.recipe), "resume": "allow"}
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for our own output
            self._run = _wandb(run, known) if package == "wandb" else _trackio(run, known)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def _wandb(run: Run, known: dict[str, Any]) -> Any:
    # Only the run's own numbers leave the machine: no error reports, no source code, no git remote.
    for variable in ("WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE", "WANDB_SILENT"):
        os.environ.setdefault(variable, "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    folder = run.path / "track"
    folder.mkdir(exist_ok=True)
    quiet = wandb.Settings(x_disable_stats=True, x_disable_meta=True, x_save_requirements=False, console="off")
    project = os.environ.get("WANDB_PROJECT") or "lap"
    # The stages of `lap sft` are several runs of one process.
    known |= {"dir": str(folder), "reinit": "create_new", "settings": quiet}
    return wandb.init(project=project, id=run_id(run), name=run.name, **known)


def _trackio(run: Run, known: dict[str, Any]) -> Any:
    for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "TRACKIO_BUCKET_ID"):
        os.environ.pop(variable, None)
    import trackio

    # A part of our id distinguishes runs with the same name.
    name = f"{run.name}-{run_id(run)[:8]}"
    return trackio.init(project="lap", name=name, embed=False, auto_log_gpu=False, auto_log_cpu=False, **known)


def open_tracker(name: str, run: Run, first_step: int) -> Tracker:
    """Open a tracker for the steps from `first_step` on; TensorBoard replaces existing entries of these steps."""
    return TensorBoard(run, first_step) if name == "tensorboard" else HostedRun(name, run)


class _Background:
    """A tracker in a separate thread, so that none of its calls delays a step; dropped with a warning if it fails."""

    def __init__(self, name: str, folder: Path, first_step: int, warn: Callable[[str], None]) -> None:
        self._name, self._folder, self._warn = name, folder, warn
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, args=(first_step,), name=name, daemon=True)
        self._is_dropped = False
        self._thread.start()

    def put(self, line: tuple[int, Mapping[str, float]] | None) -> None:
        """Queue the numbers of a step; None closes the tracker after the queued ones."""
        try:
            if not self._is_dropped:
                self._waiting.put_nowait(line)
        except queue.Full:
            self._drop("it is too slow")

    def wait(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._drop("it did not receive everything in time")

    def _work(self, first_step: int) -> None:
        try:
            tracker = open_tracker(self._name, read_run(self._folder), first_step)
            while (line := self._waiting.get()) is not None:
                tracker.log(*line)
            tracker.close()
        except Exception as error:
            self._drop(_first_line(error))

    def _drop(self, reason: str) -> None:
        if not self._is_dropped:
            self._is_dropped = True
            self._warn(
                f"{self._name} does not have all of {self._folder.name} ({reason}); send it with "
                f"lap runs track {self._folder} --to {self._name}"
            )


class LiveTracking:
    """A context in which rank 0 sends each line that it adds to a run's metrics to the trackers."""

    def __init__(self, names: Sequence[str], warn: Callable[[str], None]) -> None:
        self._names = list(dict.fromkeys(names)) if is_main_process() else []
        self._warn = warn
        self._trackers: dict[Path, list[_Background]] = {}

    def __enter__(self) -> Self:
        metrics.listeners.append(self._send)
        return self

    def __exit__(self, *error: object) -> None:
        metrics.listeners.remove(self._send)
        deadline = time.monotonic() + SECONDS_TO_FINISH
        for tracker in self._end():
            tracker.wait(deadline - time.monotonic())

    def _end(self) -> list[_Background]:
        every = [tracker for trackers in self._trackers.values() for tracker in trackers]
        for tracker in every:
            tracker.put(None)
        return every

    def _send(self, file: Path, line: Mapping[str, Any]) -> None:
        folder, step = file.parent, line["step"]
        if folder not in self._trackers:
            self._end()  # a stage of `lap sft` begins when the one before has finished
            # A resumed run may begin with a missed validation of a step whose loss has already been sent.
            first = step if step == 0 or "loss" in line else step + 1
            self._trackers[folder] = [_Background(name, folder, first, self._warn) for name in self._names]
        for tracker in self._trackers[folder]:
            tracker.put((step, tagged(line)))


def replay(run: Run, name: str) -> int:
    """Send the metrics and evaluations of a run to a tracker; return the number of steps."""
    require_extra(name, name)
    steps: dict[int, dict[str, float]] = {}
    for line in metrics.read_metrics(run.metrics):
        steps.setdefault(line["step"], {}).update(tagged(line))
    for file in sorted((run.path / "eval").glob("*.json")):
        record = read_json(file, "remove it and measure again")
        scores = {f"eval/{task}": float(score["value"]) for task, score in record["tasks"].items()}
        steps.setdefault(int(record.get("step") or run.info.get("step") or 0), {}).update(scores)
    try:
        tracker = open_tracker(name, run, 0)
        for step in sorted(steps):  # W&B accepts no earlier step
            tracker.log(step, steps[step])
        tracker.close()
    except Exception as error:  # a tracker's library may raise anything
        hint = "; log in with `wandb login`, or set WANDB_MODE=offline" if name == "wandb" else ""
        raise LapError(f"{run.name} was not sent to {name} ({_first_line(error)}){hint}") from None
    return len(steps)


def tagged(line: Mapping[str, Any]) -> dict[str, float]:
    """Return a line's numbers by their names in trackers, such as `train/loss`: each group becomes a panel."""
    numbers = {}
    for name, value in line.items():
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            panel = "validation" if name.startswith("validation_") else "time" if name[:7] == "seconds" else "train"
            numbers[f"{panel}/{name.removeprefix('validation_')}"] = float(value)
    return numbers


def run_id(run: Run) -> str:
    """Return an id made from recipe, seed and time of creation, which a renamed run keeps."""
    # W&B never reuses a deleted id, so a retrained run needs a new id: it depends on `created`.
    text = f"{run.info.get('recipe_sha256')} {run.info.get('seed')} {run.info.get('created')}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
