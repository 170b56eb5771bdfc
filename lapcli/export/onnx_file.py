"""The format `onnx`: one graph from tokens to logits, or from images to outputs, with any batch and length.

The graph has no cache: each call computes the whole text.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from lapcli.export.weights import ExportedModel, write_json
from lapcli.models.gpt import GPT
from lapcli.runs import TOKENIZER
from lapcli.runtime.errors import LapError

ONNX = "model.onnx"


def write_onnx(exported: ExportedModel, folder: Path) -> None:
    model: Any = exported.module
    batch, length = torch.export.Dim.DYNAMIC, torch.export.Dim.DYNAMIC
    # Examples have a batch of 2: torch.export specialises dimensions of size 1 to that size.
    if isinstance(model, GPT):
        tokenizer = exported.loaded.tokenizer
        assert tokenizer is not None
        tokenizer.save(folder / TOKENIZER)
        example = torch.zeros(2, min(8, model.config.context), dtype=torch.long)
        names, shape = ("tokens", "logits"), {0: batch, 1: length}
    else:
        size = exported.loaded.image_size
        assert size is not None
        example = torch.zeros(2, 3, size, size)
        names, shape = ("images", "logits" if exported.loaded.classes else "features"), {0: batch}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's exporter calls deprecated functions of its own
            logging.getLogger("torch.onnx").setLevel(logging.ERROR)
            program = torch.onnx.export(
                model,
                (example,),
                input_names=names[:1],
                output_names=names[1:],
                dynamic_shapes=(shape,),
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        # Weights beyond 2 GB, the limit of a protobuf, go to a second file.
        program.save(folder / ONNX)
    except torch.onnx.OnnxExporterError as error:
        raise LapError(f"torch cannot export this model to ONNX ({str(error).splitlines()[0][:200]})") from None
    images = exported.loaded.images
    config: dict[str, Any] = {"input": names[0], "output": names[1], "laplacian_heads": list(exported.plan.per_layer)}
    if images is not None:
        config["images"] = {"size": exported.loaded.image_size, "mean": list(images.mean), "std": list(images.std)}
    write_json(folder / "config.json", config)
