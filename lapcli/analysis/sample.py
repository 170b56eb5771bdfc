"""A seeded sample of tokens, for figures that are of the tokens themselves.

Every token has a random number keyed by (seed, its sequence), and those with the smallest are kept: the same tokens in
every layer and whatever the batch size is.
"""

import numpy as np
import torch
from torch import Tensor

POINTS = 2000


class TokenSample:
    """At most `size` tokens of the classes in `classes`."""

    def __init__(self, classes: list[int], seed: int, size: int = POINTS) -> None:
        self._classes, self._seed, self._size = np.array(sorted(classes)), seed, size
        self._key = np.empty(0)
        self._class = np.empty(0, dtype=np.int64)
        self._tokens: np.ndarray | None = None

    def update(self, tokens_BTD: Tensor, labels: Tensor, first: int) -> None:
        """Labels: B of sequences, or B x T of tokens; `first` is the number of the first sequence."""
        B, T, D = tokens_BTD.shape
        labels_BT = labels.cpu().numpy() if labels.ndim == 2 else np.repeat(labels.cpu().numpy()[:, None], T, axis=1)
        key_BT = np.stack([np.random.default_rng([self._seed, first + row]).random(T) for row in range(B)])
        wanted = np.isin(labels_BT, self._classes).reshape(-1)
        if len(self._key) == self._size:  # most tokens are late for a full sample; they are not copied
            wanted &= key_BT.reshape(-1) < self._key.max()
        rows = np.flatnonzero(wanted)
        here = tokens_BTD.reshape(B * T, D)[torch.from_numpy(rows).to(tokens_BTD.device)].cpu().numpy()
        key = np.concatenate([self._key, key_BT.reshape(-1)[rows]])
        label = np.concatenate([self._class, labels_BT.reshape(-1)[rows]])
        tokens = here if self._tokens is None else np.concatenate([self._tokens, here])
        order = np.argsort(key, kind="stable")[: self._size]
        self._key, self._class, self._tokens = key[order], label[order], tokens[order]

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """N x D tokens and their N classes."""
        return (np.empty((0, 0)) if self._tokens is None else self._tokens), self._class
