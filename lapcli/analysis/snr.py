"""Mean-to-spread ratio of a sequence's tokens after the norm before the MLP (SNR of appendix C).

ave_b  |mean_t x_t| / sqrt(mean_t |x_t - mean|^2)
"""

import torch
from torch import Tensor

from lapcli.analysis.found import Found
from lapcli.analysis.running import Running


def signal_to_noise(tokens_BTD: Tensor) -> Tensor:
    """One number a sequence; not a number where the tokens do not vary."""
    mean_BD = tokens_BTD.mean(dim=1)
    variance_B = (tokens_BTD - mean_BD[:, None]).square().sum(dim=2).mean(dim=1)
    length_B = mean_BD.norm(dim=1)
    varies_B = variance_B > 1e-20 * length_B.square()
    return torch.where(varies_B, length_B / variance_B.sqrt(), torch.nan)


class SignalToNoise:
    def __init__(self) -> None:
        self._ratio = Running()
        self._sequences = 0

    def update(self, tokens_BTD: Tensor) -> None:
        self._ratio.update(signal_to_noise(tokens_BTD)[:, None])
        self._sequences += len(tokens_BTD)

    def result(self) -> Found:
        assert self._ratio.count_D is not None
        known = int(self._ratio.count_D[0])
        found = Found(
            {
                "snr": float(self._ratio.mean_D[0]) if known else None,
                "snr_std": float(self._ratio.std_D[0]) if known else None,
            }
        )
        if known < self._sequences:
            found.notes.append(
                f"the tokens of {self._sequences - known:,} of {self._sequences:,} sequences are all equal: "
                "their spread is 0, and they are left out"
            )
        return found
