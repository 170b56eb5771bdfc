"""Linear classifiers on frozen features, one for each learning rate, trained side by side as one matrix product.

Shapes: B images, D features, R learning rates, K classes.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

INITIAL_STD = 0.01


class LinearProbes:
    """SGD with momentum and no weight decay on the cross entropy, each rate along a cosine to 0.

    All rates start from the same weights, so that a rate's result does not depend on which others are beside it.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        rates: Sequence[float],
        *,
        steps: int,
        seed: int,
        device: torch.device,
        momentum: float = 0.9,
    ) -> None:
        start_KD = torch.randn(classes, width, generator=torch.Generator().manual_seed(seed)) * INITIAL_STD
        self.weight_RKD = start_KD.repeat(len(rates), 1, 1).to(device)
        self.bias_RK = torch.zeros(len(rates), classes, device=device)
        self._speed = (torch.zeros_like(self.weight_RKD), torch.zeros_like(self.bias_RK))
        self._rates_R = torch.tensor(rates, dtype=torch.float32, device=device)
        self._momentum, self._steps, self.step_number = momentum, steps, 0

    @torch.no_grad()
    def logits(self, features_BD: Tensor) -> Tensor:
        """(B, R, K), of all classifiers at once."""
        rates, classes, _ = self.weight_RKD.shape
        flat = torch.addmm(self.bias_RK.reshape(-1), features_BD, self.weight_RKD.flatten(0, 1).T)
        return flat.view(len(features_BD), rates, classes)

    @torch.no_grad()
    def step(self, features_BD: Tensor, labels_B: Tensor) -> Tensor:
        """One update of every classifier; the mean cross entropy of each before it.

        The gradient of the mean cross entropy with respect to the logits is (softmax - one-hot) / B.
        """
        log_share_BRK = F.log_softmax(self.logits(features_BD), dim=2)
        rows_B = torch.arange(len(labels_B), device=labels_B.device)
        loss_R = -log_share_BRK[rows_B, :, labels_B].mean(dim=0)
        error_BRK = log_share_BRK.exp_()
        error_BRK[rows_B, :, labels_B] -= 1
        error_BRK /= len(labels_B)
        gradients = (
            (error_BRK.flatten(1).T @ features_BD).view_as(self.weight_RKD),
            error_BRK.sum(dim=0),
        )
        rate_R = self._rates_R * (0.5 * (1 + math.cos(math.pi * self.step_number / self._steps)))
        for value, speed, gradient in zip((self.weight_RKD, self.bias_RK), self._speed, gradients, strict=True):
            speed.mul_(self._momentum).add_(gradient)
            value.sub_(rate_R.view(-1, *[1] * (value.ndim - 1)) * speed)
        self.step_number += 1
        return loss_R

    def is_finite(self) -> list[bool]:
        """Of each rate: whether its classifier is still made of numbers."""
        return [
            bool(torch.isfinite(w).all() and torch.isfinite(b).all())
            for w, b in zip(self.weight_RKD, self.bias_RK, strict=True)
        ]
