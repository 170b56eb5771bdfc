"""The images of each step, read and augmented ahead of the training loop in worker processes, or without workers.

A batch is a function of (seed, step), independent of processes and workers. An epoch is a permutation of the images
drawn by (seed, epoch), each repeated `repeats` times in a row, truncated to the number of images. The last incomplete
batch is dropped, which affects other images in each epoch. The positions of a batch are assigned to its groups in turn,
as timm's samplers assign them to GPUs, so that copies of an image are in different groups. The random draws of an
example are a function of its key, not of the process or the time.

A batch is requested by its step, never as "the next one": the workers prefetch the batches that will be requested, and
an unexpected request (a resume, another step) restarts them.
"""

import hashlib
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lapcli.data.images.image_set import ImageSet
from lapcli.runtime.environment import usable_cores
from lapcli.runtime.errors import DataError, LapError

BATCHES_AHEAD = 2  # prefetched by each worker
#: Seconds of one core of a cloud machine (AMD EPYC, 2026) to decode a photograph of 500 x 375 pixels, for each crop
#: of it, and for each pixel of a crop: benchmarks/self_supervised.py loader reads 82 images a second with ten crops.
DECODING, CROPPING, PIXEL = 4e-3, 4e-4, 2.5e-8
#: Largest side of crops whose images are small, with negligible decoding time.
SMALL = 64
Transform = Callable[[Any], np.ndarray]  # an image to its pixels, channels first
Request = tuple[int, int]  # step and micro-step


@dataclass(frozen=True)
class Example:
    """One augmented image: everything random about it is drawn by (seed, epoch, index, repeat)."""

    epoch: int
    index: int
    repeat: int


class ImageBatches:
    def __init__(self, images: int, *, batch: int, group: int, repeats: int, seed: int) -> None:
        self.steps_per_epoch = images // batch
        if self.steps_per_epoch == 0:
            raise DataError(
                f"there are {images:,} training images, fewer than a batch of {batch:,}; lower train.batch and "
                "train.micro_batch"
            )
        self._batch, self._repeats, self._seed = batch, repeats, seed
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(images))
        # The position of each example of the global batch in epoch order.
        groups = batch // group
        self._positions = (np.arange(groups)[:, None] + groups * pair_order(group)[None, :]).reshape(-1)

    def examples(self, step: int, first: int, count: int) -> list[Example]:
        """Return examples [first, first + count) of the global batch of `step`."""
        epoch, number = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        examples = []
        for position in self._positions[first : first + count]:
            image, repeat = divmod(number * self._batch + int(position), self._repeats)
            examples.append(Example(epoch, int(order[image]), repeat))
        return examples

    def identity(self, step: int) -> str:
        epoch, number = divmod(step, self.steps_per_epoch)
        return f"batch {number} of {self.steps_per_epoch} of epoch {epoch} (seed {self._seed})"


def seed_everything(*key: int) -> None:
    """Seed Python's, numpy's and torch's CPU generators; timm's and torchvision's transforms draw from all of them."""
    # A hash, since a key has several numbers but a generator takes one seed.
    content = hashlib.blake2b(struct.pack(f"{len(key)}q", *key), digest_size=20).digest()
    # 8 + 4 + 8 bytes: numpy's global generator takes only 32 bits.
    for_python, for_numpy, for_torch = struct.unpack("<QIQ", content)
    random.seed(for_python)
    np.random.seed(for_numpy)
    # Not torch.manual_seed, which would also seed the generators of every GPU.
    torch.default_generator.manual_seed(for_torch % 2**63)


