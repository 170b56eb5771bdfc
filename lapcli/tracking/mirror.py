"""Sends a run's files to a tracker: every step once, even after kills and when called again.

`runs/NAME/track/TRACKER.json` records what was sent: the last step, the evaluations, samples and figures, and the
pieces (files or folders) of the tracker's own store that hold them. A session is recorded as open when it begins, and
with what it sent when it is closed. One that is still open when the next begins was killed: its pieces are removed and
sent again.

A resumed run computes the same lines again from its last checkpoint, so that steps that were sent stay valid.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lapcli.recipe import recipe_to_dict, recipe_to_yaml
from lapcli.runs import INFO, METRICS, Run, read_run, read_summary
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import (
    Lock,
    lock_file,
    make_folder,
    open_to_read,
    open_to_write,
    read_bytes,
    read_json,
    write_json,
)
from lapcli.tracking.tracker import FOLDER, Session, Tracker
from lapcli.training.metrics import parse_metrics, read_metrics

_POLL, _NAP = 2.0, 0.25  # seconds between two reads of runs that are followed, and between checks for their end
_GROUPS = ("validation", "smoothing")


@dataclass
class State:
    """What a tracker has received of a run."""

    step: int = -1  # the last that was sent
    items: dict[str, str] = field(default_factory=dict)  # recipe, samples, evaluations, figures: sha256 of each
    pieces: list[str] = field(default_factory=list)
    is_open: bool = False  # a session began and has not been closed


@dataclass
class MirrorCounts:
    """Counts of what one call sent of one run."""

    run: str
    steps: int = 0
    items: int = 0


def mirror(paths: Sequence[Path], tracker: Tracker, *, follow: bool = False) -> list[MirrorCounts]:
    """Send what the tracker does not have of each run; with `follow`, until none of them is being trained."""
    with ExitStack() as stack:
        mirrors = []
        for path in paths:
            stack.enter_context(_only_writer(path, tracker.name))
            mirrors.append(stack.enter_context(_Mirror(path, tracker)))
        while sum(one.look() for one in mirrors) and follow:  # `any` would stop at the first run that is being trained
            _wait([path / INFO for path in paths])
    return [one.sent for one in mirrors]


def _wait(files: Sequence[Path]) -> None:
    """Wait until the next poll, or until a `run.json` changes, for example because the run has finished."""
    before = [_changed_at(file) for file in files]
    deadline = time.monotonic() + _POLL
    while time.monotonic() < deadline and [_changed_at(file) for file in files] == before:
        time.sleep(min(_NAP, _POLL))


def _changed_at(file: Path) -> float | None:
    """Return the time of the last change; None if the run was removed or renamed, which the next look says."""
    try:
        return os.path.getmtime(file)
    except OSError:
        return None


class _Mirror:
    """One run in one tracker. What was sent is recorded on exit."""

    def __init__(self, path: Path, tracker: Tracker) -> None:
        self._path, self._tracker = path, tracker
        self._file = path / FOLDER / f"{tracker.name}.json"
        self._state = _read_state(self._file)
        self._session: Session | None = None
        self._tail = _Tail(path / METRICS)
        self.sent = MirrorCounts(path.name)
        # Nothing is left in a tracker that could only remove the whole run: all of it is sent again.
        if self._state.is_open and not tracker.remove_unrecorded(read_run(path), self._state.pieces):
            self._state = State()

    def __enter__(self) -> Self:
        return self

    def look(self) -> bool:
        """Send what is new; return whether the run is being trained, so that there will be more."""
        run = read_run(self._path)
        is_running = run.status == "running"
        # A run that has ended is read whole and verified; the record of a running one lags behind its file.
        steps = self._tail.steps() if is_running else _by_step(read_metrics(run.metrics))
        lines, items = list(_new_steps(steps, self._state, is_running)), list(_new_items(run, self._state))
        if lines or items:
            session = self._session or self._open(run)
            for step, values in lines:
                session.scalars(step, values)
                self._state.step = step
            for item in items:
                item.send(session)
                self._state.items[item.name] = item.sha256
        self.sent.steps += len(lines)
        self.sent.items += len(items)
        return is_running

    def _open(self, run: Run) -> Session:
        # The state as last recorded, not `self._state`: after a kill it has to say what closed sessions have sent.
        write_json(self._file, {**vars(_read_state(self._file)), "is_open": True})
        self._session = self._tracker.open(run, recipe_to_dict(run.recipe))
        return self._session

    def __exit__(self, *error: object) -> None:
        if self._session is not None:
            # Closed first, recorded last: a kill in between leaves the session open, and its pieces are sent again.
            self._session.close()
            self._state.pieces, self._state.is_open = self._tracker.pieces(read_run(self._path)), False
            write_json(self._file, vars(self._state))


Steps = dict[int, dict[str, float]]


def _by_step(lines: Iterable[Mapping[str, Any]], steps: Steps | None = None) -> Steps:
    """Merge the numbers of each step: a step and its validation are two lines of the file."""
    steps = {} if steps is None else steps
    for line in lines:
        values = {tag(name): float(value) for name, value in line.items() if name != "step" and _is_number(value)}
        steps.setdefault(line["step"], {}).update(values)
    return steps


class _Tail:
    """The metrics of a run that is being trained; each call reads only what was added since the last one."""

    def __init__(self, file: Path) -> None:
        self._file, self._read, self._newest = file, 0, Steps()

    def steps(self) -> Steps:
        """Return the new steps, and the newest one of the last call, which may have been validated since."""
        if not self._file.is_file():
            return {}
        if self._file.stat().st_size < self._read:  # resumed: the file was truncated to the last checkpoint
            self._read, self._newest = 0, {}
        with open_to_read(self._file) as file:
            file.seek(self._read)
            content = file.read()
        whole_lines = content[: content.rfind(b"\n") + 1]  # the last line may be half written
        self._read += len(whole_lines)
        steps = _by_step(parse_metrics(whole_lines), self._newest)
        self._newest = {step: steps[step] for step in sorted(steps)[-1:]}
        return steps


def _new_steps(steps: Steps, state: State, is_running: bool) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the steps after the last one sent. The newest step of a run that is being trained is held back, because
    its validation may still come."""
    newest = max(steps, default=-1)
    for step in sorted(steps):
        if step > state.step and not (is_running and step == newest):
            yield step, steps[step]


