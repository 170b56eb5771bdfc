"""Transformers with Laplacian heads: `I - P` in place of the softmax matrix `P` in some attention heads."""

__version__ = "0.1.0"
