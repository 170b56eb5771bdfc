"""The data of an analysis: sequences of text or images, identical for all compared runs.

Shapes: B sequences, T tokens.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor

from lapcli.data.images.augmentation import evaluation_transform, normalise
from lapcli.data.images.image_set import ImageSet, ImageSubset, decode
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.data.text.tokens import TokenBatches, TokenStream
from lapcli.measures.accuracy import evaluation_batches
from lapcli.measures.capture import Batch
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.errors import UsageError
from lapcli.runtime.ranks import World

TOKENS_AT_ONCE = 8192
# As in DINOv3's notebook pca.ipynb, which resizes images to a height of 768 pixels: 48 patches of 16.
ROWS = 48  # rows of patches in a feature map, if the model takes pictures of any size


@dataclass(frozen=True)
class DataOrigin:
    """The source of the examples, for the output."""

    data: str  # in words
    data_sha256: str
    split: str


def class_names(classes: Sequence[str]) -> Sequence[str]:
    """Return readable, distinct names: timm's if the classes are WordNet ids (`n01440764` is `tench`)."""
    if not classes or not all(re.fullmatch(r"n\d{8}", str(name)) for name in classes):
        return classes

    info = ImageNetInfo("imagenet-22k")
    known = set(info.label_names())
    named = [info.label_name_to_description(name).split(",")[0] if name in known else name for name in classes]
    # ImageNet has a bird and a machine that are both called crane.
    return [f"{text} ({name})" if named.count(text) > 1 else text for name, text in zip(classes, named, strict=True)]


class TextExamples:
    """The first complete contexts of a shuffled token stream; the class of a token is the next token."""

    by_token = True  # each token has a class of its own
    class_ids: Sequence[str] = ()

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: Tokenizer,
        origin: DataOrigin,
        *,
        context: int,
        limit: int,
        device: torch.device,
    ) -> None:
        self.origin, self._device, self._tokenizer = origin, device, tokenizer
        # `shuffled`: the first sequences of the stream in its stored order, for every seed and batch size.
        self._sequences = TokenBatches(stream, context=context, batch=1, seed=0, shuffled=True)
        self._count = min(limit, self._sequences.sequences_per_epoch)
        self._batch = max(1, TOKENS_AT_ONCE // context)
        # Decoded only for display: a vocabulary has tens of thousands of tokens.
        self.classes = _TokenNames(tokenizer)

    def __len__(self) -> int:
        return self._count

    def batches(self) -> Iterator[Batch]:
        for first in range(0, self._count, self._batch):
            tokens_BT, targets_BT = self._sequences.sequences(0, first, min(self._batch, self._count - first))
            yield Batch(tokens_BT.to(self._device), targets_BT.to(self._device), first)

    def class_counts(self) -> np.ndarray:
        counts = np.zeros(len(self.classes), dtype=np.int64)
        for first in range(self._count):
            counts += np.bincount(self._sequences.sequences(0, first, 1)[1].numpy()[0], minlength=len(counts))
        return counts


class _TokenNames(Sequence[str]):
    """Tokens as quoted text, so that spaces and line breaks are visible."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return repr(self._tokenizer.decode([index]))


class ImageExamples:
    """Images as in evaluation: resized, cropped, not augmented; `limit` selects a fixed random subset."""

    by_token = False  # each sequence has a class

    def __init__(
        self,
        images: ImageSet,
        source: ImageFiles,
        size: int,
        origin: DataOrigin,
        *,
        limit: int | None,
        batch: int,
        device: torch.device,
        workers: int = 0,
    ) -> None:
        self.origin, self.classes = origin, class_names(images.classes)
        self.class_ids: Sequence[str] = images.classes  # as the data names them
        self._source, self._size, self._device, self._batch, self._workers = source, size, device, batch, workers
        # A random choice: with a folder for each class, the first images would all be of one class.
        chosen = np.sort(np.random.default_rng([0, len(images)]).permutation(len(images))[:limit])
        self._images = ImageSubset(images, chosen)

    def __len__(self) -> int:
        return len(self._images)

    def batches(self) -> Iterator[Batch]:
        alone = World(0, 1, self._device)
        for rows, inputs_BCHW, labels_B in evaluation_batches(
            self._images, self._source, self._size, alone, self._batch, workers=self._workers
        ):
            yield Batch(inputs_BCHW, labels_B, rows.start)

    def class_counts(self) -> np.ndarray:
        return np.bincount(self._images.labels, minlength=len(self.classes))

    def pictures(self, files: Sequence[Path], count: int) -> list[tuple[str, Image.Image]]:
        """Return named images: the files, or `count` images spread evenly over the data if there are none."""
        if files:
            return [(path.name, _read(path)) for path in files]
        spread = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(int))
        return [(self._images.name(int(index)), self._images.image(int(index))) for index in spread]

    def prepare(self, image: Image.Image, patch: int | None) -> tuple[Tensor, Tensor]:
        """Return the model's input, 1 x 3 x H x W, and the same image as bytes, 3 x H x W.

        A model that accepts any size (`patch` pixels per patch) gets the complete image, ROWS patches high.
        """
        if patch is None:
            pixels_CHW = torch.tensor(evaluation_transform(self._source, self._size)(image))
        else:
            height = ROWS * patch
            width = max(1, image.width * ROWS // image.height) * patch
            resized = image.resize((width, height), Image.Resampling.BICUBIC)
            pixels_CHW = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
        return normalise(pixels_CHW[None].to(self._device), self._source), pixels_CHW


def _read(path: Path) -> Image.Image:
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"--image {path} cannot be read ({error.strerror}); name a file with an image") from None


Examples = TextExamples | ImageExamples  # sequences with classes
