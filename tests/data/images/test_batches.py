"""Which images a step trains on."""

from collections import Counter

import pytest
from timm.data.distributed_sampler import RepeatAugSampler

from lapcli.data.images.batches import ImageBatches, pair_order
from lapcli.runtime.errors import DataError


def whole(batches, step, batch):
    return batches.examples(step, 0, batch)


def test_an_epoch_has_each_image_at_most_once_and_leaves_out_less_than_a_batch():
    batches = ImageBatches(103, batch=10, group=10, repeats=1, seed=0)
    assert batches.steps_per_epoch == 10
    epochs = []
    for epoch in range(2):
        examples = [e for step in range(10) for e in whole(batches, 10 * epoch + step, 10)]
        assert {e.epoch for e in examples} == {epoch}
        assert max(Counter(e.index for e in examples).values()) == 1
        epochs.append([e.index for e in examples])
    assert len(epochs[0]) == 100
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) != set(epochs[1])  # another rest is left out


def test_slices_are_the_whole_and_seeds_differ():
    batches = ImageBatches(100, batch=24, group=8, repeats=3, seed=0)
    parts = [e for first in range(0, 24, 6) for e in batches.examples(2, first, 6)]
    assert parts == whole(batches, 2, 24)
    other = ImageBatches(100, batch=24, group=8, repeats=3, seed=1)
    assert parts != whole(other, 2, 24)


def test_repeats_are_dealt_to_groups_as_timm_deals_them_to_gpus(monkeypatch):
    """timm's sampler on four GPUs, each with its share of the batch, against our four groups."""
    images, gpus, share, repeats = 512, 4, 8, 3
    batches = ImageBatches(images, batch=gpus * share, group=share, repeats=repeats, seed=0)
    monkeypatch.setattr(batches, "_order", lambda epoch: range(images))  # the sampler without shuffling
    samplers = [
        list(RepeatAugSampler(range(images), gpus, gpu, shuffle=False, num_repeats=repeats)) for gpu in range(gpus)
    ]
    for step in range(3):
        for gpu in range(gpus):
            timms = samplers[gpu][step * share : (step + 1) * share]
            ours = [e.index for e in batches.examples(step, gpu * share, share)]
            assert ours == [timms[i] for i in pair_order(share)]
    epoch = [e for step in range(batches.steps_per_epoch) for e in whole(batches, step, 32)]
    copies = Counter((e.index, e.repeat) for e in epoch)
    assert max(copies.values()) == 1  # each copy once, by its number
    assert {e.repeat for e in epoch} == {0, 1, 2}
    for step in range(2):
        for gpu in range(gpus):
            group = [e.index for e in batches.examples(step, gpu * share, share)]
            assert len(set(group)) == len(group)  # copies of an image are never mixed with each other


def test_too_few_images_are_refused():
    with pytest.raises(DataError, match="9 training images, fewer than a batch of 10"):
        ImageBatches(9, batch=10, group=10, repeats=1, seed=0)
