"""Which images a step trains on, augmentation and loading: the draws of an example depend only on its key."""

from collections import Counter

import numpy as np
import pytest
import torch
from image_support import image_recipe, write_folder
from support import built
from timm.data import create_transform
from timm.data.distributed_sampler import RepeatAugSampler

from lapcli.data.images.augmentation import normalise, training_transform
from lapcli.data.images.image_set import FolderImages
from lapcli.data.images.loader import ImageBatches, ImageLoader, Reader, pair_order, seed_everything
from lapcli.data.images.sources import Digits
from lapcli.recipe.vision import Augmentation, ImageSource
from lapcli.runtime.errors import DataError

SOURCE = ImageSource(
    train="builtin",
    validation=0.2,
    augmentation=Augmentation(crop="random_resized", policy="rand-m9-mstd0.5-inc1"),
)


def loader(workers, images=None, source=SOURCE, seed=0, size=8):
    images = images or Digits()
    batches = ImageBatches(len(images), batch=12, group=12, repeats=2, seed=seed)
    reader = Reader(images, training_transform(source, size), size, seed)
    return ImageLoader(
        reader,
        lambda step, micro_step: batches.examples(step, 4 * micro_step, 4),
        micro_steps=3,
        last=(5, 2),
        workers=workers,
    )


def stream(loaded, steps=range(3)):
    found = [loaded.batch(step, micro_step) for step in steps for micro_step in range(3)]
    loaded.close()
    return torch.cat([images for images, _ in found]), torch.cat([labels for _, labels in found])


def test_results_do_not_depend_on_workers():
    expected = stream(loader(0))
    assert expected[0].dtype == torch.uint8
    for workers in (1, 3):
        images, labels = stream(loader(workers))
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])
    assert not torch.equal(stream(loader(0, seed=1))[0], expected[0])
    # Any batch can be read at any time.
    assert torch.equal(stream(loader(2), steps=[2, 1])[0], stream(loader(0), steps=[2, 1])[0])


def test_a_worker_error_is_passed_on_unchanged(tmp_path):
    root = write_folder(tmp_path, {"train": {"a": 10, "b": 10}})
    for path in (root / "train" / "b").iterdir():
        path.write_bytes(b"nothing")
    for workers in (0, 2):
        with pytest.raises(DataError, match=r"^[^\n]*b/\d\.png cannot be decoded[^\n]*$"):
            stream(loader(workers, FolderImages(root / "train")), steps=range(4))


@pytest.mark.parametrize(("policy", "jitter"), [("3a", 0.3), ("rand-m9-mstd0.5-inc1", None)])
def test_transforms_match_timm(policy, jitter):
    """A photograph-sized crop against `create_transform` itself, drawing from the same generators."""
    source = ImageSource(
        train="x", augmentation=Augmentation(crop="random_resized", policy=policy, color_jitter=jitter)
    )
    options = {"auto_augment": policy, "color_jitter": jitter, "interpolation": "bicubic", "re_prob": 0.0}
    stock = create_transform(24, is_training=True, **options)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    from PIL import Image

    image = Image.fromarray(pixels)
    for index in range(20):
        seed_everything(0, 0, index, 0)
        ours = training_transform(source, 24)(image)
        seed_everything(0, 0, index, 0)
        expected = stock(image)
        torch.testing.assert_close(normalise(torch.tensor(ours)[None], source)[0], expected, atol=1e-5, rtol=0)


def test_the_strongest_randaugment_works():
    """timm asks Pillow for 0 bits then, which Pillow refuses since version 13; older versions return black."""
    source = ImageSource(train="x", augmentation=Augmentation(crop="none", flip=0.0, policy="rand-m10-n15-p1.0-inc1"))
    transform = training_transform(source, 8)
    (augment,) = [part for part in transform.transforms if hasattr(part, "ops")]
    (posterise,) = [operation for operation in augment.ops if "Posterize" in operation.name]
    image = Digits().image(3)
    assert not np.asarray(posterise(image)).any()
    for index in range(30):
        seed_everything(0, 0, index, 0)
        transform(image)


def test_the_global_batch_is_the_same_for_one_and_two_processes():
    """Images and targets after augmentation, erasing and mixing."""
    from lapcli.data.images.sources import open_images
    from lapcli.objectives.classification import Classification
    from lapcli.runtime.ranks import World

    batches = {}
    for size, micro_batch in ((1, 8), (2, 8), (2, 2), (1, 16)):
        recipe = image_recipe(train={"micro_batch": micro_batch}, data={"augmentation": {"repeats": 3}})
        data = open_images(recipe.data, 10)
        parts = {}
        for rank in range(size):
            objective = built(Classification, recipe, data, World(rank, size, torch.device("cpu")))
            for micro_step in range(objective.batches.accumulation):
                first = objective.batches.first(micro_step, rank)
                parts[first] = objective.batch(3, micro_step)
        batches[size, micro_batch] = [torch.cat([parts[first][i] for first in sorted(parts)]) for i in (0, 1)]
    expected = batches.pop((1, 8))
    assert len(expected[0]) == 16
    for images, targets in batches.values():
        assert torch.equal(images, expected[0])
        assert torch.equal(targets, expected[1])


def whole(batches, step, batch):
    return batches.examples(step, 0, batch)


def test_an_epoch_has_each_image_at_most_once_and_omits_less_than_a_batch():
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


def test_repeats_are_distributed_over_groups_as_over_gpus_in_timm(monkeypatch):
    """timm's sampler on four GPUs, each with its part of the batch, against our four groups."""
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
