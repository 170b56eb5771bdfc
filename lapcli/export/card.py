"""The model card of an exported folder: what is known about the run, in the form that model hubs read."""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from lapcli.export.verification import LIBRARIES, TOLERANCE
from lapcli.export.weights import ExportedModel
from lapcli.kinds import kind_of
from lapcli.models.gpt import GPT
from lapcli.recipe import differing_keys, recipe_to_dict
from lapcli.runs import METRICS, Run
from lapcli.runtime.files import read_json, read_text, write_text

CARD = "README.md"
_MOST_DIFFERENCES = 40

_LOAD = {
    "hf": """\
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

model = AutoModelForCausalLM.from_pretrained("FOLDER"{trust})
tokenizer = PreTrainedTokenizerFast.from_pretrained("FOLDER")""",
    "timm": """\
{register}import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True)""",
    "safetensors": """\
from safetensors.torch import load_file

weights = load_file("FOLDER/model.safetensors")  # the architecture is in config.json""",
}


def write_card(exported: ExportedModel, record: Mapping[str, Any], folder: Path) -> None:
    run = exported.loaded.run
    assert run is not None
    scores = list(_scores(run, str(record["weights_sha256"])))
    text = "\n\n".join(
        [
            f"---\n{_front_matter(exported, record, scores)}\n---",
            f"# {run.name}",
            *_warning(exported, record),
            "## Load it",
            f"```python\n{_snippet(record, folder)}\n```",
            *_notes(exported),
            "## Heads",
            f"{exported.plan.total} of {exported.plan.heads * len(exported.plan.per_layer)} heads are Laplacian "
            "(`L`: the identity minus softmax attention; `A`: attention).",
            "```\n" + exported.plan.grid() + "\n```",
            "## Scores",
            _score_table(scores),
            "## Training",
            _training(run, record),
            "## Differences from the paper's recipe",
            _differences(run),
            "## Limits",
            "The weights of a research run, meant for studying Laplacian heads. Its outputs have not been examined for "
            "truthfulness, bias or harm; only the scores above were measured.",
        ]
    )
    write_text(folder / CARD, text + "\n")


def _front_matter(exported: ExportedModel, record: Mapping[str, Any], scores: list[tuple[str, dict, dict]]) -> str:
    to, is_gpt = str(record["to"]), isinstance(exported.module, GPT)
    task = "text-generation" if is_gpt else "image-classification"
    if not is_gpt and not exported.loaded.classes:
        task = "image-feature-extraction"
    tags = ["laplacian-heads"] if exported.plan.total else []
    needs_code = to == "hf" and (record["files"].keys() & {"modeling_lap.py"})
    results = [_result(task, name, score, evaluation) for name, score, evaluation in scores]
    data = ModelCardData(
        model_name=exported.loaded.name,
        library_name={"hf": "transformers", "timm": "timm"}.get(to),
        pipeline_tag=task,
        tags=[*tags, "custom_code"] if needs_code else tags,
        datasets=_hub_sets(recipe_to_dict(exported.recipe)) or None,
        eval_results=results or None,
    )
    return data.to_yaml().strip()


def _result(task: str, name: str, score: Mapping[str, Any], evaluation: Mapping[str, Any]) -> EvalResult:
    details = score.get("details") or {}
    return EvalResult(
        task_type=task,
        dataset_type=name,
        dataset_name=name,
        dataset_args={
            "protocol": details.get("protocol") or evaluation.get("protocol"),
            "num_fewshot": details.get("num_fewshot"),
            "limit": evaluation.get("limit"),
            "sha256": evaluation.get("data_sha256"),
        },
        metric_type=str(details.get("metric") or name),
        metric_value=score["value"],
        metric_args={"n": score["count"], "interval_95": score["interval"]},
    )


