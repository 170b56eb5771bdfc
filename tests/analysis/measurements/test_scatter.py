"""A sample of tokens is the same for every batch size."""

import numpy as np
import torch

from lapcli.analysis.measurements.scatter import TokenSample


def test_sample_is_independent_of_batches_and_restricted_to_its_classes():
    rng = np.random.default_rng(0)
    x, labels = torch.from_numpy(rng.normal(size=(30, 4, 3))), torch.from_numpy(rng.integers(0, 5, 30))

    def sampled(batch):
        sample = TokenSample([1, 3], size=20)
        for first in range(0, 30, batch):
            sample.update(x[first : first + batch], labels[first : first + batch], first)
        return sample.tokens()

    tokens, classes = sampled(30)
    assert len(tokens) == 20
    assert set(classes) == {1, 3}
    for batch in (1, 7):
        np.testing.assert_array_equal(sampled(batch)[0], tokens)
    for token, label in zip(tokens, classes, strict=True):  # each is a token of a sequence of that class
        sequence, _ = np.argwhere((x.numpy() == token).all(axis=2))[0]
        assert labels[sequence] == label
