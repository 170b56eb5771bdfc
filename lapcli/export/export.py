"""Exports a run's weights as a folder for another library: written to a temporary folder, verified, then renamed.

Every folder has `lap.json` (its source, and whether it was verified) and a model card.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lapcli.export import check_format
from lapcli.export.formats import WRITERS, ExportedModel
from lapcli.export.verification import LIBRARIES, TOLERANCE, Comparison, verify
from lapcli.models.gpt import GPT
from lapcli.objectives.weights import find_checkpoint, open_run
from lapcli.recipe import recipe_to_dict
from lapcli.result_rows import results
from lapcli.runs import Run
from lapcli.runtime import __version__
from lapcli.runtime.errors import UsageError, from_os_error
from lapcli.runtime.files import flush_to_disk, move, remove, sha256_of_file, write_json, write_text
from lapcli.training.metrics import read_metrics

RECORD = "lap.json"
CARD = "README.md"


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
    verified: bool | None = None,
) -> Export:
    """Write the folder `out` (by default `export/FORMAT` in the run); if `verified`, reload it and compare.

    `verified=None`: if the target library is installed.
    """
    check_format(run, to)
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
    exported = ExportedModel(loaded, plan)
    # Beside the folder, because a rename cannot cross file systems; the process's id keeps two exports apart.
    temporary = folder.parent / f".writing-{folder.name}-{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove(temporary, or_leave=True)
        temporary.mkdir()
        WRITERS[to](exported, temporary)
        checks = verify(to, exported, temporary) if (is_installed if verified is None else verified) else []
        # The record has the hashes of the files so far, without the card, which is written from it, and itself.
        record = _record(exported, to, temporary, checks)
        _write_card(exported, record, temporary)
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
        "dtype": "float32",
        "files": {path.name: sha256_of_file(path) for path in sorted(folder.iterdir())},
        # None if nothing was compared: all() of no checks is True.
        "verified": all(check.holds for check in checks) if checks else None,
        "differences": {check.name: check.difference for check in checks},
        "lap": __version__,
    }


def _write_card(exported: ExportedModel, record: Mapping[str, Any], folder: Path) -> None:
    """Write the model card: `card.md.j2`, filled with the run's records."""
    run, to, loaded = exported.loaded.run, str(record["to"]), exported.loaded
    assert run is not None
    library = LIBRARIES[to]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Our code has to be loaded: modeling_lap.py by transformers, an architecture of lapcli.timm by timm.
    needs_code = "auto_map" in config or str(config.get("architecture", "")).startswith("lap_")
    scores = _scores(run, str(record["weights_sha256"]))
    recipe = _without_paths(recipe_to_dict(run.recipe))
    card = ModelCard.from_template(
        _card_data(exported, to, scores, needs_code),
        template_path=str(Path(__file__).with_name("card.md.j2")),
        run=run,
        record=record,
        plan=exported.plan,
        library=library,
        library_version=version(library) if record["verified"] else None,
        wrong=[name for name, value in record["differences"].items() if value > TOLERANCE],
        needs_code=needs_code,
        images=None if isinstance(exported.module, GPT) else loaded.images,
        image_size=loaded.image_size,
        scores=scores,
        training=_training(run, record),
        recipe=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
    )
    write_text(folder / CARD, str(card) + "\n")


def _card_data(exported: ExportedModel, to: str, scores: list[dict[str, Any]], needs_code: bool) -> ModelCardData:
    task = "image-classification" if exported.loaded.classes else "image-feature-extraction"
    if isinstance(exported.module, GPT):
        task = "text-generation"
    tags = ["laplacian-heads"] if exported.plan.total else []
    results = [
        EvalResult(
            task_type=task,
            dataset_type=score["task"],
            dataset_name=score["task"],
            dataset_args={**score["how"], "sha256": score["data_sha256"]},
            metric_type=score["metric"],
            metric_value=score["value"],
            metric_args={name: score[name] for name in ("n", "stderr", "unit", "direction")},
        )
        for score in scores
    ]
    return ModelCardData(
        model_name=exported.loaded.name,
        library_name={"hf": "transformers", "timm": "timm"}.get(to),
        pipeline_tag=task,
        tags=[*tags, "custom_code"] if to == "hf" and needs_code else tags,
        eval_results=results or None,
    )


def _scores(run: Run, weights_sha256: str) -> list[dict[str, Any]]:
    """Return the results of exactly these weights that have a direction, each with its conditions."""
    frame = results(run.path)
    frame = frame[(frame.weights_sha256 == weights_sha256) & frame.direction.notna() & frame.value.notna()]
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    shown = ("limit", "split", "protocol", "conditions")
    named = [{**row, "how": {name: row[name] for name in shown if row[name]}} for row in rows]
    return sorted(named, key=lambda row: (row["task"], row["metric"], str(row["how"])))


def _training(run: Run, record: Mapping[str, Any]) -> dict[str, Any]:
    lines = read_metrics(run.metrics)
    hours = sum(x for line in lines for key, x in line.items() if key.split("_")[0] == "seconds") / 3600
    versions = run.info.get("versions") or {}
    return {
        "objective": run.info.get("objective"),
        "steps": run.info.get("step"),
        "checkpoint": f"step {record['step']}",
        "seed": run.info.get("seed"),
        "data": run.info.get("data"),
        "data sha256": run.info.get("data_sha256"),
        "weights sha256": record["weights_sha256"],
        "hardware": run.info.get("device"),
        "time": f"{hours:.2f} hours" if hours else None,
        "recipe sha256": run.info.get("recipe_sha256"),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()) or None,
    }


def _without_paths(value: Any) -> Any:
    """Shorten local paths to their last component, because a card may be published."""
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(inner) for inner in value]
    is_path = isinstance(value, str) and value.removeprefix("run:").startswith(("/", "~"))
    return Path(value).name if is_path else value
