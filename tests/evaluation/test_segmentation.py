"""The ADE20K head against plain autograd, windows and resizing against dense computations, and its training."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from probe_support import Colours, alone
from scene_support import write_scenes
from sklearn.metrics import confusion_matrix as sklearns
from sklearn.metrics import jaccard_score

from lapcli.evaluation.ade20k import IGNORED, open_ade20k
from lapcli.evaluation.segmentation import (
    Segmentation,
    classes_at,
    confusion_matrix,
    learning_rate,
    mean_iou,
    slide,
)
from lapcli.evaluation.tasks import Ade20kProtocol

SMALL = Ade20kProtocol(window=16, batch=4, steps=40, lr=0.05, scale=[1.0, 1.0], validate_every=20)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return open_ade20k(str(write_scenes(tmp_path_factory.mktemp("scenes") / "ade", 8, 4, size=(32, 20))))


def test_sliding_a_function_of_single_pixels_changes_nothing():
    image = torch.rand(3, 16, 41)
    logits = slide(lambda x: torch.cat([x, -x], dim=1), image, 16, 10, at_once=3)
    assert torch.allclose(logits, torch.cat([image, -image]), atol=1e-6)


def test_classes_match_fully_resized_logits():
    logits = torch.randn(23, 7, 9)
    dense = F.interpolate(logits[None], (19, 31), mode="bilinear", align_corners=False)[0].argmax(dim=0)
    assert torch.equal(classes_at(logits, (19, 31)), dense)


def test_learning_rate():
    """With 40,000 steps: 0 at the start, 0.9625e-3 at the end of the ramp, 0.9965e-3 right after it, 0 at the end."""
    protocol = Ade20kProtocol()
    assert learning_rate(protocol, 0) == 0
    assert learning_rate(protocol, 750) == pytest.approx(1e-3 * 0.5 * (1 - 750 / 40_000))
    assert learning_rate(protocol, 1499) == pytest.approx(0.962e-3, abs=1e-6)
    assert learning_rate(protocol, 1500) == pytest.approx(0.9965e-3, abs=1e-7)
    assert learning_rate(protocol, 20_000) == pytest.approx(0.5e-3)
    assert learning_rate(protocol, 40_000) == pytest.approx(0, abs=1e-12)


def test_a_step_matches_plain_autograd(data):
    """All images at once, cross entropy summed over labelled pixels and divided by all of them, torch's AdamW."""
    task = Segmentation(Colours(), data, SMALL, alone(batch=3))  # chunks of 3 and 1
    plain = copy.deepcopy(task.head)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=SMALL.lr, weight_decay=SMALL.weight_decay)
    ignored = 0
    for step in range(4):
        reads = [(images, labels) for _, images, labels in task._batches.turns(step)]
        images, labels = (torch.cat(parts) for parts in zip(*reads, strict=True))
        ignored += int((labels == IGNORED).sum())
        features = F.avg_pool2d((images.float() / 255 - 0.5) / 0.25, 4)
        logits = F.interpolate(plain.train()(features, step), (16, 16), mode="bilinear", align_corners=False)
        loss = F.cross_entropy(logits, labels.long(), ignore_index=IGNORED, reduction="sum") / labels.numel()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SMALL, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert task.step(step) == pytest.approx(loss.item(), rel=1e-5)
    assert ignored > 0
    for ours, theirs in zip(task.head.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.allclose(ours.float(), theirs.float(), rtol=1e-4, atol=1e-5)


def test_a_class_that_is_only_predicted_counts_as_missed():
    """Three pixels of class 0, one predicted as class 1: IoU 2/3 and 0/1."""
    confusion = confusion_matrix(torch.tensor([0, 0, 0, 255]), torch.tensor([0, 0, 1, 2]), 3, IGNORED)
    assert confusion.tolist() == [[2, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert mean_iou(confusion) == pytest.approx((2 / 3 + 0) / 2)


@pytest.mark.parametrize("seed", [0, 8, 16])
def test_iou_matches_scikit_learn(seed):
    """From a few pixels, with some classes absent, to many."""
    generator = np.random.default_rng(seed)
    count = 2 + 3 * seed
    labels = torch.from_numpy(generator.choice([0, 1, 2, 3, IGNORED], size=count))
    labels[0] = seed % 4
    predictions = torch.from_numpy(generator.integers(4, size=count))
    kept = labels != IGNORED
    truth, guess = labels[kept].numpy(), predictions[kept].numpy()
    confusion = confusion_matrix(labels, predictions, 4, IGNORED)
    assert (confusion.numpy() == sklearns(truth, guess, labels=range(4))).all()
    there = sorted(set(truth) | set(guess))
    expected = jaccard_score(truth, guess, labels=there, average="macro", zero_division=0)
    assert mean_iou(confusion) == pytest.approx(expected)
