"""How smooth the tokens are, on a few fixed sequences: what `validation.smoothing: true` logs during training.

    smoothing_within_sequence_share   ave |x - mean of its sequence|^2 / ave |x - mean of all|^2, after the last block
    smoothing_k_0.99                  components for 99% of the variance within a sequence, after the last block
    smoothing_cosine_layer_N          mean pairwise cosine similarity of a sequence's tokens, after each block

One forward and one small eigenvalue problem a sequence; nothing is drawn, so training goes on as if it had not been.
"""

import torch
from torch import Tensor, nn

from lapcli.analysis.anatomy import anatomy_of
from lapcli.analysis.capture import Batch, Capture, Site
from lapcli.analysis.cosine import CosineSimilarity
from lapcli.analysis.found import Value, share
from lapcli.analysis.spectrum import Spectrum

SEQUENCES, IMAGES = 4, 16  # of the probe


def smoothing(model: nn.Module, inputs: Tensor) -> dict[str, float]:
    """By name; what is not defined (all tokens equal) is left out."""
    anatomy = anatomy_of(model)
    last = anatomy.layers - 1
    cosines = [CosineSimilarity() for _ in range(anatomy.layers)]
    spectrum, shares = Spectrum(), []
    capture = Capture(anatomy)
    for layer, cosine in enumerate(cosines):
        capture.on_tokens(Site(layer), lambda tokens, _, cosine=cosine: cosine.update(tokens))  # type: ignore[misc]
    capture.on_tokens(Site(last), lambda tokens, _: spectrum.update(tokens))
    capture.on_tokens(Site(last), lambda tokens, _: shares.append(within_sequence_share(tokens)))
    capture.run([Batch(inputs, None, 0)])
    found: dict[str, Value] = {
        "smoothing_within_sequence_share": shares[0],
        "smoothing_k_0.99": spectrum.result().values["k_0.99"],
    }
    for layer, cosine in enumerate(cosines):
        found[f"smoothing_cosine_layer_{layer}"] = cosine.result().values["cosine_similarity"]
    return {name: float(value) for name, value in found.items() if value is not None}


def within_sequence_share(tokens_BTD: Tensor) -> float | None:
    """No classes are needed: whatever is not within sequences is between them."""
    within = (tokens_BTD - tokens_BTD.mean(dim=1, keepdim=True)).square().sum()
    total = (tokens_BTD - tokens_BTD.mean(dim=(0, 1))).square().sum()
    return share(float(within), float(total)) if total > 1e-20 * tokens_BTD.square().sum() else None


def whole_tokens(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Padded rows cut to the shortest: padding behind the last target is no token of a conversation."""
    lengths_B = torch.where(targets_BT >= 0, torch.arange(1, targets_BT.shape[1] + 1, device=targets_BT.device), 0)
    return tokens_BT[:, : max(2, int(lengths_B.amax(dim=1).min()))]
