"""Cells: a recipe with overrides, a name, the commands that follow its training, and its state.

A cell is an ordinary run, trained by `lap train`. Its name is made from its own values alone, so that a grid can grow
and its runs keep their names. The state of a cell is read from its run directory:

    runs/NAME/                ordinary run
    runs/NAME/sweep.json      commands that followed its training, with the weights that they used; marks a search
    runs/.sweeps/NAME.lock    held while a process works on the cell
    runs/.sweeps/NAME.log     output of its commands
"""

import fcntl
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from lapcli.recipe import BaseRecipe, recipe_hash
from lapcli.recipe.reading import Unreadable, read_text
from lapcli.result_rows import results
from lapcli.runs import INFO, METRICS, SWEEP, changes, is_untrained, read_info, read_run, status_of
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import NO_LOCKS, read_json, sha256_of_json, write_json
from lapcli.training.metrics import last_step_metrics

Over = dict[str, list[Any]]
LAPLACIAN_HEADS, OPERATORS = "model.laplacian_heads", "model.operators"
WORK = ".sweeps"
_LONGEST_NAME = 110  # of the 128 characters that a run's name may have: chat stages add to it
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_SHOWN = 8  # cells named in a message


@dataclass(frozen=True)
class Cell:
    name: str
    recipe: Path
    overrides: tuple[str, ...]  # in the form of `--set`
    values: Mapping[str, Any]  # what makes it this cell
    loaded: BaseRecipe = field(repr=False)
    then: tuple[str, ...] = ()  # commands that follow its training
    is_search: bool = False  # its run only chooses values for others, and is not a result

    @cached_property
    def recipe_sha256(self) -> str:
        return recipe_hash(self.loaded)


def parse_over(options: Sequence[str]) -> Over:
    """Parse the `--over` options: the values of each key, in order."""
    over: Over = {}
    for option in options:
        key, sign, text = option.partition("=")
        key = key.strip()
        if not sign or not key or not text.strip():
            raise UsageError(f"--over takes KEY=VALUE,VALUE such as seed=0,1,2, got {option[:80]!r}")
        if key in over:
            raise UsageError(f"--over {key} is given twice; give all of its values in one option")
        over[key] = [_read(key, part) for part in split_values(text)]
    return over


def split_values(text: str) -> list[str]:
    """Split at commas that are not inside brackets or quotes."""
    # Not a YAML list: YAML would split `linear(0, 4)` at its comma, since round brackets mean nothing to it.
    parts, open_brackets, quote, start = [], [], "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in _CLOSING:
            open_brackets.append(_CLOSING[sign])
        elif open_brackets and sign == open_brackets[-1]:
            open_brackets.pop()
        elif sign == "," and not open_brackets:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:])]


def _read(key: str, text: str) -> Any:
    """Read a value as in a recipe."""
    try:
        document, problems = read_text(text, lambda line: "--over", under=(key,))
    except Unreadable as error:
        raise UsageError(f"--over {key}: {text[:60]!r} {error.problem.message}") from None
    if problems:
        raise UsageError(f"--over {key}: {problems[0].message}")
    if document is None or not text:
        raise UsageError(f"--over {key} has no value between two commas; write null to mean none")
    return document.values


def value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested mappings; None if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def combinations(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of the values; the last key varies fastest."""
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def overrides_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the values in the form of `--set`, as JSON."""
    # Not escaped: JSON writes a character beyond U+FFFF as two surrogates, which YAML reads as two characters.
    return tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def cell_name(prefix: str, values: Mapping[str, Any]) -> str:
    """Return the run's name, such as `vitb_cifar100-12L-drop_path0.1-seed2`, with Laplacian heads as in the paper."""
    last = [key.rpartition(".")[2] for key in values]
    parts = [re.sub(r"[^A-Za-z0-9._+-]+", "_", prefix).strip("._+-") or "cell"]
    for key, value in values.items():
        short = key.rpartition(".")[2]
        if key == LAPLACIAN_HEADS:
            parts.append(f"{_text(value)}L")
        elif key == OPERATORS:
            parts.append(_text(value) if value else "plain")
        else:
            # The full key if two keys of the grid end alike, such as validation.every and checkpoint.every.
            parts.append((key if last.count(short) > 1 else short) + _text(value))
    name = re.sub(r"[^A-Za-z0-9._+-]", "_", "-".join(parts))
    # The hash covers the cell's own values, so that its name does not change when the grid grows.
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 9]}-{sha256_of_json(values)[:8]}"


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        # One name for 1e-3 and 0.001; all digits where %g would give two values the same name.
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return "_".join(map(_text, value))
    if isinstance(value, dict):
        return "_".join(key + _text(inner) for key, inner in value.items())
    text = str(value)
    clean = re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_")
    # A hash, because two paths may differ only in characters that a name cannot contain.
    is_plain = re.fullmatch(r"[A-Za-z0-9.+-]+|linear\([ 0-9,]*\)", text)
    return clean if is_plain else f"{clean[-40:]}.{sha256_of_json(text)[:6]}"


