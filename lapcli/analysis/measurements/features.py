"""Feature maps: the top three components of an image's patches as colours (4.3).

    z = projection of the centred patch tokens on their top three components, each divided by its deviation
    red, green, blue = sigmoid(2 z)

All patches of the image are used, without a mask of the foreground. The largest entry of a component is positive.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from lapcli.analysis.drawing import panels, titles
from lapcli.analysis.measurement import LayerResult, Measurement, Settings
from lapcli.analysis.statistics import principal_components
from lapcli.recipe import schema
from lapcli.runtime.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lapcli.analysis.analyze import Analysis
    from lapcli.analysis.analyzed_models import OpenedModel
    from lapcli.analysis.examples import ImageExamples
    from lapcli.measures.capture import Capture

PICTURES = 4  # of the data, without --image


class Features(Measurement):
    """Runs the model on a few images after the shared pass, one by one because their sizes may differ."""

    name = "features"
    definition = (
        "Patch tokens of one image, minus their mean, on their top three principal components, each divided by its "
        "deviation; sigmoid(2 z) is red, green and blue. The largest entry of a component is positive."
    )
    options = ("layer", "image")
    needs = frozenset({schema.FEATURES})
    norm = "after"
    columns: ClassVar = {
        "pictures": "pictures",
        "patches": "patches",
        **{f"variance_share_{number}": f"share {number}" for number in (1, 2, 3)},
    }
    counts = frozenset({"pictures", "patches"})

    def __init__(self, model: OpenedModel, settings: Settings) -> None:
        super().__init__(model, settings)
        self._examples = cast("ImageExamples", model.examples)
        self._pictures = self._examples.pictures(settings.image, PICTURES)

    def measure(self, capture: Capture, layer: int) -> Callable[[], LayerResult]:
        return lambda: self._maps(layer)

    def _maps(self, layer: int) -> LayerResult:
        maps: list[FeatureMap] = []
        shares = []
        for name, picture in self._pictures:
            inputs_1CHW, pixels_CHW = self._examples.prepare(picture, self.model.anatomy.patch)
            tokens_TD = self._tokens(layer, inputs_1CHW)
            rows, columns = _grid(inputs_1CHW, len(tokens_TD))
            rgb, share = colours(tokens_TD)
            shares.append(share)
            maps.append(FeatureMap(name, pixels_CHW.permute(1, 2, 0).numpy(), rgb.reshape(rows, columns, 3)))
        result = LayerResult(pictures=maps)
        result.values = {"pictures": len(maps), "patches": int(np.prod(maps[0].colours.shape[:2])) if maps else 0}
        for component, value in enumerate(np.mean(shares, axis=0) if shares else []):
            result.values[f"variance_share_{component + 1}"] = float(value)
        return result

    def _tokens(self, layer: int, inputs_1CHW: Tensor) -> np.ndarray:
        from lapcli.measures.capture import Batch, Capture, Site

        seen: list[np.ndarray] = []
        capture = Capture(self.model.anatomy)
        capture.on_tokens(
            Site(layer, "output", "patch", self.norm), lambda tokens, _: seen.append(tokens[0].cpu().numpy())
        )
        capture.run([Batch(inputs_1CHW, None, 0)])
        return seen[0]

    @classmethod
    def draw(cls, analysis: Analysis) -> Figure | None:
        """Draw one row for each image: the image, then one column for each run (and layer, if there are several)."""
        columns = [
            (f"{label}" + (f", layer {layer}" if len(run.layers) > 1 else ""), result.pictures)
            for run, label in zip(analysis.runs, titles(analysis.runs), strict=True)
            for layer, result in run.layers.items()
        ]
        count = len(columns[0][1])
        if not count:
            return None
        figure, axes_RC = panels(1 + len(columns), count, width=1.9, height=1.9)
        for number, row in enumerate(axes_RC):
            first = columns[0][1][number]
            row[0].imshow(first.picture, interpolation="nearest")
            # The end of a long name, from a word or folder on: the label must fit beside one row of patches.
            short = first.name if len(first.name) <= 20 else re.split("[ /]", first.name[-20:], maxsplit=1)[-1]
            row[0].set_ylabel(short, fontsize=8)
            for panel, (title, maps) in zip(row[1:], columns, strict=True):
                shown = maps[number]
                extent = (0, shown.picture.shape[1], shown.picture.shape[0], 0)
                panel.imshow(shown.colours, extent=extent, interpolation="nearest")
                panel.set_title(title if number == 0 else "")
            row[0].set_title("image" if number == 0 else "")
            for panel in row:
                panel.set_xticks([])
                panel.set_yticks([])
                panel.grid(visible=False)
                panel.spines[:].set_visible(False)
        return figure


@dataclass(frozen=True)
class FeatureMap:
    name: str
    picture: np.ndarray  # H x W x 3 bytes, as the model saw it
    colours: np.ndarray  # rows x columns x 3, from 0 to 1


def colours(tokens_TD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return T x 3 colours from 0 to 1, and each component's fraction of the variance; a missing one is grey."""
    z, _, shares = principal_components(tokens_TD, 3)
    deviation = z.std(axis=0)
    # Whitened, then sigmoid(2 z), as in DINOv3's notebook pca.ipynb, but on all patches: the paper names no mask.
    z = z / np.where(deviation > 0, deviation, 1)
    return 1 / (1 + np.exp(-2 * z)), shares


def _grid(inputs_1CHW: Tensor, tokens: int) -> tuple[int, int]:
    """Return rows and columns of the patches, from the proportions of the image."""
    height, width = inputs_1CHW.shape[2:]
    rows = round((tokens * height / width) ** 0.5)
    if rows * (tokens // max(rows, 1)) != tokens:
        raise UsageError(f"{tokens} patches do not form a grid of {height} x {width} pixels")
    return rows, tokens // rows
