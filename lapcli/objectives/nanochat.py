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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lapcli import checkpoint
from lapcli.checkpoint import check_tensors
from lapcli.data.text.tokenizer import Tokenizer, tokenizer_from_ranks
from lapcli.models.gpt import GPT, GPTConfig, from_nanochat
from lapcli.recipe import recipe_from_dict
from lapcli.recipe.loading import check_recipe
from lapcli.recipe.reading import Document
from lapcli.recipe.schema import UNKNOWN, BaseRecipe, GPTModel
from lapcli.runs import INFO, METRICS, TOKENIZER, Run, open_run, read_run, unlock, write_summary
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import remove, sha256_of_file, write_text

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.pkl")
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
_SHOWN = 8  # names in a message
# The only classes that a pickle may name.
_ADMITTED = {("tiktoken.core", "Encoding"), ("tiktoken", "Encoding")}


@dataclass(frozen=True)
class NanochatCheckpoint:
    file: Path
    step: int
    model: GPTModel
    vocab: int
    meta: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether it was trained on conversations, as told by its folder, else by a metric of fine-tuning."""
        folders = " ".join(self.file.resolve().parts[-3:-1])
        if "_checkpoints" in folders:
            return "base_checkpoints" not in folders
        return "mmlu_acc" in self.meta


def find_checkpoint(path: Path) -> NanochatCheckpoint:
    """Read a `model_*.pt` with its `meta_*.json`; in a folder, that of the last step."""
    file = path
    if path.is_dir():
        files = [each for each in path.iterdir() if _MODEL.fullmatch(each.name)]
        if not files:
            inside = sorted({each.parent.name for each in path.glob("*/model_*.pt")})
            hint = f"name one of its folders: {', '.join(inside[:_SHOWN])}" if inside else "name another folder"
            raise UsageError(f"{path} has no model_*.pt of nanochat; {hint}")
        file = max(files, key=lambda each: int(each.stem.rpartition("_")[2]))
    if not file.is_file():
        raise UsageError(f"there is no file {file}; name a model_*.pt of nanochat, or its folder")
    number = _MODEL.fullmatch(file.name)
    if number is None:
        raise UsageError(f"{file} is not a checkpoint of nanochat; their names are like model_021400.pt")
    meta_file = file.with_name(f"meta_{number[1]}.json")
    try:
        meta = json.loads(meta_file.read_text(encoding="utf-8"))
        settings = dict(meta["model_config"])
        vocab = int(settings.pop("vocab_size"))
    except OSError as error:
        raise DataError(
            f"{meta_file}, which says how the model is built, cannot be read ({error.strerror}); put it beside {file}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{meta_file} has no model_config of nanochat; download the file again") from None
    if unknown := [key for key in settings if key not in _SETTINGS]:
        raise DataError(f"{meta_file} has unknown settings in model_config: {listed(unknown)}; {_OF_2026}")
    return NanochatCheckpoint(file, int(number[1]), _model(settings, meta_file), vocab, meta)


def _model(settings: Mapping[str, Any], file: Path) -> GPTModel:
    """Return the model as it was trained: rotary tables in bf16, the constants of late 2025."""
    renamed = {_SETTINGS[key]: value for key, value in settings.items()}
    values = {**renamed, "rotary_base": 10_000.0, "rotary_precision": "bf16", "softcap": 15.0}
    model, problems = check_recipe(GPTModel, Document(values, {(): str(file)}))
    if model is None:
        raise DataError(f"{file} does not describe a GPT: {problems[0].key} {problems[0].message}; download it again")
    return model


def read_weights(source: NanochatCheckpoint) -> dict[str, Tensor]:
    """Read the tensors under our names, in the dtypes of the file, without rows that pad the vocabulary."""
    again = "download the file again, or name another"
    try:
        state = torch.load(source.file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch raise many kinds
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"{source.file} cannot be read as weights ({reason[:200]}); {again}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()) or not state:
        raise DataError(f"{source.file} does not hold tensors by name; {again}")
    names = {name: from_nanochat(str(name)) for name in state}
    if unknown := [str(name) for name, ours in names.items() if ours is None]:
        raise DataError(f"{source.file} has unknown tensors: {listed(unknown)}; {_OF_2026}")
    tensors = {str(names[name]): tensor for name, tensor in state.items()}
    # nanochat pads the vocabulary to a multiple of 64, and cuts the logits (gpt.py). A view would keep the padding.
    for name in ("embed.weight", "head.weight"):
        if name in tensors and len(tensors[name]) >= source.vocab:
            tensors[name] = tensors[name][: source.vocab].clone()
    return tensors


def find_tokenizer(file: Path) -> Path | None:
    """Find the tokenizer beside the checkpoint, or in `tokenizer/` of nanochat's base folder."""
    folders = (file.parent, *(parent / "tokenizer" for parent in (file.parent, *file.resolve().parents[1:3])))
    candidates = [folder / name for folder in folders for name in TOKENIZER_FILES]
    return next((path for path in candidates if path.is_file()), None)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, or a pickled tiktoken encoding, of which only plain data is read."""
    if path.suffix != ".pkl":
        return Tokenizer.from_file(path)
    try:
        encoding = _PlainEncoding(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path} ({error.strerror}); name it with --tokenizer") from None
    except Exception as error:  # a broken or hostile pickle may raise anything
        raise DataError(f"{path} is not a pickled tiktoken encoding ({str(error)[:200]}); {_ANOTHER}") from None
    state = encoding.state if isinstance(encoding, _Encoding) else None
    tables = state if isinstance(state, dict) else {}
    ranks, pattern, special = (tables.get(key) for key in ("mergeable_ranks", "pat_str", "special_tokens"))
    if not (_maps(ranks, bytes) and isinstance(pattern, str) and _maps(special, str)):
        raise DataError(f"{path} is a pickled tiktoken encoding without its tables; {_ANOTHER}")
    try:
        return tokenizer_from_ranks(ranks, pattern, special)  # type: ignore[arg-type]
    except DataError as error:
        raise DataError(f"{path} is not a tokenizer of nanochat: {error}; {_ANOTHER}") from None


_ANOTHER = "name another with --tokenizer, a tokenizer.json or tokenizer.pkl"


class _Encoding:
    """Stands in for tiktoken's class while a pickle is read; it only stores the state."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _PlainEncoding(pickle.Unpickler):
    """An unpickler that accepts only tiktoken's class, as plain data, and refuses anything else to call."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it references {module}.{name}, which is not allowed")
        return _Encoding


def _maps(value: Any, key: type) -> bool:
    return isinstance(value, dict) and all(type(k) is key and type(v) is int for k, v in value.items())


def listed(names: list[str]) -> str:
    """List the first names, and say how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:80] for name in names[:_SHOWN]) + more


