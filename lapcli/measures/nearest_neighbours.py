"""k-NN classification by cosine similarity, in chunks: memory is bounded by the chunk, not by queries times keys.

Shapes: Q queries, N keys (training images), D features, K classes, M neighbours kept.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

#: Size of a chunk: 512 queries against 16,384 keys are 32 MiB of similarities.
QUERIES_AT_ONCE, KEYS_AT_ONCE = 512, 16_384


def nearest(queries_QD: Tensor, keys_ND: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
    """Return the inner products with the nearest keys, largest first, and those keys' indices; both Q x neighbours."""
    best_QM = queries_QD.new_empty(len(queries_QD), 0)
    index_QM = torch.empty(len(queries_QD), 0, dtype=torch.int64, device=queries_QD.device)
    for first in range(0, len(keys_ND), KEYS_AT_ONCE):
        similarity_QN = queries_QD @ keys_ND[first : first + KEYS_AT_ONCE].T
        nearest_here = similarity_QN.topk(min(neighbours, similarity_QN.shape[1]), dim=1)
        # At most twice M columns: the best so far and the best of this chunk.
        both_QM = torch.cat([best_QM, nearest_here.values], dim=1)
        indices_QM = torch.cat([index_QM, nearest_here.indices + first], dim=1)
        best_QM, kept_QM = both_QM.topk(min(neighbours, both_QM.shape[1]), dim=1)
        index_QM = indices_QM.gather(1, kept_QM)
    return best_QM, index_QM


def vote(
    similarity_QM: Tensor, labels_QM: Tensor, classes: int, counts: Sequence[int], temperature: float
) -> dict[int, Tensor]:
    """Return the class of each query by its first k neighbours, for each k of `counts`.

    A neighbour's vote has the weight exp(similarity / temperature), normalised over all M neighbours; a class's score
    is the sum over the first k. The normaliser is common to all classes, so it changes no arg-max.
    """
    weight_QM = F.softmax(similarity_QM / temperature, dim=1)
    score_QK = weight_QM.new_zeros(len(weight_QM), classes)
    chosen, done = {}, 0
    for k in sorted(counts):
        score_QK.scatter_add_(1, labels_QM[:, done:k], weight_QM[:, done:k])
        chosen[k], done = score_QK.argmax(dim=1), k
    return chosen


def classify(
    queries_QD: Tensor, unit_keys_ND: Tensor, labels_N: Tensor, classes: int, counts: Sequence[int], temperature: float
) -> dict[int, Tensor]:
    """Return the class of each query for each number of neighbours.

    Queries are normalised here. Keys have to be of length 1: they are normalised once for all batches of queries.
    """
    queries_QD = F.normalize(queries_QD, dim=1)
    classes_of_k: dict[int, list[Tensor]] = {k: [] for k in counts}
    for first in range(0, len(queries_QD), QUERIES_AT_ONCE):
        similarity_QM, index_QM = nearest(queries_QD[first : first + QUERIES_AT_ONCE], unit_keys_ND, max(counts))
        for k, classes_Q in vote(similarity_QM, labels_N[index_QM], classes, counts, temperature).items():
            classes_of_k[k].append(classes_Q)
    return {k: torch.cat(parts) for k, parts in classes_of_k.items()}
