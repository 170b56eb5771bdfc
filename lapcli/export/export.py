"""Exports a run's weights as a folder for another library: written to a temporary folder, verified, then renamed.

Every folder has `lap.json` (its source, and whether it was verified) and a model card.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lapcli.export.card import write_card
from lapcli.export.verification import Comparison, missing_library, verify
from lapcli.export.weights import DTYPES, ExportedModel, round_weights
from lapcli.heads.plan import HeadPlan
from lapcli.objectives.loading import find_checkpoint, open_run
from lapcli.recipe.schema import CLASSES, FEATURES, LANGUAGE
from lapcli.runs import Run
from lapcli.runtime import __version__
from lapcli.runtime.errors import UsageError, from_os_error
from lapcli.runtime.files import flush_to_disk, move, remove, sha256_of_file, write_json

RECORD = "lap.json"


@dataclass(frozen=True)
class Format:
    name: str
    module: str
    function: str  # writes the folder
    takes: frozenset[str]  # a model has to give one of these
    extra: str | None = None  # of our package, with the library for verifying
    takes_operators: bool = True  # head operators other than the Laplacian

    @property
    def write(self) -> Callable[[ExportedModel, Path], None]:
        return getattr(import_module(self.module), self.function)


FORMATS = {
    each.name: each
    for each in (
        Format("hf", "lapcli.export.huggingface", "write_hf", frozenset({LANGUAGE}), "hf", takes_operators=False),
        Format(
            "timm", "lapcli.export.timm_folder", "write_timm", frozenset({CLASSES, FEATURES}), takes_operators=False
        ),
        Format("safetensors", "lapcli.export.weights", "write_safetensors", frozenset({LANGUAGE, CLASSES, FEATURES})),
    )
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
    form = FORMATS.get(to)
    if form is None:
        raise UsageError(f"--to takes {', '.join(FORMATS)}; got {to[:40]!r}")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype takes {', '.join(DTYPES)}; got {dtype[:40]!r}")
    missing = missing_library(to)
    if verified and missing:
        raise UsageError(f"{missing} is not installed: pip install 'lapcli[{form.extra}]', or use --no-verify")
    folder = run.path / "export" / to if out is None else out
    if folder.exists():
        raise UsageError(f"{folder} already exists; remove it, or name another folder with --out")
    if out is not None and not folder.parent.is_dir():
        raise UsageError(f"--out {folder}: there is no folder {folder.parent}; make it first")
    loaded = open_run(run, find_checkpoint(run, checkpoint), torch.device("cpu"), float32=True)
    if not form.takes & loaded.gives:
        fitting = [name for name, each in FORMATS.items() if each.takes & loaded.gives]
        raise UsageError(
            f"{run.path} is a run of {run.recipe.objective}, which {to} does not support; use {' or '.join(fitting)}"
        )
    plan = plan_of(run)
    if not plan.is_laplacian and not form.takes_operators:
        fitting = [name for name, each in FORMATS.items() if each.takes & loaded.gives and each.takes_operators]
        raise UsageError(
            f"{run.path} has heads of {', '.join(plan.counts())}, which {to} cannot express; use {' or '.join(fitting)}"
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
        form.write(exported, temporary)
        checks = verify(to, exported, temporary) if (missing is None if verified is None else verified) else []
        # The record has the hashes of the files so far: neither the card's, which is written from it, nor its own.
        record = _record(exported, form, temporary, checks)
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


def plan_of(run: Run) -> HeadPlan:
    recipe: Any = run.recipe
    return recipe.model.head_plan()


def _record(exported: ExportedModel, form: Format, folder: Path, checks: list[Comparison]) -> dict[str, Any]:
    loaded = exported.loaded
    return {
        "to": form.name,
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
