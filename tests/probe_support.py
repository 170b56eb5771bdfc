"""Backbones whose outputs can be computed by hand, and a simulated rank."""

import torch
from torch import nn

from lapcli.evaluation.features import Backbone, ForwardSettings
from lapcli.runtime.ranks import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


class Pixels(Backbone):
    """The class token is the red channel itself; a patch is its mean colour. `seen` counts the images."""

    def __init__(self, image: int = 8, patch: int = 2, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)):
        self.model, self.name, self.device = nn.Identity(), "pixels", CPU
        self.width, self.patch, self.image, self.mean, self.std = image * image, patch, image, list(mean), list(std)
        self.seen = 0

    def tokens(self, images_BCHW):
        self.seen += len(images_BCHW)
        red_BHW = images_BCHW[:, 0]
        patches_BPD = red_BHW.unfold(1, 2, 2).unfold(2, 2, 2).flatten(1, 2).flatten(2)
        return red_BHW.flatten(1), patches_BPD.repeat(1, 1, self.width // 4)


class Colours(Backbone):
    """Patch tokens are the mean colours of the patches."""

    def __init__(self, patch: int = 4):
        self.model, self.name, self.device = nn.Identity(), "colours", CPU
        self.width, self.patch, self.image, self.mean, self.std = 3, patch, 16, [0.5] * 3, [0.25] * 3

    def tokens(self, images_BCHW):
        patches_BPD = torch.nn.functional.avg_pool2d(images_BCHW, self.patch).flatten(2).transpose(1, 2)
        return patches_BPD.mean(dim=1), patches_BPD


def alone(batch: int = 50) -> ForwardSettings:
    return ForwardSettings(ALONE, batch)


class _Unsummed(ForwardSettings):
    def together(self, rows):
        return rows


def one_of(rank: int, size: int, batch: int = 50) -> ForwardSettings:
    """One process of several; the contributions of the other ranks are left for the test to add."""
    return _Unsummed(World(rank, size, CPU), batch)
