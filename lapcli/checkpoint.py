"""Checkpoints: `checkpoints/step-000500/` with weights, optimizer state and `state.json`.

One process writes `model.safetensors` and `optimizer.safetensors`. With several processes, each writes its part of the
tensors into the folders `model/` and `optimizer/`, through torch's distributed checkpoint. Any number can read both.

A checkpoint is written to a temporary folder, flushed, then renamed, so that it exists completely or not at all.
`state.json`, written last, has the sha256 of the other files; a damaged checkpoint is reported and the previous one is
used. The files are only safetensors and JSON, so that loading a foreign checkpoint cannot run code.

A hash shows that a file is unchanged, not that it fits: an optimizer moment of another shape would let a fused
kernel access memory out of bounds, integers would be cast silently, and one NaN would spread through the training. So
everything loaded into a model or an optimizer is checked before the first tensor is used: names, shapes, dtypes
and values, and an error names the tensor. A tensor must have the expected dtype, or both are among float32, bfloat16
and float16; then it is converted.
"""

import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor, distribute_tensor

from lapcli.runtime.environment import is_first_here
from lapcli.runtime.errors import DataError, Diverged, LapError
from lapcli.runtime.files import flush_to_disk, move, remove, sha256_of_file, sha256_of_json
from lapcli.runtime.ranks import World

if TYPE_CHECKING:
    from lapcli.training.optimizers import Optimizers

STATE = "state.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REMEDY = "restore the file, or move its checkpoint away to use the one before it"
_NAME = re.compile(r"step-(\d{6,})")
_FILE = re.compile(r"(model|optimizer)(/[\w.-]+)?\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: every file has the hash that was recorded."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def weights(self) -> Path:
        """The file of the weights, or the folder of their parts."""
        return self._tensors("model")

    @property
    def weights_sha256(self) -> str:
        files = {name: digest for name, digest in self.state["files"].items() if name.startswith("model")}
        return str(files.get("model.safetensors") or sha256_of_json(files))

    @property
    def sha256(self) -> str:
        """A hash of the complete checkpoint: the state holds the hashes of the other files."""
        return sha256_of_json(self.state)

    def load(self, model: nn.Module, optimizers: "Optimizers", laplacian_heads: str) -> None:
        """Load weights and optimizer state."""
        load_weights(self.weights, model, laplacian_heads)
        optimizers.load_state(self._tensors("optimizer"))

    def _tensors(self, what: Literal["model", "optimizer"]) -> Path:
        return self.path / (name if (name := f"{what}.safetensors") in self.state["files"] else what)


class Saver:
    """Saves the checkpoints of a run, one at a time; in the background it writes a copy during training."""

    def __init__(self, world: World) -> None:
        # A separate group: training uses the default group at the same time. Parts are written from the CPU.
        group = dist.new_group(backend="gloo", timeout=world.timeout) if world.size > 1 else None
        self._world = dataclasses.replace(world, group=group)
        self._thread = ThreadPoolExecutor(1, "save")
        self._pending: Future[Checkpoint] | None = None

    @property
    def is_saving(self) -> bool:
        return self._pending is not None and not self._pending.done()

    @property
    def has_failed(self) -> bool:
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], **others: Any) -> Checkpoint:
        return save(model=model, optimizer=optimizer, world=self._world, **others)

    def start(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], **others: Any) -> None:
        """Save in the background, after waiting for the previous save. A collective, like `save`."""
        copies = BlockingAsyncStager().stage({"model": dict(model), "optimizer": dict(optimizer)})
        self._pending = self._thread.submit(self.save, **copies, **others)

    def wait(self) -> Checkpoint | None:
        """Return the checkpoint that was being saved, if any, once it is complete; raise its error if it failed."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for the last save, even if training failed: the next start must not find its files."""
        self._thread.shutdown()


