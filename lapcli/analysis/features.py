"""Feature maps: the top three components of an image's patches as colours (4.3).

    z = projection of the centred patch tokens on their top three components, each divided by its deviation
    red, green, blue = sigmoid(2 z)

All patches of the image are used, without a mask of the foreground. The largest entry of a component is positive.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from lapcli.analysis.anatomy import Anatomy
from lapcli.analysis.capture import Batch, Capture, Site
from lapcli.analysis.examples import ImageExamples
from lapcli.analysis.found import Found
from lapcli.analysis.pca import principal_components
from lapcli.runtime.errors import UsageError

PICTURES = 4  # of the data, where no --image is named


@dataclass(frozen=True)
class FeatureMap:
    name: str
    picture: np.ndarray  # H x W x 3 bytes, as the model saw it
    colours: np.ndarray  # rows x columns x 3, from 0 to 1


def colours(tokens_TD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """T x 3 from 0 to 1, and the components' shares of the variance; a component that does not exist is grey."""
    z, _, shares = principal_components(tokens_TD, 3)
    deviation = z.std(axis=0)
    z = z / np.where(deviation > 0, deviation, 1)
    return 1 / (1 + np.exp(-2 * z)), shares


class Features:
    """Runs the model on a few pictures of its own, one after the other, as they may differ in size."""

    def __init__(self, anatomy: Anatomy, examples: ImageExamples, layer: int, norm: str, name: str) -> None:
        self._anatomy, self._examples, self._name = anatomy, examples, name
        self._site = Site(layer, "output", "patch", norm)

    def result(self, pictures: Sequence[tuple[str, Image.Image]]) -> Found:
        found = Found()
        maps: list[FeatureMap] = []
        shares = []
        for name, picture in pictures:
            inputs, pixels_CHW = self._examples.prepare(picture, self._anatomy.patch)
            tokens_TD = self._tokens(inputs)
            rows, columns = self._grid(inputs, len(tokens_TD))
            rgb, share = colours(tokens_TD)
            shares.append(share)
            maps.append(FeatureMap(name, pixels_CHW.permute(1, 2, 0).numpy(), rgb.reshape(rows, columns, 3)))
            if not share.any():
                found.notes.append(f"the patches of {name} are all equal: the map is grey")
        found.values = {"pictures": len(maps), "patches": int(np.prod(maps[0].colours.shape[:2])) if maps else 0}
        for component, value in enumerate(np.mean(shares, axis=0) if shares else []):
            found.values[f"variance_share_{component + 1}"] = float(value)
        found.pictures = maps
        return found

    def _tokens(self, inputs: torch.Tensor) -> np.ndarray:
        seen: list[np.ndarray] = []
        capture = Capture(self._anatomy, self._name)
        capture.on_tokens(self._site, lambda tokens, _: seen.append(tokens[0].cpu().numpy()))
        capture.run([Batch(inputs, None, 0)])
        return seen[0]

    def _grid(self, inputs: torch.Tensor, tokens: int) -> tuple[int, int]:
        """Patches are in rows; the picture's proportions say how many."""
        height, width = inputs.shape[2:]
        rows = round((tokens * height / width) ** 0.5)
        if rows * (tokens // max(rows, 1)) != tokens:
            raise UsageError(f"{tokens} patches do not form a grid of {height} x {width} pixels")
        return rows, tokens // rows
