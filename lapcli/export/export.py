"""Exports a run's weights as a folder for another library: written to a temporary folder, verified, then renamed.

Every folder has `lap.json` (its source, and whether it was verified) and a model card.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lapcli.export import check_format
from lapcli.export.card import write_card
from lapcli.export.huggingface import write_hf
from lapcli.export.timm_folder import write_timm
from lapcli.export.verification import LIBRARIES, Comparison, verify
from lapcli.export.weights import DTYPES, ExportedModel, round_weights, write_safetensors
from lapcli.objectives.weights import find_checkpoint, open_run
from lapcli.runs import Run
from lapcli.runtime import __version__
from lapcli.runtime.errors import UsageError, from_os_error
from lapcli.runtime.files import flush_to_disk, move, remove, sha256_of_file, write_json

RECORD = "lap.json"

#: The writer of the folder of each format.
WRITERS: dict[str, Callable[[ExportedModel, Path], None]] = {
    "hf": write_hf,
    "timm": write_timm,
    "safetensors": write_safetensors,
}


@dataclass(frozen=True)
class Export:
    """An exported folder; `record` is the content of its `lap.json`."""

    folder: Path
    record: dict[str, Any]
    checks: list[Comparison]

    @property
    def problem(self) -> str | None:
        """Why the folder must not be used; None if every check holds."""
        failed = [f"{check.name} ({check.difference:.2g})" for check in self.checks if not check.holds]
        return f"the folder does not compute what the run does: {', '.join(failed)}" if failed else None


def export_run(
    run: Run,
    to: str,
    *,
    out: Path | None = None,
    checkpoint: str = "last",
    dtype: str = "float32",
    verified: bool | None = None,
) -> Export:
    """Write the folder `out` (by default `export/FORMAT` in the run); if `verified`, reload it and compare.

    `verified=None`: if the target library is installed.
    """
    check_format(run, to)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype takes {', '.join(DTYPES)}; got {dtype[:40]!r}")
    is_installed = find_spec(LIBRARIES[to]) is not None
    if verified and not is_installed:
        raise UsageError(f"{LIBRARIES[to]} is not installed: pip install 'lapcli[{to}]', or use --no-verify")
    folder = run.path / "export" / to if out is None else out
    if folder.exists():
        raise UsageError(f"{folder} already exists; remove it, or name another folder with --out")
    if out is not None and not folder.parent.is_dir():
        raise UsageError(f"--out {folder}: there is no folder {folder.parent}; make it first")
    loaded = open_run(run, find_checkpoint(run, checkpoint), torch.device("cpu"), float32=True)
    recipe: Any = run.recipe
    plan = recipe.model.head_plan()
    if not plan.is_laplacian and to != "safetensors":
        raise UsageError(
            f"{run.path} has heads of {', '.join(plan.counts())}, which {to} cannot express; use --to safetensors"
        )
    loaded.module.eval().requires_grad_(False)
    round_weights(loaded.module, dtype)
    exported = ExportedModel(loaded, plan, dtype)
    # Beside the folder, because a rename does not cross file systems; the process's id keeps two exports apart.
    temporary = folder.parent / f".writing-{folder.name}-{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove(temporary, or_leave=True)
        temporary.mkdir()
        WRITERS[to](exported, temporary)
        checks = verify(to, exported, temporary) if (is_installed if verified is None else verified) else []
        # The record has the hashes of the files so far: neither the card's, which is written from it, nor its own.
        record = _record(exported, to, temporary, checks)
        write_card(exported, record, temporary)
        write_json(temporary / RECORD, record)
        for path in temporary.iterdir():  # before the rename, so that the folder appears complete or not at all
            flush_to_disk(path)
        move(temporary, folder)
    except OSError as error:
        raise from_os_error(error) from None
    finally:
        remove(temporary, or_leave=True)
    return Export(folder, record, checks)


def _record(exported: ExportedModel, to: str, folder: Path, checks: list[Comparison]) -> dict[str, Any]:
    loaded = exported.loaded
    return {
        "to": to,
        "run": loaded.name,
        "objective": exported.recipe.objective,
        "step": loaded.step,
        "weights_sha256": loaded.weights_sha256,
        "laplacian_heads": list(exported.plan.per_layer),
        **({} if exported.plan.is_laplacian else {"operators": str(exported.plan)}),
        "heads": exported.plan.heads,
        "dtype": exported.dtype,
        "files": {path.name: sha256_of_file(path) for path in sorted(folder.iterdir())},
        # None if nothing was compared: all() of no checks is True.
        "verified": all(check.holds for check in checks) if checks else None,
        "differences": {check.name: check.difference for check in checks},
        "lap": __version__,
    }
