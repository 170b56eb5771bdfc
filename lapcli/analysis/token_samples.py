"""Samples of the tokens of a few classes, and how they are plotted, for figures that show tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lapcli.analysis.drawing import COLOURS, MARKERS, panels
from lapcli.analysis.measurement import LayerResult, Settings
from lapcli.recipe.schema import LANGUAGE
from lapcli.runtime.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import ModelResult
    from lapcli.analysis.examples import Examples

POINTS = 2000  # in a sample
DRAWN = 900  # at most, in a panel


class TokenSample:
    """A random sample of at most `size` tokens of the classes in `classes`.

    Every token has a random number keyed by its sequence, and those with the smallest are kept: the same tokens
    in every layer and for every batch size.
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
            # As vectors, thousands of points would make SVG and PDF files large.
            panel.scatter(x, y, s=12, alpha=0.45, rasterized=True, **style)
            style |= {"linewidth": 1.0, "edgecolor": "white", "label": run.class_names[int(label)]}
            panel.scatter(*points.mean(axis=0), s=90, zorder=3, **style)
        panel.set_title(title)
        drawn.append((panel, result))
    for panel in axes_RC.flat[len(shown) :]:
        panel.axis("off")
    named = (zip(*panel.get_legend_handles_labels(), strict=True) for panel, _ in drawn)
    entries = {name: handle for pairs in named for handle, name in pairs}
    title = "next token" if LANGUAGE in shown[0][1].model.gives else "class"
    figure.legend(list(entries.values()), list(entries), loc="outside right center", title=f"{title}\n(large: mean)")
    return figure, drawn
