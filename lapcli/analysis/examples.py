"""The data of an analysis: sequences of text or images, the same for every run that is compared.

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
from lapcli.data.images.image_set import ImageSet, decode
from lapcli.data.images.loader import Example, ImageLoader, Reader
from lapcli.data.text.batches import TokenBatches
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.data.token_store import TokenStream
from lapcli.measures.capture import Batch
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.errors import UsageError

TOKENS_AT_ONCE = 8192
# As DINOv3's notebook pca.ipynb, which resizes pictures to a height of 768 pixels: 48 patches of 16.
ROWS = 48  # rows of patches in a feature map, if the model takes pictures of any size


@dataclass(frozen=True)
class DataOrigin:
    """Where examples come from, for the output."""

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
    """The first sequences of a shuffled token stream, whole contexts; the class of a token is the next token."""

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
        # `shuffled`: the first sequences of the stream in its stored order, whatever the seed and the batch size.
        self._sequences = TokenBatches(stream, context=context, batch=1, seed=0, shuffled=True)
        self._count = min(limit, self._sequences.sequences_per_epoch)
        self._batch = max(1, TOKENS_AT_ONCE // context)
        # Decoded when a name is shown: a vocabulary has tens of thousands.
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
        self._images, self._source, self._size, self._device = images, source, size, device
        self._transform = evaluation_transform(source, size)
        self._batch, self._workers = batch, workers
        count = len(images) if limit is None else min(limit, len(images))
        # A random choice: with a folder for each class, the first images would all be of one class.
        self._indices = np.sort(np.random.default_rng([0, len(images)]).permutation(len(images))[:count])

    def __len__(self) -> int:
        return len(self._indices)

    def batches(self) -> Iterator[Batch]:
        rounds = -(-len(self) // self._batch)

        def examples(turn: int, _: int) -> list[Example]:
            indices = self._indices[turn * self._batch : (turn + 1) * self._batch]
            # Epoch and repeat are 0: a reader without a seed draws nothing at random.
            return [Example(0, int(index), 0) for index in indices]

        reader = Reader(self._images, self._transform, self._size, None)
        loader = ImageLoader(reader, examples, micro_steps=1, last=(rounds - 1, 0), workers=self._workers)
        try:
            for turn in range(rounds):
                images_BCHW, labels_B = loader.batch(turn, 0)
                inputs = normalise(images_BCHW.to(self._device), self._source)
                yield Batch(inputs, labels_B.to(self._device), turn * self._batch)
        finally:
            # Also if a measurement raises: worker processes are reading ahead.
            loader.close()

    def class_counts(self) -> np.ndarray:
        return np.bincount(self._images.labels[self._indices], minlength=len(self.classes))

    def pictures(self, files: Sequence[Path], count: int) -> list[tuple[str, Image.Image]]:
        """Return named images: the files, or `count` images spread evenly over the data if there are none."""
        if files:
            return [(path.name, _read(path)) for path in files]
        spread = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(int))
        chosen = [int(self._indices[index]) for index in spread]
        return [(self._images.name(index), self._images.image(index)) for index in chosen]

    def prepare(self, image: Image.Image, patch: int | None) -> tuple[Tensor, Tensor]:
        """Return the model's input, 1 x 3 x H x W, and the same picture as bytes, 3 x H x W.

        A model that takes any size (`patch` pixels a patch) gets the whole picture, ROWS patches high.
        """
        if patch is None:
            pixels_CHW = torch.tensor(self._transform(image))
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