def save(
    folder: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    state: Mapping[str, Any],
    keep: int,
    best: int | None = None,
    world: World | None = None,
) -> Checkpoint:
    """Write a checkpoint, every rank its part, then remove all but the newest `keep` and the one of step `best`.

    Non-finite tensors are not saved: they could not be loaded again, and would replace a good checkpoint.
    """
    world = world or World(0, 1, torch.device("cpu"))
    final, temporary = folder / f"step-{step:06d}", folder / f".writing-step-{step:06d}"

    @contextlib.contextmanager
    def writing() -> Iterator[None]:
        """Fail on every rank if one rank fails, with its message, and free the space on a full disk."""
        try:
            with world.together():
                try:
                    yield
                except (OSError, SafetensorError) as error:
                    raise LapError(
                        f"could not save step {step} in {folder} ({error}); {_last_good(folder, step)}. "
                        "Make room, then run the same command to resume."
                    ) from error
        except LapError:
            remove(temporary, or_leave=True)
            raise

    with writing():
        if broken := first_not_finite(model) or first_not_finite(optimizer):
            raise Diverged(f"{broken} is not finite after step {step}, which was not saved; {_last_good(folder, step)}")
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            for unfinished in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):  # of a process that was killed
                remove(unfinished)
            temporary.mkdir()
    error = None if world.size == 1 else _save_parts(temporary, model, optimizer, world)
    hashes: dict[str, str] = {}
    with writing():
        if error is not None:
            raise error
        if world.size == 1:
            save_file(_plain(model), temporary / "model.safetensors", {"format": "pt", **metadata, "step": str(step)})
            save_file(_plain(optimizer), temporary / "optimizer.safetensors", {"format": "pt"})
        mine = "*.safetensors" if world.size == 1 else f"*/shard-{world.rank + 1:05d}-*.safetensors"
        for path in temporary.glob(mine):
            _sort_metadata(path)
            path.chmod(temporary.stat().st_mode & 0o666)  # as the umask says: safetensors writes 0600
            flush_to_disk(path)
            hashes[path.relative_to(temporary).as_posix()] = sha256_of_file(path)
    files = {name: digest for part in world.from_all(hashes) for name, digest in sorted(part.items())}  # type: ignore[attr-defined]
    content = {**state, "step": step, "weights": dict(metadata), "files": files}
    with writing():
        if world.is_main:
            if elsewhere := [name for name in files if not (temporary / name).is_file()]:
                reason = "all machines need the same --runs-dir on a shared file system"
                raise OSError(f"{temporary / elsewhere[0]}, which another rank wrote, is not there: {reason}")
            (temporary / STATE).write_text(json.dumps(content, indent=2) + "\n")
            for path in (temporary / STATE, *(each for each in temporary.iterdir() if each.is_dir()), temporary):
                flush_to_disk(path)
            remove(final)  # a damaged checkpoint of the same step, which the resume skipped
            move(temporary, final)
            prune(folder, step, keep, best)  # last: a failed save must not cost the checkpoint to resume from
    return Checkpoint(final, step, content)


def _save_parts(
    folder: Path, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], world: World
) -> OSError | None:
    """Write this rank's part of the tensors. A collective; it returns the error of any rank on each of them."""
    try:
        for name, tensors in (("model", model), ("optimizer", optimizer)):
            writer = HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer, process_group=world.group)
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        return OSError(f"rank {rank}: {reason}")
    return None


def _last_good(folder: Path, step: int) -> str:
    steps = [saved for saved in steps_in(folder) if saved < step]  # later ones are damaged, see `prune`
    return f"the last good checkpoint is {folder / f'step-{steps[-1]:06d}'}" if steps else "there is no checkpoint yet"


