"""Neural collapse of class means and classifier, NC1 to NC4 (appendix D, after Han et al.).

    mu_c  mean of all tokens of all examples of class c;  mu_G  mean of the mu_c;  M' = [mu_c - mu_G]
    h_i   mean of the tokens of example i;                W     rows of the classifier

    NC1              tr(S_W S_B^+):  S_W = ave_i (h_i - mu_c)(h_i - mu_c)^T,  S_B = ave_c (mu_c - mu_G)(mu_c - mu_G)^T
    NC2 equinorm     std / mean of the lengths, of class means and of rows of W
    NC2 equiangular  ave_{i != j} |cos(v_i, v_j) + 1/(C-1)|
    NC3              |W^T/|W|_F - M'/|M'|_F|_F^2
    NC4 fraction of examples whose largest logit is not the class of the nearest class mean

The paper prints NC2 with the class means themselves, where the target -1/(C-1) cannot be reached; Han et al. centre
them. Both are given. NC4 needs all class means before the first example can be compared, so the model runs over the
examples a second time: keeping the h_i of all layers would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lapcli.analysis.drawing import COLOURS, is_one_point, legend_title, lines_of, name_lines, panels, plot_by_layer
from lapcli.analysis.measurement import LayerResult, Measurement, Settings
from lapcli.analysis.statistics import ClassMoments
from lapcli.recipe import schema

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.measures.capture import Batch, Capture

#: The panels of the figure.
TITLES = {
    "nc1": "NC1: within over between",
    "nc2_equinorm": "NC2: equinorm",
    "nc2_equiangular": "NC2: equiangular",
    "nc3": "NC3: self-duality",
    "nc4": "NC4: nearest mean disagrees",
}
#: The vectors that NC2 is computed from: heading in the table, then label, colour, marker and line in the figure.
NC2_VECTORS = {
    "centred": ("centred", ("class means, centred", COLOURS[0], "o", "-")),
    "as_printed": ("printed", ("class means, as printed", COLOURS[1], "s", "--")),
    "classifier": ("W", ("classifier rows", COLOURS[2], "D", "-.")),
}


class Collapse(Measurement):
    name = "collapse"
    definition = (
        "Class means average all tokens of all examples of a class; M' are the means minus their mean, W the rows of "
        "the classifier, C classes, an example's feature h is the mean of its tokens. NC1 = tr(S_W S_B^+), S_W the "
        "covariance of h about its class mean, S_B that of the class means. NC2 equinorm = std / mean of the lengths "
        "(std with C - 1). NC2 equiangular = mean over pairs of |cosine + 1/(C-1)|. NC3 = |W^T/|W| - M'/|M'||^2. NC4 = "
        "share of examples whose class by the logits is not that of the nearest class mean. `centred` takes M' for "
        "the means in NC2, `as_printed` the means themselves, as the paper writes."
    )
    needs = frozenset({schema.CLASSES})
    norm = "after"
    columns: ClassVar = {
        "nc1": "nc1",
        **{
            f"nc2_{measure}_{vectors}": f"{short} {heading}"
            for vectors, (heading, _) in NC2_VECTORS.items()
            for measure, short in (("equinorm", "norm"), ("equiangular", "angle"))
        },
        "nc3": "nc3",
        "nc4": "nc4",
    }
    counts = frozenset({"classes", "examples"})

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        self._classifier_CD = self.classifier_CD()
        self._by_layer: dict[int, CollapseOfLayer] = {}

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        accumulator = self._by_layer[layer] = CollapseOfLayer(self._classifier_CD, self._compare)
        capture.on_labelled_tokens(self.site(layer), lambda tokens, labels, _: accumulator.update(tokens, labels))
        return accumulator.result

    def _compare(self) -> None:
        """Run the model again, for NC4 of all layers."""
        from lapcli.measures.capture import Capture

        capture = Capture(self.model.anatomy)
        for layer, accumulator in self._by_layer.items():
            capture.on_tokens(self.site(layer), accumulator.compare)
            # Logits of the full forward, with its own pooling and bias, not W times the mean token.
            capture.on_logits(accumulator.compare_logits)
        capture.run(self.model.examples.batches())

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw the paper's four panels and NC1 against the number of heads, or the layer if there are several."""
        runs = analysis.runs
        if is_one_point(runs):
            return None
        figure, axes_RC = panels(3, 2, width=3.2, height=2.6)
        axes = axes_RC.reshape(-1)
        by_layer = any(len(run.layers) > 1 for run in runs)
        for panel, (name, title) in zip(axes, TITLES.items(), strict=False):
            is_nc2 = name.startswith("nc2")
            if by_layer:
                plot_by_layer(panel, runs, f"{name}_centred" if is_nc2 else name)
            else:
                drawn = {name: ("", "#333333", "o", "-")}
                if is_nc2:
                    drawn = {f"{name}_{vectors}": line for vectors, (_, line) in NC2_VECTORS.items()}
                lines = lines_of(runs)
                for key, (label, colour, marker, dashes) in drawn.items():
                    means, deviations = zip(*(line.at_first_layer(key) for line in lines), strict=True)
                    style = {"color": colour, "marker": marker, "linestyle": dashes, "label": label}
                    panel.errorbar(range(len(lines)), means, yerr=deviations, capsize=3, **style)
                name_lines(panel, lines)
            panel.set_title(title + (", centred means" if is_nc2 and by_layer else ""))
            panel.set_ylim(0, max(panel.get_ylim()[1], 1e-6) * 1.08)
        axes[0].set_ylabel("smaller is closer to collapse")
        axes[3].set_ylabel("smaller is closer to collapse")
        handles, names = (axes[0] if by_layer else axes[1]).get_legend_handles_labels()
        axes[5].axis("off")
        axes[5].legend(handles, names, loc="center", title=legend_title(runs) if by_layer else None)
        return figure