def tag(name: str) -> str:
    """Return a metric's name in trackers, such as `train/loss` or `time/seconds`: each group becomes a panel."""
    for group in _GROUPS:
        if name.startswith(f"{group}_"):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return f"time/{name}" if name.startswith("seconds") else f"train/{name}"


@dataclass(frozen=True)
class _Item:
    name: str
    sha256: str
    send: Callable[[Session], None]


def _new_items(run: Run, state: State) -> Iterator[_Item]:
    """Yield the recipe, samples, evaluations and figures that were not sent or have changed since."""
    for item in _items(run):
        if state.items.get(item.name) != item.sha256:
            yield item


def _items(run: Run) -> Iterator[_Item]:
    recipe = recipe_to_yaml(run.recipe)
    yield _Item("recipe", _sha256(recipe.encode()), lambda session: session.text("recipe", recipe, 0))
    step = int(run.info.get("step") or 0)
    if run.is_finished and (samples := read_summary(run).get("samples")):
        text = "\n\n".join(f"{sample.get('prompt')}{sample.get('continuation', '')}" for sample in samples)
        yield _Item("samples", _sha256(text.encode()), lambda session: session.text("samples", text, step))
    for file in sorted((run.path / "eval").glob("*.json")):
        record = read_json(file, "remove it and measure again")
        scores = {
            f"eval/{task}": float(score["value"])
            for task, score in record.get("tasks", {}).items()
            if isinstance(score, dict) and _is_number(score.get("value"))
        }
        at = int(record.get("step") or step)
        name = f"eval/{file.name}"
        # Defaults, because a closure would see the values of the last file by the time it is called.
        yield _Item(name, _sha256(read_bytes(file)), lambda session, at=at, scores=scores: session.scores(at, scores))  # type: ignore[misc]
    for file in sorted((run.path / "analysis").rglob("*.png")):
        name = str(file.relative_to(run.path).with_suffix(""))
        yield _Item(
            name,
            _sha256(read_bytes(file)),
            lambda session, name=name, file=file: session.image(name, file, step),  # type: ignore[misc]
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_state(file: Path) -> State:
    return State(**read_json(file, "remove it to send everything again")) if file.is_file() else State()


@contextmanager
def _only_writer(path: Path, tracker: str) -> Iterator[None]:
    folder = path / FOLDER
    try:
        make_folder(folder)
        handle = open_to_write(folder / f"{tracker}.lock")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); check its permissions") from None
    with handle:
        if lock_file(handle) is Lock.TAKEN:
            raise UsageError(f"{path.name} is being sent to {tracker} by another process; wait for it or end it")
        yield
