"""Transformers with Laplacian heads: `I - P` in place of the softmax matrix `P` in some attention heads."""

from typing import TYPE_CHECKING, Any

from lapcli.runtime import __version__ as __version__

if TYPE_CHECKING:
    from lapcli.heads.transformers_attention import laplacianize as laplacianize


def __getattr__(name: str) -> Any:
    """`lapcli.laplacianize`, imported when it is asked for: timm takes seconds, the command line must not."""
    if name == "laplacianize":
        from lapcli.heads.transformers_attention import laplacianize

        return laplacianize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
