"""Smoothness of the tokens on a few fixed sequences, which `validation.smoothing: true` logs during training.

    smoothing_within_sequence_share   ave |x - mean of its sequence|^2 / ave |x - mean of all|^2, after the last block
    smoothing_k_0.99                  components for 99% of the variance within a sequence, after the last block
    smoothing_cosine_layer_N          mean pairwise cosine similarity of a sequence's tokens, after each block
    smoothing_mix_alpha_layer_N_head_M   what an operator has learned for a head, here alpha of mix; gates as their tanh

It costs one forward and one small eigenvalue problem for each sequence. It draws no random numbers, so training
continues as if it had not run.
"""

import torch
from torch import Tensor, nn

from lapcli.heads.operator_attention import HeadOperators
from lapcli.measures.capture import Batch, Capture, Site
from lapcli.measures.tokens import StreamingMoments, cosine_similarity, eigenvalues, k_alpha, within_sequence_share
from lapcli.models.anatomy import Anatomy, anatomy_of

PROBE_SEQUENCES, PROBE_IMAGES = 4, 16


def smoothing(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    """Return values by name, without those that are not defined because all tokens are equal."""
    anatomy = anatomy_of(model)
    last = anatomy.layers - 1
    components, shares = StreamingMoments(), []
    cosines = [StreamingMoments() for _ in range(anatomy.layers)]
    capture = Capture(anatomy)
    for layer, cosine in enumerate(cosines):
        capture.on_tokens(Site(layer), lambda x, _, cosine=cosine: cosine.update(cosine_similarity(x)[:, None]))  # type: ignore[misc]
    capture.on_tokens(Site(last), lambda x, _: components.update(k_alpha(eigenvalues(x), 0.99)[:, None]))
    capture.on_tokens(Site(last), lambda x, _: shares.append(within_sequence_share(x)))
    capture.run([Batch(inputs, None, 0)])
    values = {"smoothing_within_sequence_share": shares[0], "smoothing_k_0.99": components.mean()}
    values |= {f"smoothing_cosine_layer_{layer}": cosine.mean() for layer, cosine in enumerate(cosines)}
    values |= _learnt(anatomy)
    return {name: value for name, value in values.items() if value is not None}


def _learnt(anatomy: Anatomy) -> dict[str, float]:
    """Return the numbers that operators learn for each head; gates that depend on the input are left out."""
    values = {}
    for layer, block in enumerate(anatomy.blocks):
        for operators in (module for module in block.modules() if isinstance(module, HeadOperators)):
            for name, (first, numbers) in operators.learnt_numbers().items():
                for head, number in enumerate(numbers.tolist(), first):
                    values[f"smoothing_{name}_layer_{layer}_head_{head}"] = number
    return values


def without_padding(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Truncate padded rows to the shortest conversation: tokens after the last target of a row are padding."""
    # B x T until `amax`: the column of a target, counted from 1, and 0 where there is none.
    lengths_B = torch.where(targets_BT >= 0, torch.arange(1, targets_BT.shape[1] + 1, device=targets_BT.device), 0)
    # At least two tokens, because the cosine of pairs is not defined for one.
    return tokens_BT[:, : max(2, int(lengths_B.amax(dim=1).min()))]
