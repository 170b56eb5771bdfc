"""Exports the weights of a run: one file per format (transformers, timm, safetensors), all by `export_run`."""

from lapcli.recipe.schema import CLASSES, FEATURES, LANGUAGE
from lapcli.runs import Run
from lapcli.runtime.errors import UsageError

_IMAGES = frozenset({CLASSES, FEATURES})
#: Format -> abilities: a model needs one of these to be exported.
FORMATS: dict[str, frozenset[str]] = {
    "hf": frozenset({LANGUAGE}),
    "timm": _IMAGES,
    "safetensors": _IMAGES | {LANGUAGE},
}


def check_format(run: Run, to: str) -> None:
    if to not in FORMATS:
        raise UsageError(f"--to takes {', '.join(FORMATS)}; got {to[:40]!r}")
    if not FORMATS[to] & run.recipe.gives:
        fitting = " or ".join(name for name, gives in FORMATS.items() if gives & run.recipe.gives)
        raise UsageError(f"{run.path} is a run of {run.recipe.objective}, which {to} does not support; use {fitting}")
