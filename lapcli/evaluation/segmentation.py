"""`ade20k`: segmentation of scenes by a linear head on frozen patch tokens, measured by the mean IoU.

The head is small and its upsampled logits are large (150 classes x 512 x 512 pixels), so they exist for one image at a
time: its loss is differentiated with respect to the logits of its patches, and a single backward through the head
covers all images. The processes divide the images; features and gradients of the patch logits are summed over
processes, and each process updates the head from all of them. Batch norm sees the complete batch, and the result does
not depend on the number of processes.

Shapes: B images, D features, K classes, H x W pixels, h x w patches; N counted pixels or images.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.evaluation.ade20k import CLASSES, IGNORED, SceneData, SceneReader, Scenes, resize_short_side
from lapcli.evaluation.features import Backbone, ForwardSettings, SharedBatches, evenly_spaced
from lapcli.evaluation.tasks import Ade20kProtocol, Score
from lapcli.runtime.errors import UsageError

WARMUP = 1500 / 40_000  # of the steps


def confusion_matrix(labels_N: Tensor, predictions_N: Tensor, classes: int, ignored: int) -> Tensor:
    """Return (K, K) counts: row the true class, column the predicted one; pixels with the ignored label are omitted."""
    labelled_N = labels_N != ignored
    pairs = labels_N[labelled_N].to(torch.int64) * classes + predictions_N[labelled_N].to(torch.int64)
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def mean_iou(confusion_KK: Tensor) -> float:
    """Return the mean intersection / union over the classes in truth or prediction; NaN if there are none."""
    hit_K = confusion_KK.diagonal()
    union_K = confusion_KK.sum(dim=0) + confusion_KK.sum(dim=1) - hit_K
    return float((hit_K.double() / union_K)[union_K > 0].mean())


INITIAL_STD = 0.01
CLASSES_AT_ONCE = 10  # whose logits are resized to the size of a label map, to limit the memory


class LinearHead(nn.Module):
    """Channel dropout, batch norm, 1 x 1 convolution."""

    def __init__(self, width: int, classes: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.classify = nn.Conv2d(width, classes, 1)
        with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU, the same for every device
            torch.manual_seed(seed)
            nn.init.normal_(self.classify.weight, std=INITIAL_STD)
        nn.init.zeros_(self.classify.bias)  # type: ignore[arg-type]
        self._dropout, self._seed = dropout, seed

    def forward(self, features_BDhw: Tensor, step: int = 0) -> Tensor:
        """Return (B, K, h, w) logits. In training the dropped channels are drawn by (seed, step), identically
        on all processes."""
        if self.training and self._dropout:
            # + 1, because the seed itself is used for the initial weights.
            generator = torch.Generator().manual_seed(self._seed + 1 + step)
            kept_BD = torch.rand(features_BDhw.shape[:2], generator=generator) >= self._dropout
            features_BDhw = features_BDhw * (kept_BD / (1 - self._dropout)).to(features_BDhw.device)[:, :, None, None]
        return self.classify(self.norm(features_BDhw))


def learning_rate(protocol: Ade20kProtocol, step: int) -> float:
    """Return the learning rate: a cosine over all steps; during the warm-up, t / warm-up times (1 - t / steps)
    instead."""
    warmup = WARMUP * protocol.steps
    done = step / protocol.steps
    # DINOv3's schedulers.py, with its jump from 0.96 to 0.9965 of the peak where the warm-up ends.
    share = step / warmup * (1 - done) if step < warmup else 0.5 * (1 + math.cos(math.pi * done))
    return protocol.lr * share


def window_size(protocol: Ade20kProtocol, patch: int) -> int:
    return max(1, round(protocol.window / patch)) * patch


def starts(length: int, window: int, stride: int) -> list[int]:
    """Return the start positions of the windows along one side; the last one ends with the image."""
    count = math.ceil(max(0, length - window) / stride) + 1
    return [min(number * stride, length - window) for number in range(count)]


def slide(logits_of: Callable[[Tensor], Tensor], image_CHW: Tensor, window: int, stride: int, at_once: int) -> Tensor:
    """Return (K, H, W) logits of an image at least as large as a window: means over the windows at a pixel."""
    _, height, width = image_CHW.shape
    places = [(y, x) for y in starts(height, window, stride) for x in starts(width, window, stride)]
    total_KHW: Tensor | None = None
    times_HW = torch.zeros(height, width)
    for first in range(0, len(places), at_once):
        corners = places[first : first + at_once]
        coarse_BKhw = logits_of(torch.stack([image_CHW[:, y : y + window, x : x + window] for y, x in corners]))
        if total_KHW is None:
            total_KHW = torch.zeros(coarse_BKhw.shape[1], height, width, device=coarse_BKhw.device)
        for (y, x), coarse_Khw in zip(corners, coarse_BKhw, strict=True):
            total_KHW[:, y : y + window, x : x + window] += _upsampled(coarse_Khw, (window, window))
            times_HW[y : y + window, x : x + window] += 1
    assert total_KHW is not None
    return total_KHW.div_(times_HW.to(total_KHW.device))


def classes_at(logits_KHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the class of each pixel after resizing the logits to `size` (height, width), a few classes at a time."""
    best = torch.full(size, -math.inf, device=logits_KHW.device)
    guesses = torch.zeros(size, dtype=torch.int64, device=logits_KHW.device)
    for first in range(0, len(logits_KHW), CLASSES_AT_ONCE):
        values, classes = _upsampled(logits_KHW[first : first + CLASSES_AT_ONCE], size).max(dim=0)
        # Strict, so that the first of equal classes wins, as in argmax.
        better = values > best
        best, guesses = torch.where(better, values, best), torch.where(better, classes + first, guesses)
    return guesses