@dataclass(frozen=True)
class Progress:
    """The progress of a cell's training."""

    status: str = "new"  # or the run's: running, interrupted, failed, finished
    step: int = 0
    steps: int | None = None
    diverged: bool = False
    weights_sha256: str | None = None

    @property
    def is_trained(self) -> bool:
        return self.status == "finished"

    @property
    def is_tried(self) -> bool:
        """Whether it is trained or has diverged, since a diverging learning rate cannot be the best."""
        return self.is_trained or self.diverged


def progress(cell: Cell, runs_dir: Path) -> Progress:
    """Read the progress from the cell's run; a run of that name with another recipe is ignored."""
    path = runs_dir / cell.name
    if not (path / INFO).is_file():
        return Progress()
    info = read_info(path)
    if info.get("recipe_sha256") != cell.recipe_sha256 and changes(read_run(path), cell.loaded):
        return Progress()
    status = status_of(path, info)
    # `run.json` has the step of the last save; during training, the metrics are ahead of it.
    last = last_step_metrics(path / METRICS).get("step", 0) if status == "running" else 0
    return Progress(
        status=status,
        step=max(int(last), int(info.get("step") or 0)),
        steps=info.get("steps"),
        diverged=bool(info.get("diverged")) and status == "failed",
        weights_sha256=info.get("weights_sha256"),
    )


def last_scores(names: Sequence[str], runs_dir: Path) -> dict[str, dict[str, tuple[float, str | None]]]:
    """Return the final validation of each finished run: metric to value and direction."""
    known = [str(runs_dir / name) for name in names if (runs_dir / name / INFO).is_file()]
    scores: dict[str, dict[str, tuple[float, str | None]]] = {name: {} for name in names}
    if known:
        frame = results(known, runs_dir)
        last = frame[(frame.task == "validation") & (frame.checkpoint == "last")]
        for run, metric, value, direction in zip(last.run, last.metric, last.value, last.direction, strict=True):
            scores[run][f"validation_{metric}"] = float(value), direction
    return scores


def commands_left(cell: Cell, runs_dir: Path) -> list[str]:
    """Return the commands of `then` that have not run on the current weights yet."""
    weights = progress(cell, runs_dir).weights_sha256
    done = _read_record(runs_dir / cell.name / SWEEP)
    # Before the first save `weights` is None, which would equal the None of a command that has not run.
    return [text for text in cell.then if done.get(text) != weights or weights is None]


def record(run: Path, **facts: Any) -> None:
    """Add facts to a run's `sweep.json`: a command with the weights it used, or that the run belongs to a search."""
    known = _read_record(run / SWEEP)
    if run.is_dir() and known != {**known, **facts}:
        write_json(run / SWEEP, {**known, **facts})


def _read_record(path: Path) -> dict[str, Any]:
    return read_json(path, "remove it and run the sweep again") if path.is_file() else {}


def log_of(name: str, runs_dir: Path) -> Path:
    return runs_dir / WORK / f"{name}.log"


def make_work_folder(runs_dir: Path) -> Path:
    folder = runs_dir / WORK
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}; choose another --runs-dir") from None
    return folder


def lock_cell(name: str, runs_dir: Path) -> IO[str] | None:
    """Take the cell's lock; None if another process has it. Children inherit it: it outlives a killed sweep."""
    # Never removed: two processes could then hold locks of the same name, on the removed file and its successor.
    handle = (make_work_folder(runs_dir) / f"{name}.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter on NFS, which emulates flock by a byte-range lock
        handle.close()
        return None
    except OSError as error:  # nobody can hold it where the file system has no locks
        if error.errno not in NO_LOCKS:
            raise
    return handle


def refuse_others(cells: Iterable[Cell], runs_dir: Path) -> None:
    """Raise UsageError if runs with the cells' names have another recipe: `lap train` would refuse each of them."""
    others = []
    for cell in cells:
        if not (runs_dir / cell.name / INFO).is_file():
            continue
        run = read_run(runs_dir / cell.name)
        # A run without a step is no obstacle: `lap train` replaces it.
        if (differing := changes(run, cell.loaded)) and not is_untrained(run):
            key, old, new = differing[0]
            more = f" and {len(differing) - 1} more keys" if len(differing) > 1 else ""
            others.append(f"  {cell.name}: {key} {json.dumps(old)} in the run, {json.dumps(new)} now{more}")
    if others:
        shown = "\n".join([*others[:_SHOWN], *([f"  and {len(others) - _SHOWN} more"] if len(others) > _SHOWN else [])])
        raise UsageError(
            f"{len(others)} of the cells already exist as runs with another recipe in {runs_dir}:\n{shown}\n"
            "Choose new names with --name, or another --runs-dir. Nothing was started."
        )
