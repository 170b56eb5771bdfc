"""Checkpoints: `checkpoints/step-000500/` with `model.safetensors`, `optimizer.safetensors` and `state.json`.

Written to a temporary folder, flushed, then renamed: a checkpoint is there whole or not at all. `state.json` holds the
sha256 of the other files and of itself; a damaged checkpoint is named and the one before it is used. Only safetensors
and JSON, so that loading somebody's checkpoint cannot run code.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lapcli.runtime.errors import DataError, Diverged, LapError
from lapcli.runtime.files import (
    flush_to_disk,
    make_folder,
    move,
    open_to_write,
    read_text,
    remove,
    sha256_of_file,
    whole_file,
    write_json,
)
from lapcli.training.tensors import check_tensors, first_not_finite, read_tensors

if TYPE_CHECKING:
    from lapcli.training.optimizers import Optimizers

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{6,})")
_LAYER_SCALE = re.compile(r"\.ls[12]\.gamma$")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: every file has the hash that was written down."""

    path: Path
    step: int
    state: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Reads a checkpoint that `find_damage` has not refused."""
        state = json.loads(read_text(path / STATE))
        state.pop("sha256")
        return cls(path, int(state["step"]), state)

    @property
    def weights(self) -> Path:
        return self.path / MODEL

    @property
    def weights_sha256(self) -> str:
        return str(self.state["files"][MODEL])

    @property
    def sha256(self) -> str:
        """The hash of the whole checkpoint, because the state holds the hashes of the other files."""
        return _digest(self.state)

    def load(self, model: nn.Module, optimizers: "Optimizers", laplacian_heads: str) -> list[str]:
        """Loads weights and optimizer state; returns the names of the tensors that were converted to another float."""
        converted = load_weights(self.weights, model, laplacian_heads)
        path = self.path / OPTIMIZER
        _, state = read_tensors(path)
        if not state and self.step == 0:  # a run that was interrupted before its first update
            return converted
        return converted + optimizers.load_state(state, path)


def reached(point: str) -> None:
    """Does nothing; the moments of a save at which the tests kill the process."""


def save(
    folder: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    state: Mapping[str, Any],
    keep: int,
    best: int | None = None,
) -> Checkpoint:
    """Writes a checkpoint, then removes all but the newest `keep` and the one of step `best`.

    Tensors that are not finite are not saved: they could not be loaded again, and a good checkpoint would have gone.
    """
    if broken := first_not_finite(model) or first_not_finite(optimizer):
        raise Diverged(f"{broken} is not finite after step {step}, which was not saved; {_last_good(folder)}")
    final = folder / f"step-{step:06d}"
    temporary = folder / f".writing-step-{step:06d}"
    try:
        make_folder(folder)
        remove_unfinished(folder)
        make_folder(temporary, is_new=True)
        reached("folder made")
        with whole_file(temporary / MODEL) as file:
            save_file(_plain(model), file, metadata={"format": "pt", **metadata, "step": str(step)})
            _sort_metadata(file)
        reached("model written")
        with whole_file(temporary / OPTIMIZER) as file:
            save_file(_plain(optimizer), file, metadata={"format": "pt"})
        reached("optimizer written")
        files = {name: sha256_of_file(temporary / name) for name in (MODEL, OPTIMIZER)}
        content = {**state, "step": step, "files": files}
        write_json(temporary / STATE, {**content, "sha256": _digest(content)})
        flush_to_disk(temporary)
        reached("before rename")
        if final.exists():  # a damaged one of the same step that a resume skipped
            remove(final)
        move(temporary, final)
        reached("after rename")
    except (OSError, SafetensorError) as error:
        remove(temporary, or_leave=True)  # gives a full disk its space back
        raise LapError(
            f"could not save step {step} in {folder} ({error}); {_last_good(folder)}. "
            "Make room, then run the same command to resume."
        ) from error
    prune(folder, keep, best)
    return Checkpoint(final, step, content)


def _last_good(folder: Path) -> str:
    steps = steps_in(folder)
    return f"the last good checkpoint is {folder / f'step-{steps[-1]:06d}'}" if steps else "there is no checkpoint yet"


def prune(folder: Path, keep: int, best: int | None = None) -> None:
    """Removes all but the newest `keep` and the one of step `best`."""
    for old in steps_in(folder)[:-keep]:
        if old != best:
            _remove(folder / f"step-{old:06d}")


def _sort_metadata(path: Path) -> None:
    """Equal weights make equal files: safetensors writes the metadata in an order that differs between processes."""
    with open_to_write(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(size))


def newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are named through `warn`."""
    for step in reversed(steps_in(folder)):
        path = folder / f"step-{step:06d}"
        damage = find_damage(path)
        if damage is None:
            return Checkpoint.read(path)
        warn(f"damaged checkpoint skipped: {damage}")
    return None


