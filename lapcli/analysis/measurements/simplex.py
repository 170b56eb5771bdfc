"""Tokens on the simplex of three classes (Algorithm 1, appendix D.2).

    W' = three rows of the classifier, each of length 1;   U S V^T = thin SVD of W'
    A  = sqrt(2) [[1/2, -1/2, 0], [0, 0, sqrt(3)/2]] (I - 1 1^T / 3)
    place of a token x:  A U V^T x

U V^T has the orthonormal rows closest to W'; A takes their three axes to an equilateral triangle. Scaling all of W'
at once would change nothing, so the algorithm's "normalize" is of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lapcli.analysis.drawing import titles
from lapcli.analysis.measurement import LayerResult, Measurement, NotApplicable, Settings
from lapcli.analysis.token_samples import TokenSample, chosen_classes, scatter
from lapcli.recipe import schema

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Capture

CORNERS = np.sqrt(2) * np.array([[0.5, -0.5, 0.0], [0.0, 0.0, np.sqrt(3) / 2]]) @ (np.eye(3) - 1 / 3)


class Simplex(Measurement):
    name = "simplex"
    definition = (
        "Algorithm 1: W' are the three rows of the classifier, each of length 1; U S V^T its thin SVD; A the map of "
        "the three corners to an equilateral triangle. Plotted is A U V^T x of tokens x of the three classes."
    )
    options = ("layer", "classes")
    needs = frozenset({schema.CLASSES})
    norm = "after"
    columns: ClassVar = {"tokens_shown": "tokens shown", "nearest_corner_share": "nearest corner share"}
    counts = frozenset({"tokens_shown"})

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        classifier_CD = self.classifier_CD()
        self._classes = chosen_classes(settings, model.examples, 3)
        if len(self._classes) != 3:
            count = len(self._classes)
            raise NotApplicable(f"simplex needs three classes, but --classes or the data gives {count}; name three")
        self._classifier_3D = classifier_CD[self._classes]

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        sample = TokenSample(self._classes)
        capture.on_labelled_tokens(self.site(layer), sample.update)
        return lambda: on_simplex(*sample.tokens(), self._classifier_3D, self._classes)

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw one panel for each run, with the classifier's three directions as arrows."""
        runs = analysis.runs
        shown = [(title, run, run.layers[max(run.layers)]) for run, title in zip(runs, titles(runs), strict=True)]
        figure, drawn = scatter(shown, columns=min(4, len(runs)))
        for panel, result in drawn:
            # Not the maximum: a few tokens far out would shrink the triangle.
            reach = float(np.quantile(np.linalg.norm(result.points["place"], axis=1), 0.98))
            corners = np.stack([result.series["corner_x"], result.series["corner_y"]], axis=1)
            corners = corners / np.maximum(np.linalg.norm(corners, axis=1), 1e-300)[:, None] * reach
            for corner, index in zip(corners, result.series["corner_class"], strict=True):
                arrow = {"arrowstyle": "-|>", "color": "#222222", "linewidth": 1.2}
                panel.annotate("", corner, (0, 0), arrowprops=arrow)
                box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.8}
                name = runs[0].class_names[int(index)]
                panel.annotate(name, corner * 1.12, ha="center", va="center", fontweight="bold", bbox=box)
            edge = 1.3 * reach
            panel.set(aspect="equal", xlim=(-edge, edge), ylim=(-edge, edge))
            panel.set(xlabel="first axis of the plane", ylabel="second axis of the plane")
        return figure


def simplex_map(classifier_3D: np.ndarray) -> np.ndarray:
    """Return A U V^T, 2 x D."""
    # U is 3 x 3, V^T 3 x D. S is dropped: U V^T is the polar factor of W'.
    U, _, Vt = np.linalg.svd(_unit_rows(classifier_3D), full_matrices=False)
    return CORNERS @ U @ Vt


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def on_simplex(
    tokens_ND: np.ndarray, classes_N: np.ndarray, classifier_3D: np.ndarray, classes: Sequence[int]
) -> LayerResult:
    """Return the places of the tokens; `classes`: those of the rows of `classifier_3D`."""
    if not len(tokens_ND):
        return LayerResult({"tokens_shown": 0})
    map_2D = simplex_map(classifier_3D)
    places = tokens_ND @ map_2D.T
    corners = _unit_rows(classifier_3D) @ map_2D.T
    # By direction, not by distance: tokens are not scaled to the length of the corners.
    nearest = np.argmax(places @ (corners / np.maximum(np.linalg.norm(corners, axis=1), 1e-300)[:, None]).T, axis=1)
    right = np.array(classes)[nearest] == classes_N
    return LayerResult(
        {"tokens_shown": len(tokens_ND), "nearest_corner_share": float(right.mean())},
        points={"place": places, "class": classes_N},
        series={"corner_x": corners[:, 0], "corner_y": corners[:, 1], "corner_class": np.array(classes)},
    )
