"""Analysis of variance of token representations (4.1, 4.2).

Images, tokens t of example i of class c, with the means mu_ic = ave_t X_tic, mu_c = ave_i mu_ic, mu_G = ave_c mu_c:

    within sequence  ave_tic |X_tic - mu_ic|^2       within class   ave_ic |mu_ic - mu_c|^2
    between classes  ave_c |mu_c - mu_G|^2           total          their sum = ave_tic |X_tic - mu_G|^2

Language: a token is an example of the class "its next token", and there is no within-sequence part.

Averages are nested, so that all classes have equal weight, as in the paper's formula. Memory: one row per
class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    definition = (
        "Variance of the tokens about the mean of their sequence (images only), of sequence means about the mean of "
        "their class, and of class means about their mean, as fractions of the sum. In language models a token is an "
        "example of the class of its next token. Averages are nested, so all classes have equal weight."
    )
    columns: ClassVar = {
        "between_class_share": "between",
        "within_class_share": "within class",
        "within_sequence_share": "within sequence",
        "classes": "classes",
        "classes_left_out": "left out",
    }
    counts = frozenset({"classes", "classes_left_out", "examples"})

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        by_token = self.model.examples.by_token
        moments = ClassMoments(len(self.model.examples.classes), self.model.anatomy.width)
        capture.on_labelled_tokens(
            self.site(layer), lambda tokens, labels, _: add_tokens(moments, tokens, labels, by_token)
        )
        return lambda: shares(moments, by_token)

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
        figure, ((panel,),) = panels(1, width=max(3.4, 1.2 + 0.7 * len(lines_of(runs))))
        _plot_stacked(panel, runs, parts)
        panel.set_ylabel("fraction of the variance")
        handles, names = panel.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(parts))
        return figure


def add_tokens(moments: ClassMoments, tokens_BTD: Tensor, labels: Tensor, by_token: bool) -> None:
    """Add tokens. Labels: B x T of tokens (`by_token`, language), or B of sequences (images)."""
    if by_token:
        moments.update(tokens_BTD.flatten(0, 1), labels.flatten())
        return
    mean_BD = tokens_BTD.mean(dim=1)
    within_B = (tokens_BTD - mean_BD[:, None]).square().sum(dim=2).mean(dim=1)
    moments.update(mean_BD, labels, extra_N=within_B)


def shares(moments: ClassMoments, by_token: bool, min_count: int = MIN_COUNT) -> LayerResult:
    """Return the parts of the variance and their fractions; None where tokens do not vary or no class has examples."""
    kept = np.flatnonzero(moments.count_C >= min_count)
    count_K, mean_KD = moments.count_C[kept], moments.mean_CD[kept]
    left_out = int((moments.count_C > 0).sum()) - len(kept)
    values: dict[str, Value] = {"classes": len(kept), "classes_left_out": left_out, "examples": int(count_K.sum())}
    names = ["between_class", "within_class", *([] if by_token else ["within_sequence"])]
    parts: dict[str, float | None] = dict.fromkeys(names)
    if len(kept):
        found = {
            "between_class": float(((mean_KD - mean_KD.mean(axis=0)) ** 2).sum(axis=1).mean()),
            "within_class": float((moments.squares_C[kept] / count_K).mean()),
            "within_sequence": float((moments.extra_C[kept] / count_K).mean()),
        }
        parts = {name: found[name] for name in names}
        # Identical tokens: only the rounding error of their mean remains.
        if sum(found[name] for name in names) <= ROUNDING * float((mean_KD**2).sum(axis=1).mean()):
            parts = dict.fromkeys(names, 0.0)
    known = [part for part in parts.values() if part is not None]
    total = sum(known) if known else None
    by_part = {f"{name}_share": part / total if part is not None and total else None for name, part in parts.items()}
    return LayerResult({**values, **by_part, **parts, "total": total})


def _plot_stacked(axes: Any, runs: Sequence[ModelResult], parts: Sequence[str]) -> None:
    lines = lines_of(runs)
    base = np.zeros(len(lines))
    for part in parts:
        name, colour, hatch = PARTS[part]
        # A run without variance has no fractions; a NaN would hide the bars stacked on top of it.
        found = np.array([line.at_first_layer(f"{part}_share") for line in lines])
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
