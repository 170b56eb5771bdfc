"""Analysis of variance of token representations (4.1, 4.2).

Images, tokens t of example i of class c, with the means mu_ic = ave_t X_tic, mu_c = ave_i mu_ic, mu_G = ave_c mu_c:

    within sequence  ave_tic |X_tic - mu_ic|^2       within class   ave_ic |mu_ic - mu_c|^2
    between classes  ave_c |mu_c - mu_G|^2           total          their sum = ave_tic |X_tic - mu_G|^2

Language: a token is an example of the class "its next token", and there is no within-sequence part.

Averages are nested, so that every class weighs the same, as in the paper's formula; the shares weighted by example
(a frequent next token weighs more) are given beside them. The memory is one row for each class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lapcli.analysis.drawing import COLOURS, is_one_point, legend_title, lines_of, name_lines, panels, plot_by_layer
from lapcli.analysis.measurement import LayerResult, Measurement, Value
from lapcli.analysis.statistics import ClassMoments
from lapcli.measures.tokens import ROUNDING

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis, ModelResult
    from lapcli.measures.capture import Capture

MIN_COUNT = 2  # classes with fewer examples are left out
#: Parts of the variance: label, colour and hatch in the figure.
PARTS = {
    "between_class": ("between classes", COLOURS[0], None),
    "within_class": ("within class", COLOURS[1], "//"),
    "within_sequence": ("within sequence", COLOURS[2], ".."),
}


class Anova(Measurement):
    name = "anova"
    help = "Shares of the variance: within sequence, within class, between classes."
    definition = (
        "Variance of the tokens about the mean of their sequence (images only), of sequence means about the mean of "
        "their class, and of class means about their mean, as shares of the sum. In language models a token is an "
        "example of the class of its next token. Averages are nested, every class weighs the same; `by_example` "
        "weighs classes by their examples."
    )
    columns: ClassVar = {
        "between_class_share": "between",
        "within_class_share": "within class",
        "between_class_share_by_example": "between by token",
        "within_class_share_by_example": "within by token",
        "within_sequence_share": "within sequence",
        "classes": "classes",
        "classes_left_out": "left out",
    }
    counts = frozenset({"classes", "classes_left_out", "examples"})
    order = 2

    def listen(self, capture: Capture, layer: int) -> AnovaAccumulator:
        examples = self.model.examples
        width = self.model.anatomy.width
        accumulator = AnovaAccumulator(len(examples.classes), width, by_token=examples.by_token)
        capture.on_labelled_tokens(self.site(layer), lambda tokens, labels, _: accumulator.update(tokens, labels))
        return accumulator

    @classmethod
    def shown_columns(cls, values: Mapping[str, Value]) -> dict[str, str]:
        """Show the weighting by example for next tokens alone, whose frequencies differ far more than those of classes
        of images."""
        shown = super().shown_columns(values)
        if "within_sequence_share" not in values:
            return shown
        return {name: heading for name, heading in shown.items() if not name.endswith("_by_example")}

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw stacked bars for one layer, or a panel for each part against the layer."""
        runs = analysis.runs
        if is_one_point(runs):
            return None
        first = next(iter(runs[0].layers.values())).values
        parts = [name for name in PARTS if f"{name}_share" in first]
        if any(len(run.layers) > 1 for run in runs):
            figure, (axes,) = panels(len(parts), width=3.0)
            for part, panel in zip(parts, axes, strict=True):
                plot_by_layer(panel, runs, f"{part}_share")
                panel.set_title(PARTS[part][0])
                panel.set_ylim(0, 1)
            axes[0].set_ylabel("fraction of the variance")
            axes[-1].legend(title=legend_title(runs))
            return figure
        weightings = {"": "every class alike", "_by_example": "weighted by token"}
        shown = weightings if "within_sequence" not in parts else {"": ""}
        figure, (axes,) = panels(len(shown), width=max(3.4, 1.2 + 0.7 * len(lines_of(runs))))
        for panel, (suffix, title) in zip(axes, shown.items(), strict=True):
            _plot_stacked(panel, runs, parts, suffix)
            panel.set_title(title)
        axes[0].set_ylabel("fraction of the variance")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(parts))
        return figure


