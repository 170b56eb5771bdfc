"""Tokens on the simplex of three classes (Algorithm 1, appendix D.2).

    W' = three rows of the classifier, each of length 1;   U S V^T = thin SVD of W'
    A  = sqrt(2) [[1/2, -1/2, 0], [0, 0, sqrt(3)/2]] (I - 1 1^T / 3)
    place of a token x:  A U V^T x

U V^T has the orthonormal rows closest to W'; A takes their three axes to an equilateral triangle. Scaling all of W'
at once would change nothing, so the algorithm's "normalize" is of its rows.
"""

import numpy as np
from torch import Tensor

from lapcli.analysis.found import Found
from lapcli.analysis.running import Running
from lapcli.analysis.sample import TokenSample

CORNERS = np.sqrt(2) * np.array([[0.5, -0.5, 0.0], [0.0, 0.0, np.sqrt(3) / 2]]) @ (np.eye(3) - 1 / 3)


def simplex_map(classifier_3D: np.ndarray) -> np.ndarray:
    """A U V^T, 2 x D."""
    lengths = np.linalg.norm(classifier_3D, axis=1, keepdims=True)
    U, _, Vt = np.linalg.svd(classifier_3D / np.where(lengths > 0, lengths, 1), full_matrices=False)
    return CORNERS @ U @ Vt


class Simplex:
    """`classes`: the three, in the order of `classifier_3D`'s rows; `center`: subtract the mean of all tokens."""

    def __init__(self, classifier_3D: np.ndarray, classes: list[int], *, center: bool, seed: int) -> None:
        self._classifier, self._classes = classifier_3D, classes
        self._sample = TokenSample(classes, seed)
        self._mean = Running() if center else None

    def update(self, tokens_BTD: Tensor, labels_B: Tensor, first: int) -> None:
        self._sample.update(tokens_BTD, labels_B, first)
        if self._mean:
            self._mean.update(tokens_BTD.flatten(0, 1))

    def result(self) -> Found:
        tokens, classes = self._sample.tokens()
        if not len(tokens):
            return Found(
                {"tokens_shown": 0}, notes=["no token of these three classes in the data; name others: --classes"]
            )
        map_2D = simplex_map(self._classifier)
        lengths = np.linalg.norm(self._classifier, axis=1, keepdims=True)
        places = (tokens - (self._mean.mean_D if self._mean else 0)) @ map_2D.T
        corners = (self._classifier / np.where(lengths > 0, lengths, 1)) @ map_2D.T
        nearest = np.argmax(places @ (corners / np.maximum(np.linalg.norm(corners, axis=1), 1e-300)[:, None]).T, axis=1)
        right = np.array(self._classes)[nearest] == classes
        found = Found(
            {"tokens_shown": len(tokens), "nearest_corner_share": float(right.mean())},
            points={"place": places, "class": classes},
            series={"corner_x": corners[:, 0], "corner_y": corners[:, 1], "corner_class": np.array(self._classes)},
        )
        if np.linalg.matrix_rank(self._classifier) < 2:
            found.notes.append("the classifier's three rows are parallel: they span no triangle")
        return found