class CollapseOfLayer:
    """Neural collapse of one layer; the rows of `classifier_CD`, W, are the classes.

    `result` calls `second_pass`, which delivers all tokens and logits again, unless another layer has done so.
    """

    def __init__(self, classifier_CD: np.ndarray, second_pass: Callable[[], None]) -> None:
        self._classifier, self._second_pass = classifier_CD, second_pass
        self._moments = ClassMoments(classifier_CD.shape[0], classifier_CD.shape[1], scatter=True)
        self._nearest_B = np.empty(0, dtype=np.int64)
        self._compared = self._disagree = 0

    def update(self, tokens_BTD: Tensor, labels_B: Tensor) -> None:
        self._moments.update(tokens_BTD.mean(dim=1), labels_B)

    def compare(self, tokens_BTD: Tensor, _: Batch) -> None:
        """Find the nearest class mean of each example; its logits come next."""
        import torch

        present = np.flatnonzero(self._moments.count_C > 0)
        # Differences are squared; |h|^2 - 2 h m + |m|^2 would lose the digits that decide near ties.
        distance_BC = torch.cdist(
            tokens_BTD.mean(dim=1).cpu(),
            torch.from_numpy(self._moments.mean_CD[present]),
            compute_mode="donot_use_mm_for_euclid_dist",
        )
        # NC4 uses the uncentred means; centring shifts h and means alike and changes no distance.
        self._nearest_B = present[distance_BC.argmin(dim=1).numpy()]

    def compare_logits(self, logits_BC: Tensor, _: Batch) -> None:
        self._compared += len(logits_BC)
        self._disagree += int((logits_BC.argmax(dim=1).cpu().numpy() != self._nearest_B).sum())

    def result(self) -> LayerResult:
        moments = self._moments
        if not self._compared and moments.count_C.any():
            self._second_pass()
        present = np.flatnonzero(moments.count_C > 0)
        C = len(present)
        mean_CD, W_CD = moments.mean_CD[present], self._classifier[present]
        centred_CD = mean_CD - mean_CD.mean(axis=0)
        if np.abs(centred_CD).max(initial=0) <= 1e-13 * np.abs(mean_CD).max(initial=0):
            centred_CD = np.zeros_like(centred_CD)  # equal means: only the rounding error of their mean is left
        result = LayerResult({"classes": C, "examples": int(moments.count_C.sum())})
        values = result.values
        assert moments.scatter_DD is not None
        scatter_DD = moments.scatter_DD / max(int(moments.count_C.sum()), 1)
        values["nc1"] = _within_over_between(scatter_DD, centred_CD)
        for name, vectors in (("centred", centred_CD), ("as_printed", mean_CD), ("classifier", W_CD)):
            values[f"nc2_equinorm_{name}"] = equinorm(vectors)
            values[f"nc2_equiangular_{name}"] = equiangular(vectors)
        values["nc3"] = self_duality(W_CD, centred_CD)
        values["nc4"] = self._disagree / self._compared if self._compared else None
        return result


def equinorm(vectors_CD: np.ndarray) -> float | None:
    """Return the coefficient of variation of the lengths; the deviation is divided by C - 1."""
    lengths = np.linalg.norm(vectors_CD, axis=1)
    if len(lengths) < 2 or lengths.mean() <= _rounding(vectors_CD):
        return None
    # C - 1, as in the notebook published with Han et al.; the paper does not say.
    return float(lengths.std(ddof=1) / lengths.mean())


def equiangular(vectors_CD: np.ndarray) -> float | None:
    """Return the mean distance of the cosines of pairs from -1/(C-1), the cosine of a simplex."""
    C = len(vectors_CD)
    lengths = np.linalg.norm(vectors_CD, axis=1, keepdims=True)
    if C < 2 or lengths.min() <= _rounding(vectors_CD):
        return None
    unit = vectors_CD / lengths
    cosines = unit @ unit.T
    off_diagonal = ~np.eye(C, dtype=bool)
    return float(np.abs(cosines[off_diagonal] + 1 / (C - 1)).mean())


def self_duality(W_CD: np.ndarray, centred_CD: np.ndarray) -> float | None:
    """Return the squared distance of classifier and centred class means, both scaled to Frobenius norm 1."""
    lengths = np.linalg.norm(W_CD), np.linalg.norm(centred_CD)
    if min(lengths) <= _rounding(W_CD) or len(W_CD) < 2:
        return None
    return float(((W_CD / lengths[0] - centred_CD / lengths[1]) ** 2).sum())


def _within_over_between(scatter_DD: np.ndarray, centred_CD: np.ndarray) -> float | None:
    """Compute tr(S_W S_B^+) by the singular vectors of the centred means: S_B = M' M'^T / C has rank at most C - 1."""
    C = len(centred_CD)
    _, singular, directions = np.linalg.svd(centred_CD, full_matrices=False)
    nonzero = singular > max(singular.max(initial=0) * 1e-10, _rounding(centred_CD))
    nonzero[max(C - 1, 0) :] = False  # 0 in exact arithmetic
    if not nonzero.any():
        return None
    # diag(V^T S_W V): the trace needs no D x D pseudo-inverse.
    within_R = np.einsum("rd,de,re->r", directions[nonzero], scatter_DD, directions[nonzero])
    return float((within_R / (singular[nonzero] ** 2 / C)).sum())


def _rounding(vectors: np.ndarray) -> float:
    return 1e-14 * float(np.abs(vectors).max(initial=0)) + 1e-300
