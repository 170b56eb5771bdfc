"""Checkpoints: `checkpoints/step-000500/` with `model.safetensors`, `optimizer.safetensors` and `state.json`.

A checkpoint is written to a temporary folder, flushed, then renamed, so that it exists completely or not at all.
`state.json` has the sha256 of the other files and of itself; a damaged checkpoint is reported and the one before it is
used. The files are only safetensors and JSON, so that loading somebody's checkpoint cannot run code.

A hash shows that a file is what was saved, not that it fits: an optimizer moment of another shape would let a fused
kernel access memory out of bounds, integers would be cast silently, and one NaN would spread through the training. So
everything that is loaded into a model or an optimizer is checked before the first tensor is used: names, shapes, dtypes
and values, and an error names the tensor. A tensor must have the expected dtype, or both are among float32, bfloat16
and float16; then it is converted.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lapcli.runtime.environment import is_first_here
from lapcli.runtime.errors import DataError, Diverged, LapError
from lapcli.runtime.files import flush_to_disk, move, remove, sha256_of_file, sha256_of_json

if TYPE_CHECKING:
    from lapcli.training.optimizers import Optimizers

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REMEDY = "restore the file, or move its checkpoint away to use the one before it"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: every file has the hash that was recorded."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def weights(self) -> Path:
        return self.path / MODEL

    @property
    def weights_sha256(self) -> str:
        return str(self.state["files"][MODEL])

    @property
    def sha256(self) -> str:
        """A hash of the whole checkpoint: the state holds the hashes of the other files."""
        return sha256_of_json(self.state)

    def load(self, model: nn.Module, optimizers: "Optimizers", laplacian_heads: str) -> list[str]:
        """Load weights and optimizer state; return the names of tensors that were converted to another float dtype."""
        converted = load_weights(self.weights, model, laplacian_heads)
        path = self.path / OPTIMIZER
        _, state = read_tensors(path)
        if not state and self.step == 0:  # a run that was interrupted before its first update
            return converted
        return converted + optimizers.load_state(state, path)


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
    """Write a checkpoint, then remove all but the newest `keep` and the one of step `best`.

    Tensors that are not finite are not saved: they could not be loaded again, and would displace a good checkpoint.
    """
    if broken := first_not_finite(model) or first_not_finite(optimizer):
        raise Diverged(f"{broken} is not finite after step {step}, which was not saved; {_last_good(folder, step)}")
    final, temporary = folder / f"step-{step:06d}", folder / f".writing-step-{step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):  # of a process that was killed
            remove(unfinished)
        temporary.mkdir()
        save_file(_plain(model), temporary / MODEL, metadata={"format": "pt", **metadata, "step": str(step)})
        _sort_metadata(temporary / MODEL)
        save_file(_plain(optimizer), temporary / OPTIMIZER, metadata={"format": "pt"})  # one key: nothing to sort
        files = {name: sha256_of_file(temporary / name) for name in (MODEL, OPTIMIZER)}
        content = {**state, "step": step, "files": files}
        (temporary / STATE).write_text(json.dumps(content, indent=2) + "\n")
        mode = (temporary / STATE).stat().st_mode & 0o777  # of the umask; safetensors writes 0600, for nobody else
        for path in temporary.iterdir():
            path.chmod(mode)
            flush_to_disk(path)
        flush_to_disk(temporary)
        remove(final)  # a damaged checkpoint of the same step, which the resume skipped
        move(temporary, final)
    except (OSError, SafetensorError) as error:
        remove(temporary, or_leave=True)  # to free the space of a full disk
        raise LapError(
            f"could not save step {step} in {folder} ({error}); {_last_good(folder, step)}. "
            "Make room, then run the same command to resume."
        ) from error
    prune(folder, step, keep, best)  # last: a failed save must not cost the checkpoint to resume from
    return Checkpoint(final, step, content)


def _last_good(folder: Path, step: int) -> str:
    steps = [saved for saved in steps_in(folder) if saved < step]  # later ones are damaged, see `prune`
    return f"the last good checkpoint is {folder / f'step-{steps[-1]:06d}'}" if steps else "there is no checkpoint yet"


def prune(folder: Path, step: int, keep: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` up to the run's `step` and the one of step `best`.

    Later ones are damaged, since the run was resumed before them: they must not count as the newest.
    """
    reached = [saved for saved in steps_in(folder) if saved <= step]
    for old in reached[:-keep]:  # `keep` is at least 1: with 0 the slice would be empty and keep all
        if old != best:
            # Renamed first, so that a kill leaves nothing that looks like a damaged checkpoint.
            doomed = folder / f".removing-step-{old:06d}"
            move(folder / f"step-{old:06d}", doomed)
            remove(doomed)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata, so that equal weights are equal files: safetensors writes it in an order that varies."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        # As compact as safetensors writes it: a longer header would overwrite the first tensors.
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(size))  # of the same size, because the tensors follow; the format allows spaces


