"""A cache whose rows have lengths of their own and come and go while the others continue.

Shapes: L layers, B rows, G key and value heads, S tokens, D head size.
"""

import torch
from torch import Tensor

from lapcli.models.gpt import GPTConfig, KVCache

_GROWTH = 256  # tokens that are added at once


class RowCache(KVCache):
    """Rows grow by one token a step. While all have the same length, no mask is needed and slices suffice."""

    def __init__(self, config: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, rows, 0, dtype, device)
        self.lengths: list[int] = []  # of the rows in use, which are the first ones
        self._at: tuple[Tensor, Tensor] | None = None  # row and place of each new token, where they differ

    @torch.inference_mode()  # as the steps in which the cache may have grown
    def add(self, prefix: KVCache) -> None:
        """A new last row with the tokens of the only row of `prefix`."""
        row, length = len(self.lengths), prefix.position
        self._reserve(length + 1)
        self.k_LBGSD[:, row, :, :length] = prefix.k_LBGSD[:, 0, :, :length]
        self.v_LBGSD[:, row, :, :length] = prefix.v_LBGSD[:, 0, :, :length]
        self.lengths.append(length)

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """The last row takes its place."""
        last = len(self.lengths) - 1
        length = self.lengths.pop()
        if row != last:
            self.k_LBGSD[:, row, :, :length] = self.k_LBGSD[:, last, :, :length]
            self.v_LBGSD[:, row, :, :length] = self.v_LBGSD[:, last, :, :length]
            self.lengths[row] = length

    def positions(self, tokens: int) -> slice | Tensor:
        """Called at the start of a step; prepares what all layers share."""
        if tokens != 1:
            raise ValueError("rows grow by one token at a time")
        self.position = max(self.lengths)
        self._reserve(self.position + 1)
        if min(self.lengths) == self.position:
            self.mask = self._at = None
            return slice(self.position, self.position + 1)
        device = self.k_LBGSD.device
        place_B = torch.tensor(self.lengths, device=device)
        self._at = torch.arange(len(self.lengths), device=device), place_B
        self.mask = (torch.arange(self.position + 1, device=device) <= place_B[:, None])[:, None, None]
        return place_B[:, None]

    def advance(self, tokens: int) -> None:
        self.lengths = [length + tokens for length in self.lengths]
        self.position = max(self.lengths)

    def insert(self, layer: int, k_BG1D: Tensor, v_BG1D: Tensor) -> tuple[Tensor, Tensor]:
        rows, end = len(self.lengths), self.position + 1
        k_BGSD, v_BGSD = self.k_LBGSD[layer, :rows, :, :end], self.v_LBGSD[layer, :rows, :, :end]
        if self._at is None:
            k_BGSD[:, :, self.position :] = k_BG1D
            v_BGSD[:, :, self.position :] = v_BG1D
        else:
            row_B, place_B = self._at
            k_BGSD[row_B, :, place_B] = k_BG1D[:, :, 0]
            v_BGSD[row_B, :, place_B] = v_BG1D[:, :, 0]
        return k_BGSD, v_BGSD

    def _reserve(self, length: int) -> None:
        """Zeros, not whatever the memory held: a masked place still counts as 0 times its value."""
        held = self.k_LBGSD.shape[3]
        if length <= held:
            return
        shape = list(self.k_LBGSD.shape)
        shape[3] = -(-max(length, held + _GROWTH) // _GROWTH) * _GROWTH
        for name in ("k_LBGSD", "v_LBGSD"):
            old: Tensor = getattr(self, name)
            new = torch.zeros(shape, dtype=old.dtype, device=old.device)
            new[:, :, :, :held] = old
            setattr(self, name, new)