def _upsampled(logits_KHW: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(logits_KHW[None], size, mode="bilinear", align_corners=False)[0]


class Segmentation:
    """Trains the head on frozen features and measures it."""

    def __init__(self, backbone: Backbone, data: SceneData, protocol: Ade20kProtocol, how: ForwardSettings) -> None:
        self._protocol, self._how, self._data = protocol, how, data
        self.window = window_size(protocol, backbone.patch)
        self.stride = self.window * 2 // 3  # 341 of 512 pixels, as in DINOv3
        self._backbone = backbone.at_size(self.window)
        self.head = LinearHead(backbone.width, CLASSES, protocol.dropout, protocol.seed).to(backbone.device)
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=protocol.lr, betas=(0.9, 0.999), weight_decay=protocol.weight_decay
        )
        reader = SceneReader(data.train, self.window, protocol.scale, backbone.mean, protocol.seed)
        sizes = {"batch": protocol.batch, "steps": protocol.steps, "seed": protocol.seed}
        self._batches = SharedBatches(reader, len(data.train), how, key="ade20k", **sizes)

    def _features(self, images_BCHW: Tensor) -> Tensor:
        """Return (B, D, h, w) features, in float32 throughout."""
        side = self.window // self._backbone.patch
        _, patches_BPD = self._backbone(images_BCHW)
        return patches_BPD.transpose(1, 2).unflatten(2, (side, side))

    def step(self, step: int) -> float:
        """Update the head once; return the loss before the update.

        The loss is the mean cross entropy over all pixels; those without a label count as 0.
        """
        batch, device, side = self._protocol.batch, self._backbone.device, self.window // self._backbone.patch
        features_BDhw = torch.zeros(batch, self._backbone.width, side, side, device=device)
        labels: dict[int, Tensor] = {}
        for share, images_BCHW, labels_BHW in self._batches.turns(step):
            # Copied into a normal tensor: autograd does not save the backbone's inference tensors for a backward.
            features_BDhw[share.start : share.stop] = self._features(images_BCHW)
            labels.update(zip(share, labels_BHW, strict=True))
        self._how.together(features_BDhw)
        coarse_BKhw = self.head.train()(features_BDhw, step)
        gradient_BKhw, total = torch.zeros_like(coarse_BKhw), 0.0
        for row, labels_HW in labels.items():
            coarse_Khw = coarse_BKhw[row].detach().requires_grad_()
            logits_KHW = _upsampled(coarse_Khw, (self.window, self.window))
            truth_HW = labels_HW.to(device, torch.int64)
            loss = F.cross_entropy(logits_KHW[None], truth_HW[None], ignore_index=IGNORED, reduction="sum")
            # Divided by all pixels of the batch, even ignored pixels, as in DINOv3's loss.py.
            loss = loss / (batch * truth_HW.numel())
            (gradient_BKhw[row],) = torch.autograd.grad(loss, coarse_Khw)
            total += loss.item()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._protocol, step)
        self._optimizer.zero_grad()
        # Rows of other processes are 0 here; after the sum every process makes the same update.
        coarse_BKhw.backward(self._how.together(gradient_BKhw))
        self._optimizer.step()
        return self._how.world.sum([total])[0]

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return the confusion matrix over all validation scenes, on every process."""
        scenes, how = self._data.validation, self._how
        confusion_KK = torch.zeros(CLASSES, CLASSES, dtype=torch.int64, device=self._backbone.device)
        self.head.eval()
        for number in range(how.world.rank, len(scenes), how.world.size):
            confusion_KK += self._confusion(scenes, number)
            if how.progress:
                how.progress("scoring scenes", number + 1, len(scenes))
        return how.together(confusion_KK)

    def _confusion(self, scenes: Scenes, index: int) -> Tensor:
        image, labels_HW = scenes.scene(index)
        resized = torch.from_numpy(np.array(resize_short_side(image, self.window))).permute(2, 0, 1)

        def logits_of(images_BCHW: Tensor) -> Tensor:
            return self.head(self._features(images_BCHW))

        logits_KHW = slide(logits_of, resized, self.window, self.stride, self._how.batch)
        height, width = labels_HW.shape
        classes_HW = classes_at(logits_KHW, (height, width))
        truth_N = torch.from_numpy(labels_HW).to(classes_HW.device).flatten()
        return confusion_matrix(truth_N, classes_HW.flatten(), CLASSES, IGNORED)

    def close(self) -> None:
        self._batches.close()


def measure_ade20k(
    backbone: Backbone, data: SceneData, protocol: Ade20kProtocol, how: ForwardSettings, limit: int | None = None
) -> Score:
    """Train and measure; the score is the best mean IoU of all validations, as the DINOv3 scripts report it."""
    train, validation = (scenes.some(evenly_spaced(len(scenes), limit)) for scenes in (data.train, data.validation))
    data = replace(data, train=train, validation=validation)
    task = Segmentation(backbone, data, protocol, how)
    validations: list[dict[str, float]] = []
    best = -1.0
    loss = math.nan
    try:
        for step in range(protocol.steps):
            loss = task.step(step)
            done = step + 1
            if how.progress:
                how.progress("ade20k head", done, protocol.steps)
            if done % protocol.validate_every == 0 or done == protocol.steps:
                value = mean_iou(task.measure())
                validations.append({"step": done, "miou": value})
                best = max(best, value)  # NaN is never larger
    finally:
        task.close()
    if not validations or math.isnan(best) or best < 0:
        raise UsageError("no pixel of the validation scenes has a label; the mean IoU has nothing to measure")
    details = {
        "window": task.window,
        "stride": task.stride,
        "best_step": next(v["step"] for v in validations if v["miou"] == best),
        "validations": validations,
        "last_loss": loss,
        "training_scenes": len(data.train),
        "protocol": protocol.model_dump(mode="json"),
    }
    return Score(
        "ade20k",
        best,
        len(data.validation),
        None,
        data.description,
        data.identity,
        details,
        conditions=protocol.conditions(),
        note=f"mean IoU, step {details['best_step']:,} the best on the validation scenes themselves",
    )
