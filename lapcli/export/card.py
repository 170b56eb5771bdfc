"""The model card of an exported folder: `card.md.j2`, filled with the run's records."""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lapcli.export.verification import LIBRARIES, TOLERANCE
from lapcli.export.weights import ExportedModel
from lapcli.models.gpt import GPT
from lapcli.recipe import recipe_to_dict
from lapcli.result_rows import results
from lapcli.runs import Run
from lapcli.runtime.files import write_text
from lapcli.training.metrics import read_metrics

CARD = "README.md"


def write_card(exported: ExportedModel, record: Mapping[str, Any], folder: Path) -> None:
    run, to, loaded = exported.loaded.run, str(record["to"]), exported.loaded
    assert run is not None
    library = LIBRARIES[to]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Code of ours has to be loaded: modeling_lap.py by transformers, an architecture of lapcli.timm by timm.
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
        datasets=sorted(set(_hub_sets(recipe_to_dict(exported.recipe)))) or None,
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


def _hub_sets(value: Any) -> Iterator[str]:
    """Yield every `hub:OWNER/NAME` that the recipe names."""
    if isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _hub_sets(inner)
    elif isinstance(value, str) and value.startswith("hub:"):
        yield value.removeprefix("hub:").split("@")[0]
