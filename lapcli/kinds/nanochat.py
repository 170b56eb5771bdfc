"""Checkpoints of nanochat, in the form of late 2025, and of the author's fork of it: weights, settings, tokenizer.

    BASE/base_checkpoints/d20/model_021400.pt     tensors by name
                              meta_021400.json    model_config; the fork's has laplacian_heads too
    BASE/tokenizer/tokenizer.pkl                  a pickled `tiktoken.Encoding`

The architecture of 2026 has the same names for these tensors and others beside them, scales queries and keys, and has
another rotary base. It is told by its other tensors and by its other settings, and refused.
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

from lapcli.data.text.tokenizer import Tokenizer, tokenizer_from_ranks
from lapcli.models.gpt_names import from_nanochat
from lapcli.recipe.checking import check_recipe
from lapcli.recipe.reading import Node
from lapcli.recipe.schema import GPTModel
from lapcli.runtime.errors import DataError, UsageError

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
_OF_2026 = "it is of another architecture, such as nanochat's of 2026, which lap does not compute"
_SHOWN = 8  # names in a message
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
        """Whether it was trained on conversations: by its folder, else by what fine-tuning writes down."""
        folders = " ".join(self.file.resolve().parts[-3:-1])
        if "_checkpoints" in folders:
            return "base_checkpoints" not in folders
        return "mmlu_acc" in self.meta


def find_checkpoint(path: Path) -> NanochatCheckpoint:
    """A `model_*.pt` with its `meta_*.json`; of a folder, that of the last step."""
    file = path
    if path.is_dir():
        found = [each for each in path.iterdir() if _MODEL.fullmatch(each.name)]
        if not found:
            inside = sorted({each.parent.name for each in path.glob("*/model_*.pt")})
            hint = f"name one of its folders: {', '.join(inside[:_SHOWN])}" if inside else "name another folder"
            raise UsageError(f"{path} has no model_*.pt of nanochat; {hint}")
        file = max(found, key=lambda each: int(each.stem.rpartition("_")[2]))
    if not file.is_file():
        raise UsageError(f"there is no file {file}; name a model_*.pt of nanochat, or its folder")
    number = _MODEL.fullmatch(file.name)
    if number is None:
        raise UsageError(f"{file} is not a checkpoint of nanochat, which are called model_021400.pt or so")
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
        raise DataError(f"{meta_file} has no model_config of nanochat; get the file again") from None
    if unknown := [key for key in settings if key not in _SETTINGS]:
        raise DataError(f"{meta_file} has the settings {_listed(unknown)} in model_config: {_OF_2026}")
    return NanochatCheckpoint(file, int(number[1]), _model(settings, meta_file), vocab, meta)


def _model(settings: Mapping[str, Any], file: Path) -> GPTModel:
    """As it was trained: rotary tables in bf16, the constants of late 2025."""
    given = {_SETTINGS[key]: value for key, value in settings.items()}
    values = {**given, "rotary_base": 10_000.0, "rotary_precision": "bf16", "softcap": 15.0}
    nodes = {key: _node(value) for key, value in values.items()}
    if problems := check_recipe(GPTModel, Node(nodes, str(file))):
        raise DataError(f"{file} does not describe a GPT: {problems[0].key} {problems[0].message}; get the file again")
    return GPTModel(**values)


def _node(value: Any) -> Node:
    return Node([_node(each) for each in value] if isinstance(value, list) else value, "")


def read_weights(found: NanochatCheckpoint) -> dict[str, Tensor]:
    """The tensors under our names, in the dtypes of the file; rows that pad the vocabulary are left off."""
    again = "get the file again, or name another"
    try:
        state = torch.load(found.file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever pickle, zip or torch raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"{found.file} cannot be read as weights ({reason[:200]}); {again}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()) or not state:
        raise DataError(f"{found.file} holds something else than tensors by name; {again}")
    names = {name: from_nanochat(str(name)) for name in state}
    if unknown := [str(name) for name, ours in names.items() if ours is None]:
        raise DataError(f"{found.file} has tensors that late 2025's model does not: {_listed(unknown)}; {_OF_2026}")
    tensors = {str(names[name]): tensor for name, tensor in state.items()}
    for name in ("embed.weight", "head.weight"):
        if name in tensors and len(tensors[name]) >= found.vocab:
            tensors[name] = tensors[name][: found.vocab].clone()
    return tensors


def find_tokenizer(file: Path) -> Path | None:
    """Beside the checkpoint, or where nanochat keeps it: `tokenizer/` in its base folder."""
    folders = (file.parent, *(parent / "tokenizer" for parent in (file.parent, *file.resolve().parents[1:3])))
    candidates = [folder / name for folder in folders for name in TOKENIZER_FILES]
    return next((path for path in candidates if path.is_file()), None)


def read_tokenizer(path: Path) -> Tokenizer:
    """A `tokenizer.json`, or a pickled tiktoken encoding, of which only plain data is read."""
    if path.suffix != ".pkl":
        return Tokenizer.from_file(path)
    try:
        encoding = _PlainEncoding(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path} ({error.strerror}); name it with --tokenizer") from None
    except Exception as error:  # whatever a broken or hostile pickle raises
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
    """Stands for tiktoken's class while a pickle is read; keeps the state and computes nothing."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _PlainEncoding(pickle.Unpickler):
    """Admits the one class, as plain data; anything else that a pickle could call is refused."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return _Encoding


def _maps(value: Any, key: type) -> bool:
    return isinstance(value, dict) and all(type(k) is key and type(v) is int for k, v in value.items())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:80] for name in names[:_SHOWN]) + more
