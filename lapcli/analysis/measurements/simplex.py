"""Tokens on the simplex of three classes (Algorithm 1, appendix D.2).

    W' = three rows of the classifier, each of length 1;   U S V^T = thin SVD of W'
    A  = sqrt(2) [[1/2, -1/2, 0], [0, 0, sqrt(3)/2]] (I - 1 1^T / 3)
    place of a token x:  A U V^T x

U V^T has the orthonormal rows closest to W'; A takes their three axes to an equilateral triangle. Scaling all of W'
at once would change nothing, so the algorithm's "normalize" is of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from lapcli.analysis.drawing import panels, title_labels
from lapcli.analysis.measurement import (
    CLASSES,
    LAYER,
    NORM,
    TOKENS,
    LayerResult,
    Measurement,
    NotApplicable,
    Option,
    Settings,
)
from lapcli.analysis.token_samples import TokenSample, chosen_classes, class_legend, classes_in_order, scatter
from lapcli.measures.tokens import StreamingMoments
from lapcli.recipe import schema

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Capture

CENTER = Option("center", "--center", Literal["none", "global"], "none", "Subtract the mean token first.")
CORNERS = np.sqrt(2) * np.array([[0.5, -0.5, 0.0], [0.0, 0.0, np.sqrt(3) / 2]]) @ (np.eye(3) - 1 / 3)


class Simplex(Measurement):
    name = "simplex"
    help = "Tokens on the simplex of three classes (Algorithm 1)."
    definition = (
        "Algorithm 1: W' are the three rows of the classifier, each of length 1; U S V^T its thin SVD; A the map of "
        "the three corners to an equilateral triangle. Plotted is A U V^T x of tokens x of the three classes."
    )
    options = (LAYER, TOKENS, NORM, CENTER, CLASSES)
    needs = frozenset({schema.CLASSES})
    default_norm = "after"
    columns: ClassVar = {"tokens_shown": "tokens shown", "nearest_corner_share": "nearest corner share"}
    counts = frozenset({"tokens_shown"})
    order = 6

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        classifier_CD = self.classifier_CD()
        self._classes = chosen_classes(settings, model.examples, 3)
        if len(self._classes) != 3:
            count = len(self._classes)
            raise NotApplicable(f"simplex needs three classes, but --classes or the data gives {count}; name three")
        self._classifier_3D = classifier_CD[self._classes]

    def listen(self, capture: Capture, layer: int) -> SimplexAccumulator:
        center = self.settings[CENTER] == "global"
        accumulator = SimplexAccumulator(self._classifier_3D, self._classes, center=center, seed=self.settings.seed)
        capture.on_labelled_tokens(self.site(layer), accumulator.update)
        return accumulator

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw one panel for each run, with the classifier's three directions as arrows."""
        runs, order = analysis.runs, classes_in_order(analysis.runs)
        if not order:
            return None
        columns = min(3, len(runs))
        figure, axes_RC = panels(columns, -(-len(runs) // columns), width=2.6, height=2.6)
        axes = axes_RC.reshape(-1)
        for panel, run, label in zip(axes, runs, title_labels(runs), strict=False):
            result = run.layers[max(run.layers)]
            panel.set_title(label)
            panel.set_aspect("equal")
            if "place" not in result.points:
                continue
            scatter(panel, result, order, run.class_names)
            # Not the maximum: a few tokens far out would shrink the triangle.
            reach = float(np.quantile(np.linalg.norm(result.points["place"], axis=1), 0.98))
            corners = np.stack([result.series["corner_x"], result.series["corner_y"]], axis=1)
            corners = corners / np.maximum(np.linalg.norm(corners, axis=1), 1e-300)[:, None] * reach
            for corner, index in zip(corners, result.series["corner_class"], strict=True):
                arrow = {"arrowstyle": "-|>", "color": "#222222", "linewidth": 1.2}
                panel.annotate("", corner, (0, 0), arrowprops=arrow)
                panel.annotate(
                    run.class_names[int(index)],
                    corner * 1.12,
                    ha="center",
                    va="center",
                    fontsize=9,
                    fontweight="bold",
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.8},
                )
            edge = 1.3 * reach
            panel.set_xlim(-edge, edge)
            panel.set_ylim(-edge, edge)
            panel.set_xlabel("first axis of the plane")
            panel.set_ylabel("second axis of the plane")
        for panel in axes[len(runs) :]:
            panel.axis("off")
        class_legend(figure, axes[0], "class")
        return figure


def simplex_map(classifier_3D: np.ndarray) -> np.ndarray:
    """Return A U V^T, 2 x D."""
    # U is 3 x 3, V^T 3 x D. S is dropped: U V^T is the polar factor of W'.
    U, _, Vt = np.linalg.svd(_unit_rows(classifier_3D), full_matrices=False)
    return CORNERS @ U @ Vt


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


class SimplexAccumulator(TokenSample):
    """Places of sampled tokens. `classes`: as the rows of `classifier_3D`; `center`: subtract the mean token."""

    def __init__(self, classifier_3D: np.ndarray, classes: list[int], *, center: bool, seed: int) -> None:
        super().__init__(classes, seed)
        # In the order of the rows of W'; the sample sorts its own copy.
        self._classifier, self._rows = classifier_3D, np.array(classes)
        self._mean = StreamingMoments() if center else None

    def update(self, tokens_BTD: Tensor, labels_B: Tensor, first: int) -> None:
        super().update(tokens_BTD, labels_B, first)
        if self._mean:
            self._mean.update(tokens_BTD.flatten(0, 1))

    def result(self) -> LayerResult:
        tokens, classes = self.tokens()
        if not len(tokens):
            return LayerResult(
                {"tokens_shown": 0}, notes=["no token of these three classes in the data; name others: --classes"]
            )
        map_2D = simplex_map(self._classifier)
        places = (tokens - (self._mean.mean_D if self._mean else 0)) @ map_2D.T
        corners = _unit_rows(self._classifier) @ map_2D.T
        # By direction, not by distance: tokens are not scaled to the length of the corners.
        nearest = np.argmax(places @ (corners / np.maximum(np.linalg.norm(corners, axis=1), 1e-300)[:, None]).T, axis=1)
        right = self._rows[nearest] == classes
        result = LayerResult(
            {"tokens_shown": len(tokens), "nearest_corner_share": float(right.mean())},
            points={"place": places, "class": classes},
            series={"corner_x": corners[:, 0], "corner_y": corners[:, 1], "corner_class": self._rows},
        )
        if np.linalg.matrix_rank(self._classifier) < 2:
            result.notes.append("the classifier's three rows are parallel: they span no triangle")
        return result
