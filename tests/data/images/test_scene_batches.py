"""Training crops: labels stay with their pixels, draws are keyed, crops show several classes, padding has no label."""

import numpy as np
import pytest
import torch
from scene_support import COLOURS, scene, write_scenes

from lapcli.data.images import scene_batches
from lapcli.data.images.ade20k import IGNORED, open_ade20k
from lapcli.data.images.batches import Example
from lapcli.data.images.scene_batches import SceneReader, choose_crop, distort_colours, resize_short_side

MEAN = (0.5, 0.4, 0.3)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return open_ade20k(str(write_scenes(tmp_path_factory.mktemp("scenes") / "ade", size=(48, 32)))).train


def test_labels_stay_with_their_pixels(scenes, monkeypatch):
    """At scale 1 without colour changes every pixel still has its class's colour, and padding the mean one."""
    monkeypatch.setattr(scene_batches, "distort_colours", lambda pixels: pixels)
    images, labels = SceneReader(scenes, 32, (1.0, 1.0), MEAN, 0).read(
        [Example(e, i, 0) for e in range(3) for i in range(8)]
    )
    colour = {label - 1 if label else IGNORED: values for label, values in COLOURS.items()}
    for image, classes in zip(images.permute(0, 2, 3, 1).numpy(), labels.numpy(), strict=True):
        assert image.shape == (32, 32, 3)
        for value in np.unique(classes):
            assert (image[classes == value] == colour[int(value)]).all()


def test_a_small_scale_is_padded(scenes, monkeypatch):
    monkeypatch.setattr(scene_batches, "distort_colours", lambda pixels: pixels)
    (image,), (classes,) = SceneReader(scenes, 32, (0.5, 0.5), MEAN, 0).read([Example(0, 0, 0)])
    assert (classes[16:] == IGNORED).all()  # 48 x 32 became 24 x 16
    assert (classes[:, 24:] == IGNORED).all()
    assert (image[:, 16:].permute(1, 2, 0).float() - 255 * torch.tensor(MEAN)).abs().max() <= 0.5
    assert (classes[:16, :24] != IGNORED).any()


def test_a_crop_is_a_function_of_its_key(scenes):
    reader = SceneReader(scenes, 16, (0.5, 2.0), MEAN, 7)
    together = reader.read([Example(1, 2, 0), Example(1, 5, 0)])
    assert sum(part.nbytes for part in together) == 2 * reader.example_bytes
    alone = reader.read([Example(1, 5, 0)])
    assert torch.equal(together[0][1], alone[0][0])
    assert torch.equal(together[1][1], alone[1][0])
    assert not torch.equal(reader.read([Example(2, 5, 0)])[0], alone[0])


def test_one_class_is_avoided_where_it_can_be():
    """A quarter of the map is mixed: of crops drawn blindly most would show one class alone."""
    labels = np.zeros((40, 40), dtype=np.uint8)
    labels[28:, 28:] = np.random.default_rng(0).integers(1, 6, size=(12, 12))
    mixed = 0
    for _ in range(60):
        window = choose_crop(labels, 12)
        assert labels[window].shape == (12, 12)
        shares = np.bincount(labels[window].reshape(-1)) / 144
        mixed += shares.max() <= 0.75
    blind = np.mean(
        [np.bincount(labels[y : y + 12, x : x + 12].reshape(-1)).max() <= 108 for y in range(29) for x in range(29)]
    )
    assert blind < 0.3
    assert mixed / 60 > 2 * blind


def test_colours_change_within_their_bounds():
    grey = np.full((4, 4, 3), 100, dtype=np.uint8)
    levels = []
    for _ in range(200):
        found = distort_colours(grey.copy())
        assert found.dtype == np.uint8
        assert np.ptp(found.reshape(-1, 3), axis=1).max() <= 1  # grey has no hue and no saturation
        levels.append(int(found[0, 0, 0]))
    assert min(levels) >= (100 - 32) * 0.5 - 1
    assert max(levels) <= (100 + 32) * 1.5 + 1
    assert 0.15 < np.mean([level == 100 for level in levels]) < 0.35  # neither brightness nor contrast: a quarter


def test_the_short_side_is_what_was_asked_for():
    image, _ = scene(0, (48, 32))
    assert resize_short_side(image, 16).size == (24, 16)
    assert resize_short_side(image.rotate(90, expand=True), 64).size == (64, 96)
