"""Augmentation of crops on the training device: flips, colours, blur, solarising and normalising, many crops at a
time.

Each operation agrees with torchvision's on uint8 tensors to within one level of 255. Between operations values are
whole numbers from 0 to 255, rounded and truncated as in Pillow, but stored in float32. An operation computes each crop
separately, so that its bits do not depend on other crops in the batch.

The host, which has the random draws, selects the crops of each operation and sends their indices with the batch, so
that it never waits for the device.

Shapes: N crops, R crops that share an operation, C = 3 channels, H x W pixels, K random parameters per crop.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lapcli.data.images.augmentation import normalise
from lapcli.recipe.vision import ImageFiles
from lapcli.runtime.devices import to_device

JITTERS = 4  # brightness, contrast, saturation and hue, in torchvision's order
BLUR_WIDTH = 9
SOLARISED_FROM = 128
#: Values processed at a time, with a few float32 copies: to fit into a cache, or to occupy a GPU.
VALUES_ON_THE_CPU, VALUES_ON_A_GPU = 2**18, 2**24

Operation = Callable[[Tensor, Tensor], Tensor]  # crops, and a number for each, R x 1 x 1 x 1 (a blur: 9 of them)


@dataclass(frozen=True)
class ColourParameters:
    """The operations drawn for one crop, in the order in which they are applied."""

    mirrored: bool = False
    order: Sequence[int] = ()  # of the jitters; empty: none of them
    factors: Sequence[float] = (1.0, 1.0, 1.0, 0.0)  # of brightness, contrast and saturation; the shift of the hue
    grey: bool = False
    blur: float = 0.0  # deviation in pixels; 0: none
    solarised: bool = False

    K: ClassVar[int] = 2 * JITTERS + 4

    def numbers(self) -> list[float]:
        """Return the parameter row that is sent with the crop."""
        order = self.order or [-1] * JITTERS
        return [*order, *self.factors, self.mirrored, self.grey, self.blur, self.solarised]


class Recolouring:
    """Augments uint8 crops on any device and normalises them to float32; the draws for each are on the host.

    `compiled` compiles functions of several steps, if the run compiles: each is then one pass over its crops.
    """

    def __init__(self, source: ImageFiles, compiled: Callable[[Any], Any] | None = None) -> None:
        make = compiled or (lambda function: function)
        self._source = source
        self._jitters: list[Operation] = [make(jitter) for jitter in (brightness, contrast, saturation, hue)]
        self._blur: Operation = partial(blurred, weighted=make(weighted))

    def __call__(self, crops_NHWC: Tensor, drawn_NK: Tensor) -> Tensor:
        """Return N x C x H x W, computed in pieces: besides the result, memory holds a few copies of one piece."""
        device, (N, H, W, C) = crops_NHWC.device, crops_NHWC.shape
        out_NCHW = torch.empty(N, C, H, W, device=device)
        values = VALUES_ON_THE_CPU if device.type == "cpu" else VALUES_ON_A_GPU
        at_a_time = max(1, values // (C * H * W))
        for first in range(0, N, at_a_time):
            piece = slice(first, first + at_a_time)
            # A view of the result: the operations below write into it.
            x_NCHW = out_NCHW[piece].copy_(crops_NHWC[piece].permute(0, 3, 1, 2))
            self._apply(x_NCHW, drawn_NK[piece].numpy())
            normalise(x_NCHW, self._source)  # in place: it is float32 already
        return out_NCHW

    def _apply(self, x_NCHW: Tensor, drawn_NK: np.ndarray) -> None:
        """Apply all operations in place. Their indices and numbers are two transfers, which are split on the device."""
        shares = [share for share in self._shares(drawn_NK) if len(share[1])]
        if not shares:
            return
        operations, rows, numbers = zip(*shares, strict=True)
        packed = [np.concatenate([part.reshape(-1) for part in parts]) for parts in (rows, numbers)]
        places, values = to_device(map(torch.from_numpy, packed), x_NCHW.device)
        places_R = places.split([len(part) for part in rows])
        numbers_R = values.split([part.size for part in numbers])
        for number, operation in enumerate(operations):
            # R x 1 x 1 x 1; of a blur 9 x R x 1 x 1 x 1, so that weights[k] has one weight per crop.
            shaped = numbers_R[number].view(*numbers[number].shape, 1, 1, 1)
            # By index, not by a mask, whose row count only the device knows: that would be a host sync.
            changed_RCHW = operation(x_NCHW.index_select(0, places_R[number]), shaped)
            x_NCHW.index_copy_(0, places_R[number], changed_RCHW)

    def _shares(self, drawn_NK: np.ndarray) -> Iterator[tuple[Operation, np.ndarray, np.ndarray]]:
        """Yield each operation in order, the indices of its crops, and its number for each of them."""
        order, factors = drawn_NK[:, :JITTERS], drawn_NK[:, JITTERS : 2 * JITTERS]
        mirrored, greyed, blur, solarised = drawn_NK[:, 2 * JITTERS :].T
        yield mirror, np.flatnonzero(mirrored), mirrored[mirrored > 0]
        # In each turn a crop has one jitter, or none if its order is -1; crops with the same jitter share an operation.
        for turn in range(JITTERS):
            for jitter, operation in enumerate(self._jitters):
                is_next = order[:, turn] == jitter
                yield operation, np.flatnonzero(is_next), factors[is_next, jitter]
        yield grey_levels, np.flatnonzero(greyed), greyed[greyed > 0]
        yield self._blur, np.flatnonzero(blur), blur_weights(blur[blur > 0])
        yield solarise, np.flatnonzero(solarised), solarised[solarised > 0]


def mirror(x_RCHW: Tensor, _: Tensor) -> Tensor:
    return x_RCHW.flip(-1)


def brightness(x_RCHW: Tensor, factor: Tensor) -> Tensor:
    return _whole(x_RCHW * factor)


def contrast(x_RCHW: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance from the mean grey. Sums are of whole numbers, so they do not depend on their order."""
    grey_R1HW = grey(x_RCHW)
    # Sums of rows are exact in float32 (below 2**24), sums of crops are not: rows are added up as int64.
    sums_R = grey_R1HW.sum(dim=(1, 3)).long().sum(dim=1)
    mean_R = torch.floor(sums_R / grey_R1HW[0].numel() + 0.5)
    return _blend(x_RCHW, mean_R[:, None, None, None], factor)


