"""Randomness that is a function of a key: what an example draws does not depend on who draws it, or when."""

import hashlib
import random
import struct

import numpy as np
import torch


def seed_everything(*key: int) -> None:
    """Python's, numpy's and torch's CPU generators, all of which timm's and torchvision's transforms draw from."""
    content = hashlib.blake2b(struct.pack(f"{len(key)}q", *key), digest_size=20).digest()
    for_python, for_numpy, for_torch = struct.unpack("<QIQ", content)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch % 2**63)
