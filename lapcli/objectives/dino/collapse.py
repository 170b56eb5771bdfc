"""Signs of a collapse: a network that gives the same answer to every image has nothing left to learn from.

teacher_entropy     of the targets of class tokens, as a share of ln K: 1 if every target is uniform
prototypes_used     prototypes that are some image's first choice, as a share of as many as could be
feature_variance    of the teacher's class tokens, brought to length 1: 1 - |mean|^2, 0 if all are one vector
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

#: Beyond these a collapse is named. Targets of a healthy run are peaked, its features far apart.
LEAST_VARIANCE = 1e-3
MOST_ENTROPY = 0.999


@torch.no_grad()
def teacher_health(tokens_MC: Tensor, targets_MK: Tensor) -> dict[str, Tensor]:
    """The three numbers for the teacher's class tokens and their targets."""
    M, K = targets_MK.shape
    mean_C = F.normalize(tokens_MC.float(), dim=1).mean(0)
    chunks = targets_MK.split(max(1, 2**22 // K))
    return {
        "teacher_entropy": torch.stack([torch.special.entr(part).sum() for part in chunks]).sum() / (M * math.log(K)),
        "prototypes_used": mean_C.new_zeros(K).index_fill_(0, targets_MK.argmax(1), 1.0).sum() / min(M, K),
        "feature_variance": 1 - mean_C.square().sum(),
    }


def collapse(values: dict[str, float], images: int) -> str | None:
    """What has collapsed, in words; none if nothing has. One image alone cannot tell."""
    if images < 2:
        return None
    if values["feature_variance"] < LEAST_VARIANCE:
        return (
            f"collapse: all class tokens point the same way (feature variance {values['feature_variance']:.1e}); "
            "lower the learning rate or the teacher's momentum"
        )
    if values["teacher_entropy"] > MOST_ENTROPY:
        return (
            f"collapse: the teacher's targets are uniform (entropy {values['teacher_entropy']:.4f} of ln K); "
            "lower the teacher's temperature or the learning rate"
        )
    if values["prototypes_used"] * images <= 1:
        return "collapse: one prototype is the first choice of every image; raise train.sinkhorn_iterations"
    return None