class AnovaAccumulator:
    """The parts of the variance in one layer. `by_token`: each token has a class (language), else each sequence
    (images)."""

    def __init__(self, classes: int, width: int, *, by_token: bool, min_count: int = MIN_COUNT) -> None:
        self._moments = ClassMoments(classes, width)
        self._by_token, self._min_count = by_token, min_count

    def update(self, tokens_BTD: Tensor, labels: Tensor) -> None:
        """Add tokens. Labels: B x T of tokens, or B of sequences."""
        if self._by_token:
            self._moments.update(tokens_BTD.flatten(0, 1), labels.flatten())
            return
        mean_BD = tokens_BTD.mean(dim=1)
        within_B = (tokens_BTD - mean_BD[:, None]).square().sum(dim=2).mean(dim=1)
        self._moments.update(mean_BD, labels, extra_N=within_B)

    def result(self) -> LayerResult:
        result = LayerResult()
        seen = int((self._moments.count_C > 0).sum())
        kept = np.flatnonzero(self._moments.count_C >= self._min_count)
        count_K = self._moments.count_C[kept]
        result.values = {"classes": len(kept), "classes_left_out": seen - len(kept), "examples": int(count_K.sum())}
        if not len(kept):
            what = "next token" if self._by_token else "class"
            result.notes.append(f"no {what} has {self._min_count} examples; give more data")
        for suffix, weight_K in (("", np.ones(len(kept))), ("_by_example", count_K.astype(float))):
            self._add_parts(result, kept, count_K, weight_K / max(weight_K.sum(), 1), suffix)
        if len(kept) == 1:
            result.notes.append("one class: there is no variance between classes")
        if len(kept) and result.values["total"] == 0:
            result.notes.append("all tokens are equal: the variance is 0 and has no shares")
        return result

    def _add_parts(
        self, result: LayerResult, kept: np.ndarray, count_K: np.ndarray, weight_K: np.ndarray, suffix: str
    ) -> None:
        mean_KD = self._moments.mean_CD[kept]
        centre_D = weight_K @ mean_KD
        parts = {
            "between_class": float(weight_K @ ((mean_KD - centre_D) ** 2).sum(axis=1)),
            "within_class": float(weight_K @ (self._moments.squares_C[kept] / count_K)),
        }
        if not self._by_token:
            parts["within_sequence"] = float(weight_K @ (self._moments.extra_C[kept] / count_K))
        # Equal tokens: only the rounding error of their mean is left.
        length = float(weight_K @ (mean_KD**2).sum(axis=1))
        if sum(parts.values()) <= ROUNDING * length:
            parts = dict.fromkeys(parts, 0.0)
        total = sum(parts.values())
        for name, value in parts.items():
            result.values[f"{name}_share{suffix}"] = value / total if total > 0 else None
        for name, value in {**parts, "total": total}.items():
            result.values[f"{name}{suffix}"] = value if len(kept) else None


def _plot_stacked(axes: Any, runs: Sequence[ModelResult], parts: Sequence[str], suffix: str) -> None:
    lines = lines_of(runs)
    base = np.zeros(len(lines))
    for part in parts:
        name, colour, hatch = PARTS[part]
        # A run without variance has no shares; a NaN would hide the bars stacked on top of it.
        found = np.array([line.at_first_layer(f"{part}_share{suffix}") for line in lines])
        values, deviations = np.nan_to_num(found[:, 0]), found[:, 1]
        bar: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": name, "capsize": 4}
        axes.bar(range(len(lines)), values, 0.66, bottom=base, yerr=deviations, **bar)
        for place, value in enumerate(values):
            if value > 0.06:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9}
                text = f"{value:.0%}"
                axes.text(place, base[place] + value / 2, text, ha="center", va="center", fontsize=8, bbox=box)
        base = base + values
    name_lines(axes, lines)
    axes.set_ylim(0, 1)
    axes.grid(axis="x", visible=False)
