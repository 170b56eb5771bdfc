"""Tensors from a file: everything that is loaded into a model or an optimizer is read and checked here.

A hash says that a file is what somebody saved, not that it fits: a moment of another shape would hand a fused optimizer
memory that is not its own, integers would be cast in silence, and one NaN would spread through the training. So names,
shapes, dtypes and values are checked before the first tensor is used, and an error names the tensor.

The rule for dtypes: a tensor has the dtype of what it is loaded into, or both are among float32, bfloat16 and float16;
then it is converted.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from lapcli.runtime.errors import DataError
from lapcli.runtime.files import open_to_read

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REMEDY = "get the file again, or move its checkpoint away so that the one before it is used"


def read_tensors(path: Path, remedy: str = REMEDY) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file. The tensors are the file's pages until they are copied."""
    try:
        with open_to_read(path):  # the library would wait for a pipe
            pass
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
        return metadata, dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is not a readable safetensors file ({error}); {remedy}") from None


def check_tensors(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], remedy: str = REMEDY
) -> list[str]:
    """Refuses what does not fit; returns the names of the tensors that will be converted to another float.

    `expected` gives shapes and dtypes alone; its tensors may be on the meta device.
    """

    def misfit(problem: str) -> DataError:
        return DataError(f"{path} does not fit the model: {problem}; {remedy}")

    missing, unknown = [n for n in expected if n not in tensors], [n for n in tensors if n not in expected]
    for names, problem in ((missing, "is missing from it"), (unknown, "is not a tensor of the model")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise misfit(f"{names[0]}{more} {problem}")
    converted = []
    for name, wanted in expected.items():
        tensor = tensors[name]
        if tensor.shape != wanted.shape:
            raise misfit(f"{name} has shape {_shown(tensor)} and the model's has {_shown(wanted)}")
        if tensor.dtype != wanted.dtype:
            if not (tensor.dtype in FLOATS and wanted.dtype in FLOATS):
                allowed = FLOATS if wanted.dtype in FLOATS else (wanted.dtype,)
                raise misfit(f"{name} is {_name_of(tensor.dtype)}, not {' or '.join(map(_name_of, allowed))}")
            converted.append(name)
    if broken := first_not_finite(tensors):
        raise DataError(f"{path} cannot be used: {broken} has values that are not finite (NaN or infinity); {remedy}")
    return converted


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor with a NaN or an infinity in it. One pass and no copy: NaN goes through `aminmax`."""
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.is_floating_point():
            low, high = torch.aminmax(tensor.detach())
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None


def _shown(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "()"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