def saturation(x_RCHW: Tensor, factor: Tensor) -> Tensor:
    return _blend(x_RCHW, grey(x_RCHW), factor)


def hue(x_RCHW: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue by `shift` of the circle. With V the largest channel, c = V - the smallest and h the hue in
    sixths, channel n is V - c clamp(2 - |k - 2|, 0, 1) for k = h + (5, 3, 1)[n] modulo 6."""
    red, green, blue = x_RCHW.unbind(1)
    value, chroma = x_RCHW.amax(1), x_RCHW.amax(1) - x_RCHW.amin(1)
    divisor = chroma.clamp_min(1)  # for grey all numerators are 0
    h = torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4)
    h = torch.where(value == red, (green - blue) / divisor, h) + 6 * shift[:, 0]
    channels = [value - chroma * (2 - ((h + n) % 6 - 2).abs()).clamp_(0, 1) for n in (5, 3, 1)]
    return torch.stack(channels, 1).add_(0.5).floor_()


def grey_levels(x_RCHW: Tensor, _: Tensor) -> Tensor:
    return grey(x_RCHW).expand_as(x_RCHW)


def blurred(x_RCHW: Tensor, weights: Tensor, weighted: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
    """Blur along columns, then rows, reflected at the edges; the padding is not compiled, which would take minutes."""
    reach = BLUR_WIDTH // 2
    down_RCHW = weighted(F.pad(x_RCHW, (0, 0, reach, reach), mode="reflect"), weights, -2)
    return weighted(F.pad(down_RCHW, (reach, reach, 0, 0), mode="reflect"), weights, -1).round_()


def weighted(padded: Tensor, weights: Tensor, dimension: int) -> Tensor:
    """Sum shifted copies with weights: elementwise, so that a crop's bits do not depend on other crops."""
    length = padded.shape[dimension] - BLUR_WIDTH + 1
    total = padded.narrow(dimension, 0, length) * weights[0]
    for k in range(1, BLUR_WIDTH):
        total += padded.narrow(dimension, k, length) * weights[k]
    return total


def blur_weights(deviations_R: np.ndarray) -> np.ndarray:
    """Return the weights, BLUR_WIDTH x R, computed on the host so that they are the same for every device."""
    places = np.arange(BLUR_WIDTH, dtype=np.float32) - BLUR_WIDTH // 2
    weights = np.exp(-0.5 * (places[:, None] / deviations_R) ** 2)
    return (weights / weights.sum(0)).astype(np.float32)


def solarise(x_RCHW: Tensor, _: Tensor) -> Tensor:
    return torch.where(x_RCHW >= SOLARISED_FROM, 255 - x_RCHW, x_RCHW)


def grey(x_RCHW: Tensor) -> Tensor:
    """Return grey levels, R x 1 x H x W, with the channel weights of Pillow and torchvision and Pillow's rounding."""
    red, green, blue = x_RCHW.split(1, 1)
    return (red * 0.299 + green * 0.587 + blue * 0.114).add_(0.5).floor_()


def _blend(x_RCHW: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return _whole(x_RCHW * factor + other * (1 - factor))


def _whole(x_RCHW: Tensor) -> Tensor:
    return x_RCHW.clamp_(0, 255).floor_()  # truncated, as Pillow's conversion to a byte
