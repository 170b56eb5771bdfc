"""A checkpoint of nanochat, or of the author's fork of it, as a finished run of ours: `lap import`."""

import json
from pathlib import Path
from typing import Any

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.kinds.nanochat import NanochatCheckpoint, find_checkpoint, find_tokenizer, read_tokenizer, read_weights
from lapcli.models.gpt import GPT, GPTConfig
from lapcli.recipe import recipe_from_dict
from lapcli.recipe.schema import UNKNOWN, BaseRecipe
from lapcli.runs import INFO, METRICS, TOKENIZER, Run, new_run, read_run, take_place, write_summary
from lapcli.runs.opening import give_way, unlock
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import sha256_of_file, write_text
from lapcli.training import checkpoint
from lapcli.training.tensors import check_tensors

AGAIN = "get the checkpoint again, or name another"


def import_checkpoint(path: Path, runs_dir: Path, name: str, *, tokenizer: Path | None = None) -> tuple[Run, bool]:
    """The finished run, and whether it is new: the same checkpoint under the same name is left as it is."""
    found = find_checkpoint(path)
    sha256 = sha256_of_file(found.file)
    if (runs_dir / name / INFO).is_file():
        there = read_run(runs_dir / name)
        if (there.info.get("imported_from") or {}).get("sha256") != sha256 or not there.is_finished:
            raise UsageError(f"{there.path} is another run; choose another name with --to")
        return there, False
    words = _tokenizer(found, tokenizer)
    tensors = read_weights(found)
    _check(found, tensors)
    run = new_run(runs_dir, name, _recipe(found))
    try:
        words.save(run.path / TOKENIZER)
        saved = checkpoint.save(
            run.checkpoints,
            found.step,
            tensors,
            {},  # the optimizer's state stays behind
            {"laplacian_heads": str(found.model.head_plan()), "tokenizer_sha256": words.sha256},
            {},
            keep=1,
        )
        write_text(run.path / METRICS, "")
        write_summary(run, {})
        run.update(
            status="finished",
            step=found.step,
            steps=found.step,
            weights_sha256=saved.weights_sha256,
            tokenizer_sha256=words.sha256,
            imported_from={"file": str(found.file), "sha256": sha256, "meta": _plain(found)},
            data="not known: the run was imported",
        )
        take_place(run)
    except BaseException:
        give_way(run)
        raise
    finally:
        unlock(run)
    return read_run(run.path), True


def _tokenizer(found: NanochatCheckpoint, given: Path | None) -> Tokenizer:
    path = given or find_tokenizer(found.file)
    if path is None:
        raise UsageError(
            f"there is no tokenizer.pkl or tokenizer.json beside {found.file} or in nanochat's tokenizer folder; "
            "name it with --tokenizer"
        )
    if not path.is_file():
        raise UsageError(f"there is no file {path}; --tokenizer takes a tokenizer.json or nanochat's tokenizer.pkl")
    tokenizer = read_tokenizer(path)
    if tokenizer.vocab_size != found.vocab:
        raise UsageError(
            f"{path} has {tokenizer.vocab_size:,} tokens, the model {found.vocab:,}; name its own with --tokenizer"
        )
    return tokenizer


def _check(found: NanochatCheckpoint, tensors: dict[str, Any]) -> None:
    import torch

    with torch.device("meta"):
        model = GPT(GPTConfig(**found.model.model_dump(), vocab=found.vocab), is_drawn=False)
    check_tensors(found.file, tensors, model.state_dict(), AGAIN)


def _recipe(found: NanochatCheckpoint) -> BaseRecipe:
    """What is known of the training; the data is not."""
    user = found.meta.get("user_config")
    settings = user if isinstance(user, dict) else {}
    batch = _count(settings.get("total_batch_size"), found.model.context)
    micro_batch = min(batch, _count(settings.get("device_batch_size")))
    values: dict[str, Any] = {
        "objective": "language_model",
        "model": found.model.model_dump(mode="json"),
        "tokenizer": {"vocab": found.vocab},
        "train": {"steps": max(1, found.step), "batch": batch, "micro_batch": micro_batch},
    }
    if not found.is_chat:
        return recipe_from_dict({**values, "data": {"train": UNKNOWN}})  # type: ignore[return-value]
    of_midtraining = any("mid_checkpoints" in part for part in found.file.resolve().parts)
    chat: dict[str, Any] = {
        "objective": "chat",
        "stage": "midtrain" if of_midtraining else "sft",
        "mixture": [{"name": "unknown", "format": "conversations", "source": UNKNOWN}],
        "loss": "all" if of_midtraining else "assistant",
        "batching": "packed" if of_midtraining else "padded",
        "optimizer": {},
        "schedule": {},
        "validation": {},
    }
    return recipe_from_dict({**values, **chat})  # type: ignore[return-value]


def _count(value: Any, unit: int = 1) -> int:
    return max(1, value // unit) if type(value) is int else 1


def _plain(found: NanochatCheckpoint) -> dict[str, Any]:
    """Of meta_*.json what a reader may want to know later; a data loader's state is not."""
    kept = {key: value for key, value in found.meta.items() if isinstance(value, str | int | float | bool | None)}
    return json.loads(json.dumps({**kept, "model_config": found.meta.get("model_config")}, default=str))
