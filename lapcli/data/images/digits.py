"""The built-in images: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels. They need no network."""

import numpy as np
from PIL import Image

from lapcli.data.images.image_set import ImageSet


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