def newest(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest intact checkpoint; damaged ones are reported through `warn`."""
    for step in reversed(steps_in(folder)):
        try:
            return read(folder / f"step-{step:06d}")
        except DataError as error:
            warn(f"skipped: {error}")
    return None


def read(path: Path) -> Checkpoint:
    """Read a checkpoint; DataError if it is damaged. One process on each machine compares the hashes of its files."""

    def damaged(what: str) -> DataError:
        return DataError(f"damaged checkpoint: {what}; choose another one (--checkpoint) or restore its files")

    try:
        state = json.loads((path / STATE).read_bytes())
        files = {name: str(state["files"][name]) for name in (MODEL, OPTIMIZER)}
        step = int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # a damaged file may be any JSON
        raise damaged(f"{path / STATE} is missing or not readable") from None
    if path.name != f"step-{step:06d}":
        raise damaged(f"{path} holds the files of step {step}")
    for name, digest in files.items() if is_first_here() else ():
        if not (path / name).is_file():
            raise damaged(f"{path / name} is missing")
        if sha256_of_file(path / name) != digest:
            raise damaged(f"{path / name} is not what was saved (its sha256 differs)")
    return Checkpoint(path, step, state)


def chosen_by_rank_0(folder: Path, step: int, sha256: str) -> Checkpoint:
    """Read the checkpoint that rank 0 resumes from; DataError if this rank sees another one, as on another machine."""
    path = folder / f"step-{step:06d}"
    try:
        found = read(path)
        if found.sha256 != sha256:
            raise DataError(f"{path} holds other files (sha256 {found.sha256[:16]} here, {sha256[:16]} there)")
        return found
    except DataError as error:
        raise DataError(
            f"cannot resume from step {step}, which rank 0 chose: {error}; all machines need the same --runs-dir on a "
            "shared file system, and a file system that lags needs a moment: run the same command again"
        ) from None


def steps_in(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for p in folder.iterdir() if (match := _NAME.fullmatch(p.name)))


def load_weights(path: Path, model: nn.Module, laplacian_heads: str) -> list[str]:
    """Load weights whose head plan is the model's: those of another plan have the same shapes, but another meaning.

    Returns the names of the weights that were converted to another float dtype.
    """
    metadata, tensors = read_tensors(path)
    saved = metadata.get("laplacian_heads", "(not in its metadata)")
    if saved != laplacian_heads:
        raise DataError(
            f"{path} was trained with laplacian_heads {saved}, the model here has laplacian_heads {laplacian_heads}; "
            "build it with the same heads"
        )
    expected = model.state_dict()
    converted = check_tensors(path, tensors, expected)
    with torch.no_grad():
        for name, target in expected.items():
            copy_into(target, tensors[name])
    return converted


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a complete tensor into one that may be sharded, of which this rank takes its part."""
    if isinstance(target, DTensor):
        given = source.to(target.device, target.dtype)
        source = distribute_tensor(given, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}  # safetensors refuses other layouts


def read_tensors(path: Path, remedy: str = REMEDY) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read metadata and tensors of a safetensors file. The tensors are memory-mapped until they are copied."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
        return metadata, dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is not a readable safetensors file ({error}); {remedy}") from None


def check_tensors(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], remedy: str = REMEDY
) -> list[str]:
    """Refuse tensors that do not fit; return the names of those that will be converted to another float dtype.

    `expected` only provides shapes and dtypes; its tensors may be on the meta device.
    """

    def misfit(problem: str) -> DataError:
        return DataError(f"{path} does not fit the model: {problem}; {remedy}")

    missing, unknown = [n for n in expected if n not in tensors], [n for n in tensors if n not in expected]
    for names, problem in ((missing, "missing from it"), (unknown, "not a tensor of the model")):
        if names:
            raise misfit(f"{names[0]}{f' (and {more} more)' if (more := len(names) - 1) else ''} is {problem}")
    for name, wanted in expected.items():
        tensor = tensors[name]
        if tensor.shape != wanted.shape:
            raise misfit(f"{name} has shape {list(tensor.shape)} and the model's has {list(wanted.shape)}")
        if tensor.dtype != wanted.dtype and not (tensor.dtype in FLOATS and wanted.dtype in FLOATS):
            raise misfit(f"{name} is {tensor.dtype}, not {wanted.dtype}")
    if broken := first_not_finite(tensors):
        raise DataError(f"{path} cannot be used: {broken} has values that are not finite (NaN or infinity); {remedy}")
    return [name for name, wanted in expected.items() if tensors[name].dtype != wanted.dtype]


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor with a NaN or an infinity. One pass without a copy: `aminmax` propagates NaN."""
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.is_floating_point():
            low, high = torch.aminmax(tensor.detach())
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None
