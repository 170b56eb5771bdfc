"""Operations on crops against torchvision's on uint8 tensors; the complete chain against its transforms of
Pillow images, from the same draws; and bits that depend on the crop alone."""

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as TF
from dino_support import dino_recipe, pillow_transforms
from PIL import Image
from sklearn.datasets import load_sample_images

from lapcli.data.images import colours
from lapcli.data.images.colours import ColourParameters, Recolouring
from lapcli.data.images.crops import GLOBALS, CropReader
from lapcli.data.images.loader import Example, seed_everything
from lapcli.recipe.vision import ImageFiles

PLAIN = ImageFiles(train="x", validation=0.5, mean=[0, 0, 0], std=[1 / 255] * 3)  # leaves values as they are


@pytest.fixture(scope="module")
def crops():
    """N x H x W x C: two photographs, noise, and every grey."""
    photographs = [np.asarray(Image.fromarray(x).resize((64, 64))) for x in load_sample_images().images]
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    greys = np.tile(np.arange(64 * 64).reshape(64, 64, 1).astype(np.uint8), 3)
    return torch.from_numpy(np.stack([*photographs, noise, greys]))


def recoloured(crops_NHWC, drawn, compiled=None):
    """As uint8, N x C x H x W; `drawn` parameters per crop, or one for all."""
    rows = drawn if isinstance(drawn, list) else [drawn] * len(crops_NHWC)
    values = Recolouring(PLAIN, compiled)(
        crops_NHWC, torch.tensor([row.numbers() for row in rows], dtype=torch.float32)
    )
    assert torch.equal(values, values.round())
    return values.to(torch.uint8)


def jitter(number, factor):
    """Only this jitter: -1 matches none."""
    factors = [1.0, 1.0, 1.0, 0.0]
    factors[number] = factor
    return ColourParameters(order=[number, -1, -1, -1], factors=factors)


OPERATIONS = {
    "mirror": (ColourParameters(mirrored=True), TF.hflip),
    "grey": (ColourParameters(grey=True), lambda x: TF.rgb_to_grayscale(x, 3)),
    "solarise": (ColourParameters(solarised=True), lambda x: TF.solarize(x, 128)),
    **{f"brightness {f}": (jitter(0, f), lambda x, f=f: TF.adjust_brightness(x, f)) for f in (0.6, 1.4)},
    **{f"contrast {f}": (jitter(1, f), lambda x, f=f: TF.adjust_contrast(x, f)) for f in (0.6, 1.4)},
    **{f"saturation {f}": (jitter(2, f), lambda x, f=f: TF.adjust_saturation(x, f)) for f in (0.8, 1.2)},
    **{f"hue {f}": (jitter(3, f), lambda x, f=f: TF.adjust_hue(x, f)) for f in (-0.1, 0.5)},
    **{f"blur {f}": (ColourParameters(blur=f), lambda x, f=f: TF.gaussian_blur(x, [9, 9], [f, f])) for f in (0.7, 2.0)},
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_matches_torchvision(name, crops):
    drawn, expected = OPERATIONS[name]
    ours, theirs = recoloured(crops, drawn), expected(crops.permute(0, 3, 1, 2))
    assert (ours.int() - theirs.int()).abs().max() <= 1
    assert (theirs.int() - crops.permute(0, 3, 1, 2).int()).abs().max() > 10  # it does something


def some_drawn(count):
    generator = np.random.default_rng(1)
    return [
        ColourParameters(
            mirrored=bool(n % 2),
            order=generator.permutation(4).tolist() if n % 3 else (),
            factors=[*generator.uniform(0.6, 1.4, 3), generator.uniform(-0.1, 0.1)],
            grey=n % 5 == 1,
            blur=float(generator.uniform(0.1, 2)) if n % 2 else 0.0,
            solarised=n % 4 == 3,
        )
        for n in range(count)
    ]


def test_a_crop_does_not_depend_on_other_crops_bitwise(crops, monkeypatch):
    many, drawn = crops.repeat(6, 1, 1, 1), some_drawn(24)
    together = recoloured(many, drawn)
    alone = torch.cat([recoloured(many[n : n + 1], drawn[n : n + 1]) for n in range(24)])
    assert torch.equal(together, alone)
    monkeypatch.setattr(colours, "VALUES_ON_THE_CPU", 5 * crops[0].numel())
    assert torch.equal(together, recoloured(many, drawn))


class Held:
    """Images that are in memory already."""

    def __init__(self, images):
        self._images = images

    def image(self, index):
        return self._images[index]


def chain_differences(images):
    """(crops, 2): mean and largest difference of each crop from Pillow's, in steps of 255."""
    sizes = {"global_size": 224, "local_size": 96, "locals": 4}
    source = dino_recipe(model={"patch": 16}, data={"crops": sizes}).data
    transforms, reader = pillow_transforms(source), CropReader(Held(images), source, seed=0)
    found = []
    for index, image in enumerate(images):
        read = reader.read([Example(3, index, 0)])
        seed_everything(0, 3, index, 0)
        expected = [
            [transforms[min(n, GLOBALS)](image) for n in range(first, last)] for first, last in ((0, 2), (2, 6))
        ]
        for crops_NHWC, drawn_NK, theirs in zip(read[:2], read[2:], expected, strict=True):
            ours = Recolouring(PLAIN)(crops_NHWC.flatten(0, 1), drawn_NK.flatten(0, 1))
            apart = (ours - torch.stack(theirs).float()).abs().flatten(1)
            found += zip(apart.mean(1).tolist(), apart.amax(1).tolist(), strict=True)
    return np.array(found)


def test_the_chain_on_photographs_matches_pillow():
    found = chain_differences([Image.fromarray(x) for x in load_sample_images().images] * 2)
    assert len(found) == 4 * 6
    assert found[:, 0].max() <= 1
    assert found[:, 1].max() <= 10


@pytest.mark.long
def test_compiled_operations_agree(crops):
    """Compiled to C++ here, and to Triton on a GPU."""
    many, drawn = crops.repeat(6, 1, 1, 1), some_drawn(24)
    compiled = recoloured(many, drawn, lambda function: torch.compile(function, dynamic=True))
    assert (compiled.int() - recoloured(many, drawn).int()).abs().max() <= 1