def _scores(run: Run, weights_sha256: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (task, score, evaluation) of exactly these weights."""
    for path in sorted((run.path / "eval").glob("*.json")):
        evaluation = read_json(path, "evaluate the run again")
        if evaluation.get("weights_sha256") == weights_sha256:
            for name, score in evaluation["tasks"].items():
                yield name, score, evaluation


def _score_table(scores: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> str:
    if not scores:
        return "None: these weights have not been evaluated."
    rows = ["| task | metric | value | 95% interval | n | protocol |", "| --- | --- | --- | --- | --- | --- |"]
    for name, score, evaluation in scores:
        details = score.get("details") or {}
        interval = " to ".join(f"{end:.4g}" for end in score["interval"]) if score["interval"] else "-"
        protocol = str(details.get("protocol") or evaluation.get("protocol") or "-")
        if details.get("num_fewshot") is not None:
            protocol += f", {details['num_fewshot']} shots"
        if evaluation.get("limit") is not None:
            protocol += f", only {evaluation['limit']} examples"
        metric = details.get("metric") or name
        rows.append(f"| {name} | {metric} | {score['value']:.4g} | {interval} | {score['count']} | {protocol} |")
    return "\n".join(rows)


def _warning(exported: ExportedModel, record: Mapping[str, Any]) -> list[str]:
    lines = []
    if exported.plan.total:
        lines.append(
            "**Not a plain transformer.** Some attention heads of this model are Laplacian: they compute `v - P v` "
            "instead of `P v`, from weights with the same names and shapes. A plain transformer loads the weights "
            "without an error, but computes an untrained function with them. Load the model as shown below."
        )
    library = LIBRARIES[str(record["to"])][0]
    if record["verified"]:
        worst = max(record["differences"].values())
        lines.append(
            f"Verified: loaded by {library} {version(library)} alone, this folder computes what the run computes "
            f"(largest difference {worst:.1e}, in float32)."
        )
    elif record["verified"] is False:
        wrong = [name for name, value in record["differences"].items() if value > TOLERANCE]
        lines.append(
            f"**NOT VERIFIED: this folder does not compute what the run computes ({', '.join(wrong)}). Do not use it.**"
        )
    else:
        lines.append(f"Not verified: it was written without loading it by {library}.")
    return lines


def _snippet(record: Mapping[str, Any], folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    trust = ", trust_remote_code=True" if "auto_map" in config else ""
    is_ours = str(config.get("architecture", "")).startswith("lap_")
    register = "import lapcli.timm  # pip install lapcli; registers the architecture\n" if is_ours else ""
    return _LOAD[str(record["to"])].format(trust=trust, register=register)


def _notes(exported: ExportedModel) -> list[str]:
    if not isinstance(exported.module, GPT):
        images = exported.loaded.images
        assert images is not None
        return [
            f"Images are {exported.loaded.image_size} pixels wide, normalised with mean {list(images.mean)} and "
            f"deviation {list(images.std)}, {images.interpolation}, centre crop {images.crop_ratio:g}."
        ]
    return [
        "Texts begin with `<|bos|>`, which the tokenizer adds. Generation ends at `<|assistant_end|>` and `<|bos|>`. A "
        "special token that is written out in a text is read as the token by transformers, and as text by lap."
    ]


def _training(run: Run, record: Mapping[str, Any]) -> str:
    info = run.info
    hours = _seconds(run) / 3600
    rows = {
        "objective": info.get("objective"),
        "steps": info.get("step"),
        "checkpoint": f"step {record['step']}",
        "seed": info.get("seed"),
        "data": info.get("data"),
        "data sha256": info.get("data_sha256"),
        "weights sha256": record["weights_sha256"],
        "hardware": info.get("device"),
        "time": f"{hours:.2f} hours" if hours else None,
        "recipe sha256": info.get("recipe_sha256"),
        "versions": ", ".join(f"{name} {number}" for name, number in (info.get("versions") or {}).items()) or None,
    }
    return "\n".join(
        ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items() if value is not None)]
    )


def _seconds(run: Run) -> float:
    """Return the seconds of steps, validations and saves; 0 if the metrics do not record them."""
    if not (run.path / METRICS).is_file():
        return 0.0
    lines = (json.loads(line) for line in read_text(run.path / METRICS).splitlines() if line)
    return sum(value for line in lines for key, value in line.items() if key == "seconds" or key.startswith("seconds_"))


def _differences(run: Run) -> str:
    name, paper = kind_of(run.recipe).paper_recipe(run.recipe) or ("", run.recipe)
    rows = differing_keys(_without_paths(recipe_to_dict(paper)), _without_paths(recipe_to_dict(run.recipe)))
    lines = [f"- `{key}`: {_shown(ours)} (paper: {_shown(theirs)})" for key, theirs, ours in rows[:_MOST_DIFFERENCES]]
    if len(rows) > _MOST_DIFFERENCES:
        lines.append(f"- and {len(rows) - _MOST_DIFFERENCES} more")
    full = yaml.safe_dump(_without_paths(recipe_to_dict(run.recipe)), sort_keys=False, allow_unicode=True)
    intro = f"Compared with `{name}`, the recipe that follows the paper" + (":" if lines else ": none.")
    if not name:
        intro = "The paper has no recipe of this kind."
    return "\n".join(
        [
            intro,
            "",
            *lines,
            "",
            "<details><summary>The whole recipe</summary>",
            "",
            "```yaml",
            full + "```",
            "",
            "</details>",
        ]
    )


def _without_paths(value: Any) -> Any:
    """Shorten local paths to their last part, because a card may be published."""
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    is_path = isinstance(value, str) and value.removeprefix("run:").startswith(("/", "~"))
    return Path(value).name if is_path else value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return f"`{text if len(text) <= 80 else text[:77] + '...'}`"


def _hub_sets(value: Any) -> list[str]:
    """Return every `hub:OWNER/NAME` that the recipe names."""
    if isinstance(value, Mapping):
        return sorted({name for inner in value.values() for name in _hub_sets(inner)})
    if isinstance(value, list):
        return sorted({name for inner in value for name in _hub_sets(inner)})
    return [value.removeprefix("hub:").split("@")[0]] if isinstance(value, str) and value.startswith("hub:") else []
