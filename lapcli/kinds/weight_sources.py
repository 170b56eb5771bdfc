"""Weights that a run can start from, by name: their file, what is known about their model, and their tensors.

    run:NAME[@step|best]     a run, finished or not; without a suffix its last checkpoint, as for the run's FOLDER
    timm:NAME                a stock ViT with its pretrained weights, or those of a file
    FOLDER                   an exported folder (hf, timm, safetensors), or one with checkpoints of nanochat
    FILE.pt                  a checkpoint of nanochat or of the author's fork

Tensors are returned under our own names. No code is executed: only safetensors, JSON and pickles of tensors are read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.heads.plan import HeadPlan, head_plan, operator_plan
from lapcli.kinds import nanochat
from lapcli.kinds.kind import RUN
from lapcli.kinds.opening import TIMM, build_timm, find_checkpoint, read_timm, timm_file
from lapcli.models.gpt import from_transformers
from lapcli.recipe import recipe_to_dict
from lapcli.recipe.schema import InitFrom
from lapcli.runs import INFO, TOKENIZER, Run, named_run
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import read_json, sha256_of_file
from lapcli.training.checkpoint import read_tensors

RECORD, CONFIG, WEIGHTS = "lap.json", "config.json", "model.safetensors"  # of an exported folder
AGAIN = "export or download the folder again"


@dataclass(frozen=True)
class WeightSource:
    """Weights by the name of their source; `read` loads them."""

    shown: str  # for people
    file: Path
    sha256: str  # of the file
    read: Callable[[], dict[str, Tensor]] = field(repr=False)
    plan: HeadPlan
    model: Mapping[str, Any]  # what is known about the recipe's `model`
    data: Mapping[str, Any] = field(default_factory=dict)  # ... and about its `data`
    tokenizer: Callable[[], Tokenizer] | None = field(default=None, repr=False)


def find_source(given: InitFrom, runs_dir: Path) -> WeightSource:
    """Find a source; UsageError or DataError with the next step if it is missing, incomplete or of unknown format."""
    source = given.source
    if source.startswith(RUN):
        name, _, which = source.removeprefix(RUN).partition("@")
        return _of_run(named_run(runs_dir, name), which or "last")
    if source.startswith(TIMM):
        return _of_timm(source, None if given.weights is None else Path(given.weights).expanduser())
    path = Path(source).expanduser()
    if (path / INFO).is_file():
        return _of_run(named_run(runs_dir, str(path)), "last")
    if path.is_dir() and any((path / name).exists() for name in (RECORD, CONFIG, WEIGHTS)):
        return _of_folder(path)
    if path.suffix == ".pt" or any(path.glob("model_*.pt")) or any(path.glob("*/model_*.pt")):
        return _of_nanochat(path)
    if path.exists():
        raise UsageError(f"{path} has no weights that lap can read; {_forms()}")
    near = f"; did you mean run:{source}?" if (runs_dir / source.partition("@")[0]).is_dir() else f"; {_forms()}"
    raise UsageError(f"there is no {source[:200]}{near}")


def _forms() -> str:
    return "weights come from run:NAME[@step|best], timm:NAME, an exported folder or a checkpoint of nanochat"


def _of_run(run: Run, which: str) -> WeightSource:
    checkpoint = find_checkpoint(run, which)
    recipe: Any = run.recipe
    values = recipe_to_dict(recipe)
    is_gpt = (run.path / TOKENIZER).is_file()
    return WeightSource(
        shown=f"{run.path}, step {checkpoint.step}",
        file=checkpoint.weights,
        sha256=checkpoint.weights_sha256,
        read=lambda: read_tensors(checkpoint.weights)[1],
        plan=recipe.model.head_plan(),
        model=values["model"],
        data=values.get("data") or {},
        tokenizer=(lambda: _tokenizer_of(run)) if is_gpt else None,
    )


def _tokenizer_of(run: Run) -> Tokenizer:
    tokenizer = Tokenizer.from_file(run.path / TOKENIZER)
    run.check_tokenizer(tokenizer.sha256)
    return tokenizer


def _of_timm(name: str, weights: Path | None) -> WeightSource:
    model: Any = build_timm(name)
    file = timm_file(name, model, weights)
    attention = model.blocks[0].attn
    layers, patches = len(model.blocks), model.patch_embed
    settings = model.pretrained_cfg
    return WeightSource(
        shown=f"{name}, {file.name}",
        file=file,
        sha256=sha256_of_file(file),
        read=lambda: read_timm(model, file),
        plan=head_plan(0, layers, int(attention.num_heads)),
        model={
            "layers": layers,
            "width": int(model.embed_dim),
            "heads": int(attention.num_heads),
            "image": int(patches.img_size[0]),
            "patch": int(patches.patch_size[0]),
        },
        data={key: list(settings[key]) for key in ("mean", "std") if settings.get(key)},
    )


def _of_folder(path: Path) -> WeightSource:
    """Open a folder that `lap export` wrote, after verifying the sha256 of every file that is read."""
    try:
        record = read_json(path / RECORD, AGAIN)
    except FileNotFoundError:
        raise DataError(f"{path} is not a folder that `lap export` wrote: it has no {RECORD}; {_forms()}") from None
    except OSError as error:
        raise DataError(f"{path / RECORD} cannot be read ({error.strerror}); {AGAIN}") from None
    to, files = str(record.get("to")), record.get("files") or {}
    if WEIGHTS not in files:
        raise UsageError(f"{path} was exported to {to}, from which weights cannot be read; use hf, timm or safetensors")
    for name in (CONFIG, WEIGHTS, *([TOKENIZER] if TOKENIZER in files else [])):
        if not (path / name).is_file():
            raise DataError(f"{path} has no {name}; {AGAIN}")
        if sha256_of_file(path / name) != files.get(name):
            raise DataError(f"{path / name} is not what was exported (its sha256 differs); {AGAIN}")
    config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    plan = head_plan(record["laplacian_heads"], len(record["laplacian_heads"]), int(record["heads"]))
    if "operators" in record:  # its Laplacian heads alone are not the plan
        plan = operator_plan(json.loads(record["operators"]), len(plan.per_layer), plan.heads)

    def read() -> dict[str, Tensor]:
        tensors = read_tensors(path / WEIGHTS, AGAIN)[1]
        return {from_transformers(name) or name: tensor for name, tensor in tensors.items()} if to == "hf" else tensors

    model = {"hf": _hf_model, "timm": _timm_model}.get(to, lambda config: config["model"])(config)
    images = config.get("pretrained_cfg") or config.get("images") or {}
    return WeightSource(
        shown=f"{path} ({to}, of the run {record['run']}, step {record['step']})",
        file=path / WEIGHTS,
        sha256=files[WEIGHTS],
        read=read,
        plan=plan,
        model={**model, **plan.recipe_keys()},
        data={key: images[key] for key in ("mean", "std") if key in images},
        tokenizer=(lambda: _exported_tokenizer(path / TOKENIZER)) if TOKENIZER in files else None,
    )


def _exported_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer without the post-processor with which `lap export` puts <|bos|> before every text."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Tokenizer.from_text(json.dumps({**content, "post_processor": None}), path)


def _hf_model(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return {
        "layers": config["num_hidden_layers"],
        "width": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "context": config["max_position_embeddings"],
        "softcap": config["final_logit_softcapping"],
        # Exports with Laplacian heads or bf16 tables have these two keys; transformers' nanochat has rope_parameters.
        "rotary_base": config.get("rotary_base", rope.get("rope_theta")),
        "rotary_precision": config.get("rotary_precision", "float32"),
    }


def _timm_model(config: Mapping[str, Any]) -> dict[str, Any]:
    arguments = config["model_args"]
    names = {"layers": "depth", "width": "embed_dim", "heads": "num_heads", "image": "img_size", "patch": "patch_size"}
    return {ours: arguments[theirs] for ours, theirs in names.items() if theirs in arguments}


def _of_nanochat(path: Path) -> WeightSource:
    checkpoint = nanochat.find_checkpoint(path)
    tokenizer = nanochat.find_tokenizer(checkpoint.file)
    return WeightSource(
        shown=f"{checkpoint.file}, step {checkpoint.step}",
        file=checkpoint.file,
        sha256=sha256_of_file(checkpoint.file),
        read=lambda: nanochat.read_weights(checkpoint),
        plan=checkpoint.model.head_plan(),
        model=checkpoint.model.model_dump(mode="json"),
        tokenizer=None if tokenizer is None else (lambda: nanochat.read_tokenizer(tokenizer)),
    )
