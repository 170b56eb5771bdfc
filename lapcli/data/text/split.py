"""Which documents are held out for validation, and in what order the rest is read. All of it computed from the seed."""

import math

import numpy as np

from lapcli.runtime.errors import DataError


def document_order(count: int, seed: int, purpose: str) -> np.ndarray:
    """A permutation of `count` documents, its own for each purpose."""
    return np.random.default_rng([seed, *purpose.encode()]).permutation(count)


def held_out(count: int, fraction: float, seed: int | None) -> np.ndarray:
    """bool [count]: the documents of validation, at least one and never all.

    They are the last ones of the shuffled order, or of the source's own where it is in random order already (no seed).
    """
    held = min(max(math.ceil(count * fraction), 1), count - 1)
    order = np.arange(count) if seed is None else document_order(count, seed, "validation")
    mask = np.zeros(count, dtype=bool)
    mask[order[count - held :]] = True
    return mask


def cut_in_two(document: str, fraction: float) -> tuple[str, str]:
    """One document as a part to train on and a last part to validate on, cut after a newline or else a space."""
    if len(document) < 2:
        raise DataError("the text is a single character, which cannot be trained and validated on; give more text")
    target = min(max(round(len(document) * (1 - fraction)), 1), len(document) - 1)
    for mark in ("\n", " "):
        before = document.rfind(mark, 0, target) + 1
        after = document.find(mark, target, -1) + 1
        # The nearer of both, but not one so far off that another share would be held out.
        near = [cut for cut in (before, after) if cut and abs(cut - target) <= min(target, len(document) - target) / 2]
        if near:
            target = min(near, key=lambda cut: abs(cut - target))
            break
    return document[:target], document[target:]