def read(path: Path) -> Checkpoint:
    """One checkpoint that has to be whole."""
    if damage := find_damage(path):
        raise DataError(f"damaged checkpoint: {damage}; choose another one (--checkpoint) or get its files again")
    return Checkpoint.read(path)


def chosen_by_rank_0(folder: Path, step: int, sha256: str) -> Checkpoint:
    """The checkpoint that rank 0 resumes from, as this rank sees it; folders of machines may differ."""
    path = folder / f"step-{step:06d}"
    differs = find_damage(path)
    if differs is None:
        here = Checkpoint.read(path)
        if here.sha256 == sha256:
            return here
        differs = f"{path} holds other files than rank 0's (sha256 {here.sha256[:16]} here, {sha256[:16]} there)"
    raise DataError(
        f"cannot resume from step {step}, which rank 0 chose: {differs}; all machines need the same --runs-dir on a "
        "shared file system, and a file system that lags needs a moment: run the same command again"
    )


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if nothing is."""
    try:
        state = json.loads(read_text(path / STATE))
        if state.pop("sha256") != _digest(state):
            return f"{path / STATE} is not what was saved (its sha256 differs)"
        files = {name: str(state["files"][name]) for name in (MODEL, OPTIMIZER)}
        step = int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{path / STATE} is missing or not readable"
    if path.name != f"step-{step:06d}":
        return f"{path} holds the files of step {step}"
    for name, digest in files.items():
        if not (path / name).is_file():
            return f"{path / name} is missing"
        if sha256_of_file(path / name) != digest:
            return f"{path / name} is not what was saved (its sha256 differs)"
    return None


def steps_in(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for p in folder.iterdir() if (match := _NAME.fullmatch(p.name)))


def load_weights(path: Path, model: nn.Module, laplacian_heads: str) -> list[str]:
    """Loads weights whose head plan is the model's: with another one the shapes would match, wrongly.

    Returns the names of the weights that were converted to another float.
    """
    metadata, tensors = read_tensors(path)
    saved = metadata.get("laplacian_heads")
    if saved != laplacian_heads:
        raise DataError(
            f"{path} was trained with {_plan_in_words(saved)}, "
            f"the model here has {_plan_in_words(laplacian_heads)}; build it with the same heads"
        )
    expected = model.state_dict()
    unknown = [name for name in tensors if name not in expected]
    if unknown and expected.keys() <= tensors.keys() and all(_LAYER_SCALE.search(name) for name in unknown):
        raise DataError(
            f"{path} has LayerScale ({unknown[0]}) although its recipe says model.layer_scale: null: version 0.1 "
            "trained such recipes with a LayerScale of 1e-6; train the run again with --fresh, "
            "or with --name and --set model.layer_scale=1e-6 for the model that version 0.1 trained"
        )
    converted = check_tensors(path, tensors, expected)
    model.load_state_dict(tensors)
    return converted


def _plan_in_words(plan: str | None) -> str:
    """The text of a `HeadPlan`: numbers alone are Laplacian heads, else operators are named."""
    is_named = plan is not None and "{" in plan
    return f"{'operators' if is_named else 'laplacian_heads'} {plan or '(not said in its metadata)'}"


def remove_unfinished(folder: Path) -> None:
    """What a kill left half written or half removed."""
    for path in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
        remove(path)


def _remove(path: Path) -> None:
    """By way of another name, so that a kill in between leaves nothing that looks like a damaged checkpoint."""
    doomed = path.with_name(f".removing-{path.name}")
    move(path, doomed)
    reached("removing")
    remove(doomed)


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
