"""Bits per byte, and those of the add-one token-bigram model, a baseline that a language model has to beat to have
learned anything beyond pairs of tokens.

p(b | a) = (count(a, b) + 1) / (count(a) + V)
"""

import math

import numpy as np

from lapcli.runtime.errors import DataError


def bits_per_byte(nats: float, count: float, text: str) -> float:
    """Convert `nats` over `count` bytes. A text without bytes is an error: 0.0 would be the best possible result."""
    if count <= 0:
        raise DataError(f"{text} has no bytes, so that bits per byte are not defined; hold out other or more text")
    return nats / (math.log(2) * count)


def bigram_bits_per_byte(train: np.ndarray, validation: np.ndarray, byte_lengths: np.ndarray) -> float:
    """Predict the validation stream from pairs counted in the training stream; targets without bytes do not count."""
    vocab = len(byte_lengths)
    # int64: tokens may be uint16, and a pair's number exceeds 32 bits for a vocabulary of 65,536.
    pairs, counts = np.unique(train[:-1].astype(np.int64) * vocab + train[1:], return_counts=True)
    firsts = np.bincount(train[:-1], minlength=vocab)
    a, b = validation[:-1].astype(np.int64), validation[1:].astype(np.int64)
    wanted = a * vocab + b
    # A pair beyond the last known one is placed after the end; clipped, it is compared with a pair that differs.
    place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, counts[place], 0)
    nats = np.log(firsts[a] + vocab) - np.log(seen + 1)
    # As in nanochat's loss_eval.py, special tokens (0 bytes) are in neither sum.
    lengths = byte_lengths[b]
    return bits_per_byte(float(nats[lengths > 0].sum()), int(lengths.sum()), "the held-out text")
