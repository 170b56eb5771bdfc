"""Checkpoints of nanochat of late 2025 and of the author's fork of it: weights, settings and tokenizer, and
`lap import`, which turns one into a finished run.

    BASE/base_checkpoints/d20/model_021400.pt     tensors by name
                              meta_021400.json    model_config; the fork's has laplacian_heads too
    BASE/tokenizer/tokenizer.pkl                  a pickled `tiktoken.Encoding`

The architecture of 2026, and of the author's later fork, has the same names for these tensors and further tensors,
multiplies queries and keys by 1.2, and has another rotary base, without a setting for either. It is recognised by its
further tensors and settings and refused: the weights would load, but compute another function.
"""

import io
import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli import checkpoint
from lapcli.checkpoint import check_tensors
from lapcli.data.text.tokenizer import Tokenizer, tokenizer_from_ranks
from lapcli.models.gpt import GPT, GPTConfig, from_nanochat
from lapcli.objectives.weights import listed
from lapcli.recipe import recipe_from_dict
from lapcli.recipe.loading import check_recipe
from lapcli.recipe.reading import Document
from lapcli.recipe.schema import UNKNOWN, BaseRecipe, GPTModel
from lapcli.runs import INFO, METRICS, TOKENIZER, Run, open_run, read_run, unlock, write_summary
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import remove, sha256_of_file, write_text

_MODEL = re.compile(r"model_(\d+)\.pt")
#: `model_config` of late 2025; the fork adds the last.
_SETTINGS = {
    "sequence_len": "context",
    "n_layer": "layers",
    "n_head": "heads",
    "n_kv_head": "kv_heads",
    "n_embd": "width",
    "laplacian_heads": "laplacian_heads",
}
_OF_2026 = (
    "it is not nanochat's model of late 2025, the only one that lap supports (the model of 2026 and the author's later "
    "fork multiply queries and keys by 1.2 and have another rotary base); name a checkpoint of late 2025"
)
_AGAIN = "download the checkpoint again, or name another"
_ANOTHER = "put another tokenizer.json or tokenizer.pkl beside the checkpoint"


@dataclass(frozen=True)
class NanochatCheckpoint:
    file: Path
    step: int
    model: GPTModel
    vocab: int
    is_chat: bool  # trained on conversations


def import_checkpoint(path: Path, runs_dir: Path, name: str) -> tuple[Run, bool]:
    """Import a checkpoint; return the finished run, and whether it is new: a repeated import has no effect."""
    source = _find(path)
    sha256 = sha256_of_file(source.file)
    if (runs_dir / name / INFO).is_file():
        existing = read_run(runs_dir / name)
        if (existing.info.get("imported_from") or {}).get("sha256") != sha256 or existing.status == "running":
            raise UsageError(f"{existing.path} is another run; choose another name with --to")
        if existing.is_finished:
            return existing, False
        remove(existing.path)  # left by an import that was killed
    text_tokenizer = _tokenizer(source)
    tensors = _weights(source)
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.model.model_dump(), vocab=source.vocab), is_initialised=False)
    check_tensors(source.file, tensors, model.state_dict(), _AGAIN)
    imported_from = {"file": str(source.file), "sha256": sha256}
    run = open_run(runs_dir, name, _recipe(source))
    try:
        run.update(imported_from=imported_from)
        text_tokenizer.save(run.path / TOKENIZER)
        saved = checkpoint.save(
            run.checkpoints,
            source.step,
            tensors,
            {},  # the optimizer's state is not imported
            {"laplacian_heads": str(source.model.head_plan()), "tokenizer_sha256": text_tokenizer.sha256},
            {},
            keep=1,
        )
        write_text(run.path / METRICS, "")
        write_summary(run, {})
        run.update(
            status="finished",
            step=source.step,
            steps=source.step,
            weights_sha256=saved.weights_sha256,
            tokenizer_sha256=text_tokenizer.sha256,
            data="not known: the run was imported",
            # `lap eval --protocol paper` asks in the words of the fine-tuning.
            **({"prompt_form": "nanochat"} if source.is_chat else {}),
        )
    except BaseException:
        remove(run.path, or_leave=True)
        raise
    finally:
        unlock(run)
    return read_run(run.path), True


