"""The built-in images, which need no network: scikit-learn's 1,797 handwritten digits and its two photographs.

The digits have 8 x 8 pixels. The photographs, a temple and a flower, are cut into cells that do not overlap. A piece's
class is the region of the photograph that it lies in; every second cell, as on a chessboard, is held out, so that
held-out pieces share no pixel with the others.
"""

import numpy as np
from PIL import Image

from lapcli.data.images.image_set import ImageSet
from lapcli.data.sources import LabelledImageSource


class Digits(ImageSet):
    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # 17 grey levels
        self._pixels = np.ascontiguousarray(np.broadcast_to(grey[..., None], (*grey.shape, 3)))
        super().__init__(digits.target, [str(number) for number in digits.target_names])

    def encoded(self, index: int) -> bytes:
        return self._pixels[index].tobytes()

    def sizes(self) -> np.ndarray:
        return np.full(len(self), self._pixels[0].nbytes)

    def name(self, index: int) -> str:
        return f"scikit-learn's digit {index}"

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index])


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


class DigitsSource(LabelledImageSource):
    name = "digits"

    def images(self) -> tuple[ImageSet, None]:
        return Digits(), None


class PhotographsSource(LabelledImageSource):
    name = "photographs"

    def images(self) -> tuple[ImageSet, ImageSet]:
        return Photographs(), Photographs(held_out=True)


DIGITS = DigitsSource()
PHOTOGRAPHS = PhotographsSource()
