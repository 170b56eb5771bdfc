"""Tokens of a few classes: on their top two principal components (4.1), and on the simplex of three classes (Algorithm
1, appendix D.2).

    W' = three rows of the classifier, each of length 1;   U S V^T = thin SVD of W'
    A  = sqrt(2) [[1/2, -1/2, 0], [0, 0, sqrt(3)/2]] (I - 1 1^T / 3)
    place of a token x:  A U V^T x

U V^T has the orthonormal rows closest to W'; A takes their three axes to an equilateral triangle. Scaling all of W'
at once would change nothing, so the algorithm's "normalize" is of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lapcli.analysis.drawing import COLOURS, MARKERS, number_or_nan, panels, titles
from lapcli.analysis.measurement import LayerResult, Measurement, NotApplicable, Settings
from lapcli.analysis.statistics import principal_components
from lapcli.recipe import schema
from lapcli.runtime.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis, ModelResult
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.analysis.examples import Examples
    from lapcli.measures.capture import Capture

POINTS = 2000  # in a sample
DRAWN = 900  # at most, in a panel


class TokenSample:
    """A random sample of at most `size` tokens of the classes in `classes`.

    Every token has a random number keyed by its sequence, and the tokens with the smallest are kept: the same
    tokens in every layer and for every batch size.
    """

    def __init__(self, classes: list[int], size: int = POINTS) -> None:
        self._classes, self._size = np.array(sorted(classes)), size
        self._key = np.empty(0)
        self._class = np.empty(0, dtype=np.int64)
        self._tokens: np.ndarray | None = None

    def update(self, tokens_BTD: Tensor, labels: Tensor, first: int) -> None:
        """Add tokens. Labels: B of sequences, or B x T of tokens; `first` is the number of the first sequence."""
        B, T, D = tokens_BTD.shape
        labels_BT = labels.cpu().numpy() if labels.ndim == 2 else np.repeat(labels.cpu().numpy()[:, None], T, axis=1)
        key_BT = np.stack([np.random.default_rng([0, first + row]).random(T) for row in range(B)])
        wanted = np.isin(labels_BT, self._classes).reshape(-1)
        if len(self._key) == self._size:  # most later tokens do not enter a full sample and need not be copied
            wanted &= key_BT.reshape(-1) < self._key.max()
        rows = np.flatnonzero(wanted)
        # Indexed on the device of tokens and labels, so that only the chosen rows are copied to the CPU.
        new_ND = tokens_BTD.reshape(B * T, D)[labels.new_tensor(rows)].cpu().numpy()
        key = np.concatenate([self._key, key_BT.reshape(-1)[rows]])
        label = np.concatenate([self._class, labels_BT.reshape(-1)[rows]])
        tokens = new_ND if self._tokens is None else np.concatenate([self._tokens, new_ND])
        order = np.argsort(key, kind="stable")[: self._size]
        self._key, self._class, self._tokens = key[order], label[order], tokens[order]

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Return N x D tokens and their N classes."""
        return (np.empty((0, 0)) if self._tokens is None else self._tokens), self._class


def chosen_classes(settings: Settings, examples: Examples, count: int) -> list[int]:
    """Return the classes of --classes, else `count` of the data: a random choice, or the most frequent tokens."""
    names, given = examples.classes, settings.classes
    if given is None:
        counts = examples.class_counts()
        if examples.by_token:
            order = np.argsort(-counts, kind="stable")
        else:
            order = np.random.default_rng(0).permutation(len(counts))
        return [int(index) for index in order if counts[index] > 0][:count]
    chosen = []
    for part in (part.strip() for part in given.split(",")):
        named = [index for index in range(len(names)) if names[index] == part]
        named = named or [index for index, name in enumerate(examples.class_ids) if name == part]
        if not named and part.isdecimal() and int(part) < len(names):
            named = [int(part)]
        if not named:
            raise UsageError(
                f"--classes: there is no class {part[:60]!r}; give names, or numbers 0 to {len(names) - 1}"
            )
        chosen.append(named[0])
    if len(set(chosen)) != len(chosen):
        raise UsageError(f"--classes {given[:60]!r} names a class twice")
    return chosen


