"""The built-in photographs: scikit-learn's two, a temple and a flower, cut into square pieces. They need no network.

Each photograph is cut into cells that do not overlap. A piece's class is the region of the photograph that it lies in;
every second cell, as on a chessboard, is held out, so that held-out pieces share no pixel with the others.
"""

import numpy as np
from PIL import Image

from lapcli.data.images.image_set import ImageSet

CELL = 24  # pixels of a side
REGIONS = (3, 4)  # rows and columns of regions in a photograph
NAMES = ("temple", "flower")


class Photographs(ImageSet):
    def __init__(self, held_out: bool = False) -> None:
        from sklearn.datasets import load_sample_images

        self._photographs = [np.ascontiguousarray(pixels) for pixels in load_sample_images().images]
        self._places, labels = [], []
        for number, pixels in enumerate(self._photographs):
            rows, columns = pixels.shape[0] // CELL, pixels.shape[1] // CELL
            for row in range(rows):
                for column in range(columns):
                    if (row + column) % 2 == held_out:
                        region = row * REGIONS[0] // rows, column * REGIONS[1] // columns
                        self._places.append((number, row * CELL, column * CELL))
                        labels.append((number * REGIONS[0] + region[0]) * REGIONS[1] + region[1])
        classes = [f"{name} {r},{c}" for name in NAMES for r in range(REGIONS[0]) for c in range(REGIONS[1])]
        super().__init__(np.array(labels), classes)

    def encoded(self, index: int) -> bytes:
        return self._pixels(index).tobytes()

    def sizes(self) -> np.ndarray:
        return np.full(len(self), 3 * CELL * CELL)

    def name(self, index: int) -> str:
        number, top, left = self._places[index]
        return f"the {NAMES[number]}'s piece at row {top}, column {left}"

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels(index))

    def _pixels(self, index: int) -> np.ndarray:
        number, top, left = self._places[index]
        return np.ascontiguousarray(self._photographs[number][top : top + CELL, left : left + CELL])
