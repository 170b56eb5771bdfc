"""The three losses. Crops are stacked crop by crop: [crop, image].

Shapes: G global and L local crops of B images, K prototypes, D bottleneck, C width, N masked patches, P patches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lapcli.objectives.dino.cross_entropy import target_cross_entropy


def dino_loss(
    student_ND: Tensor,
    prototypes_KD: Tensor,
    targets_MK: Tensor,
    images: int,
    temperature: float = 0.1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy between the class tokens of student crops and of the teacher's global crops of the same image.

    A local crop is compared with every global one, a global crop with every other:

        local  = sum over B images, L local and G global crops / (B L G)
        global = sum over B images and pairs of different global crops / (B G (G - 1))
        total  = (L G local + G (G - 1) global) / (L G + G (G - 1))

    With 8 local and 2 global crops the weights are 16/18 and 2/18: all 18 pairs count alike. Rows of the student are
    the G B global crops, then the L B local ones. Returns total, and local and global without a gradient.
    """
    G, crops = len(targets_MK) // images, len(student_ND) // images
    L = crops - G
    local_pairs, global_pairs = L * G, G * (G - 1)
    # Targets of crop c: all global crops but itself, so a global crop skips one; -1 where none is left.
    crop_C1, other_J = (torch.arange(count, device=student_ND.device) for count in (crops, G))
    crop_C1 = crop_C1[:, None]
    crop_CJ = other_J + ((crop_C1 < G) & (other_J >= crop_C1))
    crop_CJ = torch.where(crop_CJ < G, crop_CJ, -1)
    image_B = torch.arange(images, device=student_ND.device)
    rows_CBJ = torch.where(crop_CJ[:, None] >= 0, crop_CJ[:, None] * images + image_B[None, :, None], -1)
    weights_N = targets_MK.new_full((len(student_ND),), 1 / (images * (local_pairs + global_pairs)))
    total, each_N = target_cross_entropy(
        student_ND, prototypes_KD, targets_MK, weights_N, temperature, rows_CBJ.flatten(0, 1)
    )
    among, local = each_N[: G * images].sum(), each_N[G * images :].sum()
    return total, local / max(1, images * local_pairs), among / max(1, images * global_pairs)


def ibot_loss(
    student_ND: Tensor,
    prototypes_KD: Tensor,
    targets_NK: Tensor,
    weights_N: Tensor,
    temperature: float = 0.1,
) -> Tensor:
    """Cross entropy at the masked patches of the M = G B global crops:

        sum over the crops of (mean over the crop's masked patches) / M

    divided by all crops, also by those without a mask. Rows are the masked patches, with their `patch_weights`.
    """
    total, _ = target_cross_entropy(student_ND, prototypes_KD, targets_NK, weights_N, temperature)
    return total


def patch_weights(masks_MP: Tensor, hidden_N: Tensor) -> Tensor:
    """1 / (masked patches of its crop) / (all crops), for each masked patch, by its place among all M P."""
    counts_M = masks_MP.sum(1).clamp(min=1)
    return (1.0 / (counts_M * len(masks_MP)))[hidden_N // masks_MP.shape[1]]


def koleo_loss(tokens_MC: Tensor, crops: int, group: int) -> Tensor:
    """Spreads the class tokens of global crops: -log of the distance to the nearest neighbour.

        sum over crops of  (-1 / B) sum_i log(|x_i - x_nn(i)| + 1e-8),    x of length 1

    The neighbour is looked for among the same crop of the `group` images that the global batch deals together. The sum
    over crops is upstream's mean times 2.
    """
    x = F.normalize(tokens_MC.float(), dim=-1).unflatten(0, (-1, group))  # crops and groups, images, C
    with torch.no_grad():
        dots = x @ x.mT
        dots.diagonal(dim1=1, dim2=2).fill_(-1)
        nearest = dots.argmax(2)
    neighbours = x.gather(1, nearest[:, :, None].expand_as(x))
    distances = F.pairwise_distance(x, neighbours, eps=1e-8)
    return -(distances + 1e-8).log().mean() * crops