def pair_order(size: int) -> np.ndarray:
    """Return 0, n-1, 1, n-2, ..., where timm's partners i and n - 1 - i are neighbours."""
    order = np.empty(size, dtype=np.int64)
    order[0::2] = np.arange((size + 1) // 2)
    order[1::2] = size - 1 - np.arange(size // 2)
    return order


class Reader:
    """Reads a list of examples as one uint8 tensor and their labels."""

    def __init__(self, images: ImageSet, transform: Transform, size: int, seed: int | None) -> None:
        self._images, self._transform, self._size, self._seed = images, transform, size, seed

    def read(self, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        images_BCHW = np.empty((len(examples), 3, self._size, self._size), dtype=np.uint8)
        for row, example in enumerate(examples):
            image = self._images.image(example.index)
            if self._seed is not None:
                seed_everything(self._seed, example.epoch, example.index, example.repeat)
            images_BCHW[row] = self._transform(image)
        labels_B = torch.from_numpy(self._images.labels[[example.index for example in examples]])
        return torch.from_numpy(images_BCHW), labels_B

    def batch(self, request: Request, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        """Return everything that a worker prepares for a micro-step."""
        return self.read(examples)

    def __getitems__(self, asked: tuple[Request, Sequence[Example]]) -> Any:
        """Make a batch in a DataLoader worker; errors are returned as values: DataLoader would change their message."""
        try:
            return self.batch(*asked)
        except DataError as error:
            return error


class ImageLoader:
    """Loads batches; `examples(step, micro_step)` returns those of a micro-step, and a step has `micro_steps`.

    Batches for a CUDA `device` are pinned in advance, by a thread beside the workers.
    """

    def __init__(
        self,
        reader: Reader,
        examples: Callable[[int, int], list[Example]],
        *,
        micro_steps: int,
        last: Request,
        workers: int,
        device: torch.device | None = None,
    ) -> None:
        self._pins = device is not None and device.type == "cuda"
        self._reader, self._examples, self._micro_steps, self._last = reader, examples, micro_steps, last
        self.workers = workers
        self._ahead: Iterator[Any] | None = None
        self._next: Request | None = None

    def batch(self, step: int, micro_step: int) -> Any:
        """Return the tensors that the reader makes of the batch's examples."""
        if self.workers == 0:
            return self._reader.batch((step, micro_step), self._examples(step, micro_step))
        if self._ahead is None or self._next != (step, micro_step):
            self._start((step, micro_step))
        try:
            read = next(self._ahead)  # type: ignore[arg-type]
        except RuntimeError as error:  # a worker was killed, usually for lack of memory, or of shared memory
            advice = "use fewer with data.workers, or make /dev/shm larger (docker run --shm-size=8g)"
            raise LapError(f"an image worker died ({error}); {advice}") from error
        if isinstance(read, DataError):
            self.close()  # while the error is handled its traceback would keep the workers alive
            raise read
        self._next = self._after((step, micro_step))
        return read

    def close(self) -> None:
        """Stop the workers."""
        self._ahead, self._next = None, None

    def _start(self, first: Request) -> None:
        self.close()
        loader: DataLoader = DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=self._from(first),  # type: ignore[arg-type]
            num_workers=self.workers,
            # The reader returns complete batches; the default would stack their tensors.
            collate_fn=_as_it_is,
            prefetch_factor=BATCHES_AHEAD,
            pin_memory=self._pins,
            # Newer Pythons default to forkserver or spawn, where each worker imports torch and timm for seconds.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
        self._ahead = iter(loader)

    def _from(self, first: Request) -> Iterator[tuple[Request, list[Example]]]:
        request = first
        # (step, micro-step) compares as a pair. Without an end the workers would read batches that nobody requests.
        while request <= self._last:
            yield request, self._examples(*request)
            request = self._after(request)

    def _after(self, request: Request) -> Request:
        step, micro_step = request
        return (step, micro_step + 1) if micro_step + 1 < self._micro_steps else (step + 1, 0)


# A function of the module, since a lambda cannot be pickled for workers that are spawned (macOS).
def _as_it_is(read: Any) -> Any:
    return read


def seconds_to_read(crops: Sequence[int]) -> float:
    """Estimate the core seconds to read an image and its crops of these sizes, for `lap plan`."""
    return DECODING * (max(crops) > SMALL) + sum(CROPPING + PIXEL * size**2 for size in crops)


def count_workers(wanted: int | Literal["auto"], device: torch.device) -> int:
    """Return the number of workers: 0 on the CPU, where the model needs the cores, else by this process's share."""
    if wanted != "auto":
        return wanted
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # One of the cores is reserved for the training process.
    return 0 if device.type == "cpu" else max(1, min(16, usable_cores() // processes - 1))
