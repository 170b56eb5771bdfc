"""The add-one token-bigram model: what a language model has to beat to have learned anything beyond pairs.

p(b | a) = (count(a, b) + 1) / (count(a) + V)
"""

import math

import numpy as np


def bigram_bits_per_byte(train: np.ndarray, validation: np.ndarray, byte_lengths: np.ndarray) -> float:
    """Of the validation stream, by the counts of the training stream; targets without bytes do not count."""
    vocab = len(byte_lengths)
    pairs, counts = np.unique(train[:-1].astype(np.int64) * vocab + train[1:], return_counts=True)
    firsts = np.bincount(train[:-1], minlength=vocab)
    a, b = validation[:-1].astype(np.int64), validation[1:].astype(np.int64)
    wanted = a * vocab + b
    found = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    seen = np.where(pairs[found] == wanted, counts[found], 0)
    nats = np.log(firsts[a] + vocab) - np.log(seen + 1)
    lengths = byte_lengths[b]
    return float(nats[lengths > 0].sum() / (math.log(2) * lengths.sum()))