def prune(folder: Path, step: int, keep: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` up to the run's `step` and the one of step `best`.

    Later checkpoints are damaged, since the run resumed from an earlier one: they must not count as the newest.
    """
    reached = [saved for saved in steps_in(folder) if saved <= step]
    for old in reached[:-keep]:  # `keep` is at least 1: with 0 the slice would be empty and keep all
        if old != best:
            # Renamed first, so that a kill leaves nothing that looks like a damaged checkpoint.
            doomed = folder / f".removing-step-{old:06d}"
            move(folder / f"step-{old:06d}", doomed)
            remove(doomed)


def _sort_metadata(path: Path) -> None:
    """Sort the metadata, so that equal weights give equal files: safetensors writes it in varying order."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        # Compact, as written by safetensors: a longer header would overwrite the first tensors.
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
        files = {str(name): str(digest) for name, digest in state["files"].items()}
        step = int(state["step"])
        if {match[1] if (match := _FILE.fullmatch(name)) else None for name in files} != {"model", "optimizer"}:
            raise ValueError
    # A damaged file may be any JSON.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(f"{path / STATE} is missing or not readable") from None
    if path.name != f"step-{step:06d}":
        raise damaged(f"{path} holds the files of step {step}")
    if is_first_here():
        found = {file.relative_to(path).as_posix() for file in path.rglob("*.safetensors")}
        for name in sorted({*files, *found}):
            if name not in found:
                raise damaged(f"{path / name} is missing")
            if sha256_of_file(path / name) != files.get(name):
                raise damaged(f"{path / name} is not what was saved (its sha256 differs)")
    return Checkpoint(path, step, state)


def chosen_by_rank_0(folder: Path, step: int, sha256: str) -> Checkpoint:
    """Read the checkpoint that rank 0 resumes from; DataError if this rank sees a different one."""
    shared = "all machines need the same --runs-dir on a shared file system"
    try:
        found = read(folder / f"step-{step:06d}")
    except DataError as error:
        raise DataError(f"{error}, which rank 0 resumes from; {shared}") from None
    if found.sha256 != sha256:
        raise DataError(f"{found.path} has other files (sha256 {found.sha256[:16]}) than on rank 0; {shared}")
    return found


def steps_in(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for p in folder.iterdir() if (match := _NAME.fullmatch(p.name)))


def load_weights(path: Path, model: nn.Module, laplacian_heads: str) -> None:
    """Load weights with the model's head plan: other plans have the same shapes but another meaning."""
    saved = read_metadata(path).get("laplacian_heads", "(not in its metadata)")
    if saved != laplacian_heads:
        raise DataError(
            f"{path} was trained with laplacian_heads {saved}, the model here has laplacian_heads {laplacian_heads}; "
            "build it with the same heads"
        )
    load_tensors(path, model.state_dict())


@torch.no_grad()
def load_tensors(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a file, or of a folder of parts, into `targets`, which may be sharded; check them before."""
    if path.is_dir():
        check_tensors(path, _declared(path), targets)
        _read_parts(path, dict(targets))
        _refuse_not_finite(path, targets, REMEDY)
        return
    tensors = read_tensors(path)
    check_tensors(path, tensors, targets)
    for name, target in targets.items():
        source = tensors[name]
        if isinstance(target, DTensor):  # of which this rank takes its part
            given = source.to(target.device, target.dtype)
            source = distribute_tensor(given, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(source)


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}  # safetensors refuses other layouts


def read_metadata(path: Path, remedy: str = REMEDY) -> dict[str, str]:
    """Read the metadata of weights: for parts it is in the checkpoint's state."""
    try:
        if path.is_dir():
            return dict(json.loads((path.parent / STATE).read_bytes())["weights"])
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a readable safetensors file ({error}); {remedy}") from None


def read_tensors(path: Path, remedy: str = REMEDY) -> dict[str, Tensor]:
    """Read the tensors of a folder of parts, or of a file, which are memory-mapped until they are copied."""
    if path.is_dir():
        tensors = {name: torch.empty_like(each, device="cpu") for name, each in _declared(path).items()}
        _read_parts(path, tensors)
        return tensors
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is not a readable safetensors file ({error}); {remedy}") from None


def _declared(folder: Path) -> dict[str, Tensor]:
    """Return the tensors whose parts are in a folder, without their values."""
    try:
        known = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{folder} has no readable parts of tensors ({error}); {REMEDY}") from None
    return {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")  # type: ignore[union-attr]
        for name, each in known.items()
    }


def _read_parts(folder: Path, targets: dict[str, Tensor]) -> None:
    """Read the values, for sharded targets only this rank's. Not a collective."""
    try:
        with warnings.catch_warnings(category=UserWarning, action="ignore"):  # that one process reads alone is meant
            dcp.load(targets, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise DataError(f"{folder} cannot be read ({reason}); {REMEDY}") from None


def check_tensors(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], remedy: str = REMEDY
) -> None:
    """Refuse tensors that do not fit; float32, bfloat16 and float16 are converted into each other.

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
    _refuse_not_finite(path, tensors, remedy)


def _refuse_not_finite(path: Path, tensors: Mapping[str, Tensor], remedy: str) -> None:
    if broken := first_not_finite(tensors):
        raise DataError(f"{path} cannot be used: {broken} has values that are not finite (NaN or infinity); {remedy}")


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor with a NaN or an infinity on this rank, in one pass without a copy."""
    for name, tensor in tensors.items():
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if local.numel() and local.is_floating_point() and not local.is_meta:
            low, high = torch.aminmax(local)  # it propagates NaN
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None