def _find(path: Path) -> NanochatCheckpoint:
    """Read a `model_*.pt` with its `meta_*.json`; in a folder, that of the last step."""
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("model_*.pt"))
        if not files:
            raise UsageError(f"{path} has no model_*.pt of nanochat; name another folder, such as base_checkpoints/d20")
    file = files[-1]  # the steps in the names have six digits
    number = _MODEL.fullmatch(file.name)
    if number is None or not file.is_file():
        raise UsageError(f"there is no checkpoint {file}; name a file like model_021400.pt of nanochat, or its folder")
    meta_file = file.with_name(f"meta_{number[1]}.json")
    try:
        meta = json.loads(meta_file.read_text(encoding="utf-8"))
        settings = dict(meta["model_config"])
        vocab = int(settings.pop("vocab_size"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{meta_file}, which says how the model is built, cannot be read ({error!r}); put it beside {file}"
        ) from None
    if unknown := [key for key in settings if key not in _SETTINGS]:
        raise DataError(f"{meta_file} has unknown settings in model_config: {listed(unknown)}; {_OF_2026}")
    # The training settings: rotary tables in bf16, the constants of late 2025.
    values = {_SETTINGS[key]: value for key, value in settings.items()}
    values |= {"rotary_base": 10_000.0, "rotary_precision": "bf16", "softcap": 15.0}
    model, problems = check_recipe(GPTModel, Document(values, {(): str(meta_file)}))
    if model is None:
        raise DataError(f"{meta_file} does not describe a GPT: {problems[0].key} {problems[0].message}; {_AGAIN}")
    # Determined by nanochat's folders, else by a fine-tuning metric.
    folders = " ".join(file.resolve().parts[-3:-1])
    is_chat = "base_checkpoints" not in folders if "_checkpoints" in folders else "mmlu_acc" in meta
    return NanochatCheckpoint(file, int(number[1]), model, vocab, is_chat)


def _weights(source: NanochatCheckpoint) -> dict[str, Tensor]:
    """Read the tensors under our names, in the dtypes of the file, without rows that pad the vocabulary."""
    try:
        state = torch.load(source.file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch raise many kinds
        raise DataError(f"{source.file} cannot be read as weights ({str(error)[:200]!r}); {_AGAIN}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()) or not state:
        raise DataError(f"{source.file} does not hold tensors by name; {_AGAIN}")
    names = {name: from_nanochat(str(name)) for name in state}
    if unknown := [str(name) for name, ours in names.items() if ours is None]:
        raise DataError(f"{source.file} has unknown tensors: {listed(unknown)}; {_OF_2026}")
    tensors = {str(names[name]): tensor for name, tensor in state.items()}
    # nanochat pads the vocabulary to a multiple of 64 and truncates the logits (gpt.py). A view would keep the padding.
    for name in ("embed.weight", "head.weight"):
        if name in tensors and len(tensors[name]) >= source.vocab:
            tensors[name] = tensors[name][: source.vocab].clone()
    return tensors


def _tokenizer(source: NanochatCheckpoint) -> Tokenizer:
    """Read the tokenizer beside the checkpoint or in `tokenizer/` of nanochat's base folder."""
    parents = source.file.parent, *source.file.resolve().parents[1:3]
    folders = source.file.parent, *(parent / "tokenizer" for parent in parents)
    beside = [folder / name for folder in folders for name in ("tokenizer.json", "tokenizer.pkl")]
    path = next((each for each in beside if each.is_file()), None)
    if path is None:
        raise UsageError(f"there is no tokenizer.pkl or tokenizer.json beside {source.file}; put nanochat's there")
    tokenizer = read_tokenizer(path)
    if tokenizer.vocab_size != source.vocab:
        raise UsageError(
            f"{path} has {tokenizer.vocab_size:,} tokens, but the model has {source.vocab:,}; put its tokenizer "
            "beside the checkpoint"
        )
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, or a pickled tiktoken encoding, of which only plain data is read."""
    if path.suffix != ".pkl":
        return Tokenizer.from_file(path)
    try:
        encoding = _PlainEncoding(io.BytesIO(path.read_bytes())).load()
        tables = dict(encoding.state)
        ranks, pattern, special = (tables[key] for key in ("mergeable_ranks", "pat_str", "special_tokens"))
        for table, kind in ((ranks, bytes), (special, str)):
            if not all(type(key) is kind and type(value) is int for key, value in dict(table).items()):
                raise TypeError("its tables have other types")
        return tokenizer_from_ranks(ranks, str(pattern), special)
    except Exception as error:  # a broken or hostile pickle may raise anything
        raise DataError(f"{path} is not a pickled tiktoken encoding ({str(error)[:200]}); {_ANOTHER}") from None


class _Encoding:
    """Stands in for tiktoken's class while a pickle is read; it only stores the state."""

    state: Any = ()

    def __setstate__(self, state: object) -> None:
        self.state = state


class _PlainEncoding(pickle.Unpickler):
    """An unpickler that accepts only tiktoken's class, as plain data, and refuses to call anything else."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in {("tiktoken.core", "Encoding"), ("tiktoken", "Encoding")}:
            raise pickle.UnpicklingError(f"it references {module}.{name}, which is not allowed")
        return _Encoding


def _recipe(source: NanochatCheckpoint) -> BaseRecipe:
    """Build a recipe from the known settings: training data and batch are unknown."""
    values: dict[str, Any] = {
        "objective": "language_model",
        "model": source.model.model_dump(mode="json"),
        "tokenizer": {"vocab": source.vocab},
        "train": {"steps": max(1, source.step), "batch": 1, "micro_batch": 1},
    }
    if not source.is_chat:
        return recipe_from_dict({**values, "data": {"train": UNKNOWN}})  # type: ignore[return-value]
    of_midtraining = any("mid_checkpoints" in part for part in source.file.resolve().parts)
    chat: dict[str, Any] = {
        "objective": "chat",
        "stage": "midtrain" if of_midtraining else "sft",
        "mixture": [{"name": "unknown", "format": "conversations", "source": UNKNOWN}],
        # As in mid_train.py and chat_sft.py: the former discards the assistant mask.
        "loss": "all" if of_midtraining else "assistant",
        "batching": "packed" if of_midtraining else "padded",
        "optimizer": {},
        "schedule": {},
        "validation": {},
    }
    return recipe_from_dict({**values, **chat})  # type: ignore[return-value]