def scatter(
    shown: Sequence[tuple[str, ModelResult, LayerResult]], columns: int
) -> tuple[Figure | None, list[tuple[Any, LayerResult]]]:
    """Draw a panel for each result that has points, with its title; return the figure and the panels of the results.

    Points are thinned, so that dense classes do not hide the others; large markers are the means of the classes.
    """
    shown = [each for each in shown if "place" in each[2].points]
    if not shown:
        return None, []
    order = np.unique(np.concatenate([result.points["class"] for _, _, result in shown]))  # one colour in all panels
    side = max(3.0, 6.0 / columns)  # of a panel: at least 900 pixels for the figure
    figure, axes_RC = panels(columns, -(-len(shown) // columns), width=side, height=side)
    drawn = []
    for panel, (title, run, result) in zip(axes_RC.flat, shown, strict=False):
        for number, label in enumerate(order):
            points = result.points["place"][result.points["class"] == label]
            if not len(points):
                continue
            marker, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
            style = {"marker": marker, "color": colour, "linewidth": 0}
            x, y = points[: DRAWN // len(order)].T
            # Thousands of vector points would make SVG and PDF files large.
            panel.scatter(x, y, s=12, alpha=0.45, rasterized=True, **style)
            style |= {"linewidth": 1.0, "edgecolor": "white", "label": run.class_names[int(label)]}
            panel.scatter(*points.mean(axis=0), s=90, zorder=3, **style)
        panel.set_title(title)
        drawn.append((panel, result))
    for panel in axes_RC.flat[len(shown) :]:
        panel.axis("off")
    named = (zip(*panel.get_legend_handles_labels(), strict=True) for panel, _ in drawn)
    entries = {name: handle for pairs in named for handle, name in pairs}
    title = "next token" if schema.LANGUAGE in shown[0][1].model.gives else "class"
    figure.legend(list(entries.values()), list(entries), loc="outside right center", title=f"{title}\n(large: mean)")
    return figure, drawn


COLOURED = 10  # classes, without --classes


class PrincipalComponents(Measurement):
    name = "pca"
    definition = (
        "Tokens of a few classes, a seeded sample, minus their mean, on the two directions of largest variance."
    )
    options = ("layer", "classes")
    default_layers = "spread"
    columns: ClassVar = {"tokens_shown": "tokens shown", "variance_share_1": "share 1", "variance_share_2": "share 2"}
    counts = frozenset({"tokens_shown"})

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        self._classes = chosen_classes(settings, model.examples, COLOURED)

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        sample = TokenSample(self._classes)
        capture.on_labelled_tokens(self.site(layer), sample.update)
        return lambda: _components(sample)

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw the models side by side, with one row per layer; for one model, the layers side by side."""
        runs = analysis.runs
        depth = max(len(run.layers) for run in runs)
        shown = [
            (f"{title}, layer {layer}", run, run.layers[layer])
            for place in range(depth)
            for run, title in zip(runs, titles(runs), strict=True)
            for layer in list(run.layers)[place : place + 1]
        ]
        figure, drawn = scatter(shown, columns=len(runs) if len(runs) > 1 else min(3, depth))
        for panel, result in drawn:
            first, second = (number_or_nan(result.values[f"variance_share_{n}"]) for n in (1, 2))
            panel.set_xlabel(f"component 1 ({first:.0%})")
            panel.set_ylabel(f"component 2 ({second:.0%})")
            panel.set_xticks([])
            panel.set_yticks([])
            low, high = np.quantile(result.points["place"], [0.005, 0.995], axis=0)
            margin = 0.08 * np.maximum(high - low, 1e-12)  # a few tokens far out would shrink all others
            panel.set_xlim(low[0] - margin[0], high[0] + margin[0])
            panel.set_ylim(low[1] - margin[1], high[1] + margin[1])
        return figure


def _components(sample: TokenSample) -> LayerResult:
    tokens, classes = sample.tokens()
    if len(tokens) < 2:
        return LayerResult({"tokens_shown": len(tokens)})
    places, _, shares = principal_components(tokens, 2)
    values = {f"variance_share_{number}": float(share) for number, share in enumerate(shares, 1)}
    return LayerResult({"tokens_shown": len(tokens), **values}, points={"place": places, "class": classes})


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
    """Return the positions of the tokens; `classes`: the classes of the rows of `classifier_3D`."""
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
