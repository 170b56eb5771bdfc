import numpy as np
import pytest
from image_support import encoded, write_parquet
from PIL import Image
from scene_support import COLOURS, scene, write_scenes

from lapcli.data.images.loader import Example
from lapcli.evaluation import ade20k
from lapcli.evaluation.ade20k import (
    IGNORED,
    SceneReader,
    open_ade20k,
)
from lapcli.runtime.errors import DataError


def test_labels_shift_down_by_one_and_unlabelled_becomes_255(tmp_path):
    root = write_scenes(tmp_path / "ade")
    data = open_ade20k(str(root))
    assert (len(data.train), len(data.validation)) == (8, 3)
    for index in range(3):
        image, labels = data.validation.scene(index)
        expected_image, raw = scene(1000 + index)
        assert (np.asarray(image) == np.asarray(expected_image)).all()
        assert (labels[raw == 0] == IGNORED).all()
        assert (labels[raw > 0] == raw[raw > 0] - 1).all()
        assert {149, IGNORED} <= set(np.unique(labels))
    bad = root / "annotations" / "training" / "0004.png"
    Image.open(bad).convert("RGB").save(bad)
    with pytest.raises(DataError) as error:
        data.train.scene(4)
    assert str(bad) in str(error.value)


def test_the_archive_folder_and_parquet_files_agree(tmp_path):
    write_scenes(tmp_path / "a" / "ADEChallengeData2016")
    folder = open_ade20k(str(tmp_path / "a"))
    for split, count, first in (("train", 8, 0), ("validation", 3, 1000)):
        scenes = [scene(first + number) for number in range(count)]
        columns = {
            "image": [{"bytes": encoded(image), "path": None} for image, _ in scenes],
            "annotation": [{"bytes": encoded(Image.fromarray(labels)), "path": None} for _, labels in scenes],
        }
        write_parquet(tmp_path / "b" / f"{split}-00000-of-00001.parquet", columns)
    tables = open_ade20k(str(tmp_path / "b"))
    assert len(tables.train) == 8
    for index in range(3):
        for one, other in zip(folder.validation.scene(index), tables.validation.scene(index), strict=True):
            assert (np.asarray(one) == np.asarray(other)).all()


def test_without_a_network_the_next_step_is_named():
    with pytest.raises(DataError, match=r"Offline.*ade20k\.data=DIR"):
        open_ade20k("hub:zhoubolei/scene_parse_150")


def test_the_real_subset(test_data):
    data = open_ade20k(str(test_data / "ade20k_subset"))
    assert (len(data.train), len(data.validation)) == (90, 25)
    image, labels = data.validation.scene(0)
    assert labels.shape == (image.height, image.width)
    seen = set()
    for index in range(0, 25, 5):
        seen |= set(np.unique(data.validation.scene(index)[1]))
    assert seen - {IGNORED} <= set(range(150))
    assert {0, 2} <= seen  # wall and sky


MEAN = (0.5, 0.4, 0.3)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return open_ade20k(str(write_scenes(tmp_path_factory.mktemp("scenes") / "ade", size=(48, 32)))).train


def test_labels_stay_with_their_pixels(scenes, monkeypatch):
    """At scale 1 without colour jitter every pixel keeps its class colour, and padding has the mean colour."""
    monkeypatch.setattr(ade20k, "distort_colours", lambda pixels: pixels)
    images, labels = SceneReader(scenes, 32, (1.0, 1.0), MEAN, 0).read(
        [Example(e, i, 0) for e in range(3) for i in range(8)]
    )
    colour = {label - 1 if label else IGNORED: values for label, values in COLOURS.items()}
    for image, classes in zip(images.permute(0, 2, 3, 1).numpy(), labels.numpy(), strict=True):
        assert image.shape == (32, 32, 3)
        for value in np.unique(classes):
            assert (image[classes == value] == colour[int(value)]).all()