AGAIN = "download the checkpoint again, or name another"


def import_checkpoint(path: Path, runs_dir: Path, name: str, *, tokenizer: Path | None = None) -> tuple[Run, bool]:
    """Import a checkpoint; return the finished run, and whether it is new: repeating an import changes nothing."""
    source = find_checkpoint(path)
    sha256 = sha256_of_file(source.file)
    if (runs_dir / name / INFO).is_file():
        existing = read_run(runs_dir / name)
        if (existing.info.get("imported_from") or {}).get("sha256") != sha256 or existing.status == "running":
            raise UsageError(f"{existing.path} is another run; choose another name with --to")
        if existing.is_finished:
            return existing, False
        remove(existing.path)  # left by an import that was killed
    text_tokenizer = _tokenizer(source, tokenizer)
    tensors = read_weights(source)
    _check(source, tensors)
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


def _tokenizer(source: NanochatCheckpoint, given: Path | None) -> Tokenizer:
    path = given or find_tokenizer(source.file)
    if path is None:
        raise UsageError(
            f"there is no tokenizer.pkl or tokenizer.json beside {source.file} or in nanochat's tokenizer folder; "
            "name it with --tokenizer"
        )
    if not path.is_file():
        raise UsageError(f"there is no file {path}; --tokenizer takes a tokenizer.json or nanochat's tokenizer.pkl")
    tokenizer = read_tokenizer(path)
    if tokenizer.vocab_size != source.vocab:
        raise UsageError(
            f"{path} has {tokenizer.vocab_size:,} tokens, but the model has {source.vocab:,}; name its tokenizer with "
            "--tokenizer"
        )
    return tokenizer


def _check(source: NanochatCheckpoint, tensors: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.model.model_dump(), vocab=source.vocab), is_drawn=False)
    check_tensors(source.file, tensors, model.state_dict(), AGAIN)


def _recipe(source: NanochatCheckpoint) -> BaseRecipe:
    """Build a recipe from the known training settings; the training data is unknown."""
    user = source.meta.get("user_config")
    settings = user if isinstance(user, dict) else {}
    batch = _count(settings.get("total_batch_size"), source.model.context)
    micro_batch = min(batch, _count(settings.get("device_batch_size")))
    values: dict[str, Any] = {
        "objective": "language_model",
        "model": source.model.model_dump(mode="json"),
        "tokenizer": {"vocab": source.vocab},
        "train": {"steps": max(1, source.step), "batch": batch, "micro_batch": micro_batch},
    }
    if not source.is_chat:
        return recipe_from_dict({**values, "data": {"train": UNKNOWN}})  # type: ignore[return-value]
    of_midtraining = any("mid_checkpoints" in part for part in source.file.resolve().parts)
    chat: dict[str, Any] = {
        "objective": "chat",
        "stage": "midtrain" if of_midtraining else "sft",
        "mixture": [{"name": "unknown", "format": "conversations", "source": UNKNOWN}],
        # As mid_train.py and chat_sft.py train: the former discards the mask of the assistant's tokens.
        "loss": "all" if of_midtraining else "assistant",
        "batching": "packed" if of_midtraining else "padded",
        "optimizer": {},
        "schedule": {},
        "validation": {},
    }
    return recipe_from_dict({**values, **chat})  # type: ignore[return-value]


def _count(value: Any, unit: int = 1) -> int:
    return max(1, value // unit) if type(value) is int else 1
