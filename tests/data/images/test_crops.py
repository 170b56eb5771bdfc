"""Crops: sizes, the frequencies of each augmentation, and that an image's crops depend on its key alone."""

import numpy as np
import pytest
import torch
from dino_support import dino_recipe
from PIL import Image
from torchvision.transforms import ColorJitter, GaussianBlur, RandomApply, RandomGrayscale, RandomSolarize

from lapcli.data.images.batches import Example
from lapcli.data.images.builtin import CELL, Photographs
from lapcli.data.images.crops import CropReader, crop_transforms
from lapcli.data.images.sources import open_images


def parts(transform):
    """{what is applied: how often} of a transform, as torchvision holds it."""
    found = {}
    for step in transform.transforms:
        if isinstance(step, RandomApply):
            found[type(step.transforms[0])] = step.p
        elif isinstance(step, RandomGrayscale | RandomSolarize):
            found[type(step)] = step.p
    return found


@pytest.mark.parametrize(("mode", "blur"), [("executed", (0.0, 0.9, 0.5)), ("documented", (1.0, 0.1, 0.5))])
def test_probabilities_of_each_crop(mode, blur):
    transforms = crop_transforms(dino_recipe(data={"crops": {"blur": mode}}).data)
    solarised = (0.0, 0.2, 0.0)
    for transform, blurred, often in zip(transforms, blur, solarised, strict=True):
        found = parts(transform)
        assert (found[ColorJitter], found[RandomGrayscale], found[GaussianBlur]) == (0.8, 0.2, blurred)
        assert found.get(RandomSolarize, 0.0) == often


def test_blur_is_applied_as_often_as_it_says():
    """A picture of one white dot: blurred, its brightest pixel is below white. Counted over draws."""
    dot = np.zeros((16, 16, 3), dtype=np.uint8)
    dot[8, 8] = 255
    for mode, expected in (("executed", 0.9), ("documented", 0.1)):
        second = crop_transforms(dino_recipe(data={"crops": {"blur": mode}}).data)[1]
        blur = next(step for step in second.transforms if isinstance(step, RandomApply) and step.p == expected)
        torch.manual_seed(0)
        count = sum(np.asarray(blur(Image.fromarray(dot))).max() < 255 for _ in range(200))
        # A deviation below 0.25 leaves the dot as it is: 8% of those drawn from 0.1 to 2.
        assert count / 200 == pytest.approx(expected * 0.92, abs=0.08)


def test_sizes_and_keys():
    recipe = dino_recipe(data={"crops": {"locals": 3}})
    reader = CropReader(open_images(recipe.data, None).train, recipe.data, seed=1)
    examples = [Example(0, 5, 0), Example(0, 9, 0), Example(1, 5, 0)]
    global_GBCHW, local_QBCHW = reader.read(examples)
    assert (global_GBCHW.shape, local_QBCHW.shape) == ((2, 3, 3, 16, 16), (3, 3, 3, 8, 8))
    assert global_GBCHW.nbytes + local_QBCHW.nbytes == 3 * reader.example_bytes
    torch.manual_seed(123)
    alone = reader.read(examples[1:2])
    assert torch.equal(alone[0][:, 0], global_GBCHW[:, 1])
    assert torch.equal(alone[1][:, 0], local_QBCHW[:, 1])
    assert not torch.equal(global_GBCHW[:, 0], global_GBCHW[:, 2])  # another epoch
    assert not torch.equal(global_GBCHW[0], global_GBCHW[1])


def test_photographs_share_no_pixel_between_their_parts():
    train, held_out = Photographs(), Photographs(held_out=True)
    assert train.classes == held_out.classes
    assert set(train.labels) == set(held_out.labels) == set(range(24))
    places = [set(part._places) for part in (train, held_out)]
    assert not places[0] & places[1]
    for _, top, left in places[0] | places[1]:
        assert top % CELL == left % CELL == 0  # so that pieces are the same or apart
    assert len(places[0] | places[1]) == 2 * (427 // CELL) * (640 // CELL)


def test_a_piece_is_what_the_photograph_shows_there():
    from sklearn.datasets import load_sample_image

    part = Photographs(held_out=True)
    number, top, left = part._places[len(part) - 1]
    expected = load_sample_image("flower.jpg")[top : top + CELL, left : left + CELL]
    assert number == 1
    assert np.array_equal(np.asarray(part.image(len(part) - 1)), expected)
