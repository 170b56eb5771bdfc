"""Crops: sizes, frequencies of each augmentation; masks: counts by the formula, shapes by the rule; both by key."""

import numpy as np
import pytest
import torch
from dino_support import dino_recipe
from PIL import Image

from lapcli.data.images.colours import ColourParameters
from lapcli.data.images.crops import CropReader, crop_kinds, deal_masks, draw
from lapcli.data.images.loader import Example
from lapcli.data.images.sources import open_images


@pytest.mark.parametrize(("mode", "blur"), [("executed", (0.0, 0.9, 0.5)), ("documented", (1.0, 0.1, 0.5))])
def test_augmentations_occur_with_their_probabilities(mode, blur):
    """600 draws: the standard deviation of a fraction is at most 0.02."""
    image, solarised = Image.new("RGB", (20, 16)), (0.0, 0.2, 0.0)
    torch.manual_seed(0)
    for kind, blurred, inverted in zip(
        crop_kinds(dino_recipe(data={"crops": {"blur": mode}}).data), blur, solarised, strict=True
    ):
        drawn = [draw(image, kind)[1] for _ in range(600)]

        def share(is_so, drawn=drawn):
            return sum(map(is_so, drawn)) / len(drawn)

        assert share(lambda d: d.mirrored) == pytest.approx(0.5, abs=0.08)
        assert share(lambda d: len(d.order) > 0) == pytest.approx(0.8, abs=0.07)
        assert share(lambda d: d.grey) == pytest.approx(0.2, abs=0.07)
        for found, wanted in ((share(lambda d: d.blur > 0), blurred), (share(lambda d: d.solarised), inverted)):
            assert found == pytest.approx(wanted, abs=0.08 if 0 < wanted < 1 else 0)
        factors = np.array([d.factors for d in drawn if d.order])
        assert (factors.min(0) >= [0.6, 0.6, 0.8, -0.105]).all()
        assert (factors.max(0) <= [1.4, 1.4, 1.2, 0.1]).all()
        assert {tuple(sorted(d.order)) for d in drawn if d.order} == {(0, 1, 2, 3)}
        assert len({tuple(d.order) for d in drawn if d.order}) == 24


def test_sizes_and_keys():
    recipe = dino_recipe(data={"crops": {"locals": 3}})
    reader = CropReader(open_images(recipe.data, None).train, recipe.data, seed=1)
    examples = [Example(0, 5, 0), Example(0, 9, 0), Example(1, 5, 0)]
    read = reader.read(examples)
    assert [tuple(x.shape) for x in read] == [
        (2, 3, 16, 16, 3),
        (3, 3, 8, 8, 3),
        (2, 3, ColourParameters.K),
        (3, 3, ColourParameters.K),
    ]
    torch.manual_seed(123)
    for alone, among in zip(reader.read(examples[1:2]), read, strict=True):
        assert torch.equal(alone[:, 0], among[:, 1])
        assert not torch.equal(among[:, 0], among[:, 2])  # another epoch
    assert not torch.equal(read[0][0], read[0][1])


PAPER = {"grid": (14, 14), "probability": 0.5, "ratios": (0.1, 0.5)}


def test_mask_counts_of_the_paper_group():
    """448 global crops: 224 are masked, the i-th with int(196 (0.1 + 0.4 i / 224)) patches."""
    masks = deal_masks(448, **PAPER, key=(0, 0, 0))
    found = sorted(masks.sum(1).tolist())
    expected = [0] * 224 + [int(196 * (0.1 + 0.4 * i / 224)) for i in range(1, 225)]
    assert found == pytest.approx(sorted(expected), abs=1)  # the grid's points may round to either side
    assert np.mean(found[224:]) == pytest.approx(58.5, abs=0.1)
    assert found[-1] == 98
