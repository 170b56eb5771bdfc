"""Transformers with Laplacian heads: `I - P` in place of the softmax matrix `P` in some attention heads."""

from typing import TYPE_CHECKING, Any

from lapcli.runtime import __version__ as __version__

if TYPE_CHECKING:
    from lapcli.api import laplacianize as laplacianize
    from lapcli.api import load as load
    from lapcli.api import results as results
    from lapcli.api import train as train

_API = ("laplacianize", "load", "results", "train")


def __getattr__(name: str) -> Any:
    """The functions of lapcli/api.py, imported on first access: torch and timm take seconds."""
    if name in _API:
        from lapcli import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_API]
